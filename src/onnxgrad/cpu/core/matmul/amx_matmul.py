"""Products of float32 matrices by AMX, of any size and layout, one or many.

A task makes some rows and columns of a product, some numbers along k at a time. It packs the matrix of which it needs
fewer panels first, and that stays in the second-level cache; it packs the panels of the other one after the other. So
several tasks pack the same panels, but none waits for another. While AMX multiplies two panels, vector instructions
pack the panel that comes next, or a chunk of one that comes later.
"""

from typing import Any

import numpy as np

from onnxgrad.cpu.core.c_calls import keep
from onnxgrad.cpu.core.halves import load, store, zero
from onnxgrad.cpu.core.jit import native
from onnxgrad.cpu.core.matmul.amx import SLOW, amx_begin, amx_end, multiply_and_pack, multiply_panels
from onnxgrad.cpu.core.matmul.amx_packing import BLOCK_WORDS, PANEL, SIDE, STEP, TERMS, TILE_WORDS, pack_tile
from onnxgrad.cpu.core.matmul.microkernel import CACHE_LINE, Matrix, Strided, aligned
from onnxgrad.cpu.core.matmul.store import begin_rows, put
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.tensor_types import Array

DEPTH = 512  # numbers along k at a time, about; fixed, since it orders the additions
PACKED = 1 << 17  # numbers of the right matrix that a task packs at a time: they stay in the second-level cache
PACKED_WORDS = PACKED // STEP // PANEL * BLOCK_WORDS  # that they take
FEWEST = PANEL  # rows or columns of a task


@native
def _depth_at_a_time(depth: int) -> int:
    """All of it in equal chunks: a small one at the end would go over the result once more for nothing."""
    chunks = max(1, (depth + DEPTH // 2) // DEPTH)
    return ((depth + chunks - 1) // chunks + STEP - 1) // STEP * STEP


def _packer(is_left: int, is_along: int) -> Any:
    """A function that packs up to a panel of lines: rows of the left matrix, or columns of the right one.

    They lie `line` apart, with their numbers along k `step` apart, which is 1 where `is_along`.
    """

    @native
    def pack_lines(
        source: Array, start: int, line: int, step: int, lines: int, depth: int, factor: Any, packed: Array, at: int
    ) -> None:
        edge = np.empty(SIDE * STEP, source.dtype)
        for k in range(0, depth, STEP):
            count = min(STEP, depth - k)
            for half in range(2):
                here, to = start + half * SIDE * line + k * step, at + k // STEP * BLOCK_WORDS + half * TILE_WORDS
                valid = min(SIDE, lines - half * SIDE)
                target = packed.ctypes.data + 4 * to
                if valid == SIDE and count == STEP and (step == 1 or line == 1):
                    apart = line if is_along else step
                    pack_tile(is_left, is_along, source.ctypes.data + 4 * here, apart, factor, target)
                elif valid > 0:
                    _fill_edge(edge, source, here, line, step, valid, count)
                    pack_tile(is_left, is_along, edge.ctypes.data, STEP if is_along else SIDE, factor, target)
                else:
                    for term in range(TERMS):
                        zero(packed, to + 2 * term * TILE_WORDS, to + (2 * term + 1) * TILE_WORDS)
        keep(edge)

    return pack_lines


_pack_left_along, _pack_left, _pack_right_along, _pack_right = (
    _packer(is_left, is_along) for is_left in (1, 0) for is_along in (1, 0)
)
NOTHING, LEFT, RIGHT = 0, 1, 2  # to pack meanwhile


@native
def _pack(
    what: int,
    source: Array,
    start: int,
    line: int,
    step: int,
    lines: int,
    depth: int,
    factor: Any,
    packed: Array,
    at: int,
) -> None:
    """Up to a panel of the left matrix, or of the right one."""
    arguments = source, start, line, step, lines, depth, factor, packed, at
    if what == LEFT:
        if step == 1:
            _pack_left_along(*arguments)
        else:
            _pack_left(*arguments)
    elif step == 1:
        _pack_right_along(*arguments)
    else:
        _pack_right(*arguments)


@native
def _fill_edge(edge: Array, source: Array, here: int, line: int, step: int, valid: int, count: int) -> None:
    """The valid numbers of a tile, and zeros: k side by side if it is so in the source, else the lines."""
    if step == 1:
        for i in range(valid):
            for k in range(count):
                store(edge, i * STEP + k, load(source, here + i * line + k))
            zero(edge, i * STEP + count, (i + 1) * STEP)
        zero(edge, valid * STEP, SIDE * STEP)
    else:
        for k in range(count):
            for i in range(valid):
                store(edge, k * SIDE + i, load(source, here + i * line + k * step))
            zero(edge, k * SIDE + valid, (k + 1) * SIDE)
        zero(edge, count * SIDE, SIDE * STEP)


@native
def _multiply(product: Any, what: int, is_along: bool, is_slow: bool, packing: Any) -> bool:
    """`multiply_panels`, or `multiply_and_pack`; all of memory by address, since a call counts references to arrays."""
    if what == NOTHING:
        return multiply_panels(product)
    if what == LEFT:
        if is_along:
            if is_slow:
                return multiply_and_pack(1, 1, 1, product, packing)
            return multiply_and_pack(1, 1, 0, product, packing)
        if is_slow:
            return multiply_and_pack(1, 0, 1, product, packing)
        return multiply_and_pack(1, 0, 0, product, packing)
    if is_along:
        if is_slow:
            return multiply_and_pack(0, 1, 1, product, packing)
        return multiply_and_pack(0, 1, 0, product, packing)
    if is_slow:
        return multiply_and_pack(0, 0, 1, product, packing)
    return multiply_and_pack(0, 0, 0, product, packing)


@native
def _task(
    number: int,
    a: Array,
    b: Array,
    c: Array,
    bias: Array,
    starts: Array,
    steps: Any,
    sizes: Any,
    factor: Any,
    task_size: Any,
    bad: Array,
) -> None:
    """Some rows and columns of one product.

    A number that has no split makes all sums of its row or column NaN, so the first panels tell of all of them.
    """
    a_row, a_k, b_k, b_column, c_row, c_column = steps
    rows, columns, depth = sizes
    height, width = task_size
    which, rest = divmod(number, (rows + height - 1) // height * ((columns + width - 1) // width))
    column, first = divmod(rest, (rows + height - 1) // height)
    column, first = column * width, first * height
    height, width = min(height, rows - first), min(width, columns - column)
    a_start, b_start = starts[which, 0] + first * a_row, starts[which, 1] + column * b_column
    c_start = starts[which, 2] + first * c_row + column * c_column

    down, across = (height + PANEL - 1) // PANEL, (width + PANEL - 1) // PANEL
    at_a_time = _depth_at_a_time(depth)
    panel_words = at_a_time // STEP * BLOCK_WORDS
    by_columns = across > down and down * panel_words <= PACKED_WORDS  # the side with more panels comes one by one
    left_slots, right_slots = (down, 2) if by_columns else (2, across)
    right = np.empty(right_slots * panel_words + CACHE_LINE, np.int32)
    left = np.empty(left_slots * panel_words + CACHE_LINE, np.int32)
    edge = np.empty(PANEL * PANEL + CACHE_LINE, np.float32)  # for a panel that does not fit c
    right_at, left_at, edge_at = aligned(right), aligned(left), aligned(edge)
    a_at, b_at, c_base, bias_at = a.ctypes.data, b.ctypes.data, c.ctypes.data, bias.ctypes.data
    left_base, right_base = left.ctypes.data + 4 * left_at, right.ctypes.data + 4 * right_at
    edge_base = edge.ctypes.data + 4 * edge_at
    scale, one = np.float32(factor), np.float32(1)
    has_bias, is_finite = bias.size > 0, True
    amx_begin()
    for k in range(0, depth, at_a_time):
        deep = min(at_a_time, depth - k)
        blocks, whole = (deep + STEP - 1) // STEP, deep // STEP
        a_here, b_here = a_start + k * a_k, b_start + k * b_k
        _pack(LEFT, a, a_here, a_row, a_k, min(PANEL, height), deep, scale, left, left_at)
        _pack(RIGHT, b, b_here, b_column, b_k, min(PANEL, width), deep, one, right, right_at)
        for step_number in range(down * across):
            if by_columns:
                j, i = divmod(step_number, down)
            else:
                i, j = divmod(step_number, across)
            slot, right_slot = i % left_slots * panel_words, j % right_slots * panel_words
            valid_rows, valid = min(PANEL, height - i * PANEL), min(PANEL, width - j * PANEL)
            c_at = c_start + i * PANEL * c_row + j * PANEL * c_column
            fits = valid_rows == PANEL and valid == PANEL and c_column == 1
            begin, begin_row, has_begin = c_base + 4 * c_at, c_row, fits and k > 0
            to, to_row = (begin, begin_row) if fits else (edge_base, PANEL)
            if k == 0 and has_bias:
                if fits:
                    begin, begin_row, has_begin = bias_at + 4 * (column + j * PANEL), 0, True
                else:
                    begin_rows(Strided(c, c_at, c_row, c_column), valid_rows, valid, bias, column + j * PANEL)
            product = (
                left_base + 4 * slot, right_base + 4 * right_slot, blocks, to, to_row,
                begin, begin_row, has_begin, i == 0 or j == 0,
            )  # fmt: skip

            # A panel for the next step is packed at once; a panel for later in chunks, one in each step till then.
            what, chunk, chunks = NOTHING, 0, 1
            if by_columns and j == 0 and i + 1 < down:
                what = LEFT
            elif by_columns and j + 1 < across:
                what, chunk, chunks = RIGHT, i if j > 0 else 0, down if j > 0 else 1
            elif not by_columns and i == 0 and j + 1 < across:
                what = RIGHT
            elif not by_columns and i + 1 < down:
                what, chunk, chunks = LEFT, j if i > 0 else 0, across if i > 0 else 1
            # Transposing in small blocks is slow.
            is_slow = chunks >= SLOW and blocks >= SLOW and (what == RIGHT or a_k == 1)
            if not is_slow and chunk > 0:
                what = NOTHING
            if what == LEFT:
                lines, line, step, packing_factor = height - (i + 1) * PANEL, a_row, a_k, scale
                source, packed = a_here + (i + 1) * PANEL * a_row, (i + 1) % left_slots * panel_words
            else:
                lines, line, step, packing_factor = width - (j + 1) * PANEL, b_column, b_k, one
                source, packed = b_here + (j + 1) * PANEL * b_column, (j + 1) % right_slots * panel_words
            # From which block on, and how many; the last chunk has the rest.
            can_overlap = lines >= PANEL and (step == 1 or line == 1)
            at_once = blocks // SLOW if is_slow else whole
            from_block = min(whole, chunk * at_once)
            count = min(whole - from_block, at_once) if can_overlap else 0
            is_last_chunk = not is_slow or chunk == chunks - 1

            packing = (
                (a_at if what == LEFT else b_at) + 4 * (source + from_block * STEP * step),
                line if step == 1 else step, packing_factor,
                (left_base if what == LEFT else right_base) + 4 * (packed + from_block * BLOCK_WORDS), count,
            )  # fmt: skip
            is_finite &= _multiply(product, what if count > 0 else NOTHING, step == 1, is_slow, packing)
            if not fits:
                made, place = Matrix(edge, edge_at, PANEL), Strided(c, c_at, c_row, c_column)
                put(made, place, valid_rows, valid, k > 0 or has_bias)
            done = (from_block + count) * STEP if can_overlap else 0
            if what != NOTHING and is_last_chunk and done < deep:  # the rest, less than a panel or a block
                source, packed = source + done * step, packed + done // STEP * BLOCK_WORDS
                if what == LEFT:
                    _pack(LEFT, a, source, line, step, lines, deep - done, scale, left, left_at + packed)
                else:
                    _pack(RIGHT, b, source, line, step, lines, deep - done, one, right, right_at + packed)
    amx_end()
    keep(left)
    keep(right)
    keep(edge)
    if not is_finite:
        bad[0] = 1


@native
def _task_size(count: int, rows: int, columns: int, depth: int, threads: int) -> Any:
    """Rows and columns of a task: enough tasks for all threads, twice over, and little packed more than once."""
    wanted = (2 * threads + count - 1) // count
    most = max(PANEL, PACKED // _depth_at_a_time(depth) // PANEL * PANEL)
    fewest = (columns + most - 1) // most
    best_across, best_down, many, least = 1, 1, 0, 0
    for across in range(fewest, max(fewest, min(wanted, columns // FEWEST)) + 1):
        down = max(1, min((wanted + across - 1) // across, rows // FEWEST))
        tasks, packed = min(wanted, across * down), across * rows + down * columns
        if tasks > many or (tasks == many and packed < least):
            best_across, best_down, many, least = across, down, tasks, packed
    height, width = (rows + best_down - 1) // best_down, (columns + best_across - 1) // best_across
    return (height + PANEL - 1) // PANEL * PANEL, (width + PANEL - 1) // PANEL * PANEL


@native
def amx_matmul(
    a: Array,
    b: Array,
    c: Array,
    bias: Array,
    starts: Array,
    steps: Any,
    sizes: Any,
    factor: Any,
    threads: int,
    scheduler: int,
) -> bool:
    """c = factor · a · b + bias for each row of `starts`. False if AMX cannot compute it, and c holds anything.

    The arguments are as matmul.py describes them; none of the sizes is 0.
    """
    bad = np.zeros(1, np.int64)
    rows, columns, depth = sizes
    height, width = task_size = _task_size(starts.shape[0], rows, columns, depth, threads)
    tasks = starts.shape[0] * ((rows + height - 1) // height) * ((columns + width - 1) // width)
    parallel(scheduler, tasks, _task, (a, b, c, bias, starts, steps, sizes, factor, task_size, bad))
    return bad[0] == 0
