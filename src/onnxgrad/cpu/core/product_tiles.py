"""Products of float32 matrices by tiles, of any size and layout, one or many.

A task makes some rows and columns of a product. It packs what it needs of the right matrix, some numbers along k at a
time, which stays in the second-level cache, and multiplies it with one panel of rows of the left one after the other.
So a part of either matrix is packed by several tasks, but none waits for another.
"""

from typing import Any

import numpy as np

from onnxgrad.cpu.core.gemm import CACHE_LINE, aligned
from onnxgrad.cpu.core.halves import load, store, zero
from onnxgrad.cpu.core.jit import native
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.rows import begin_rows, put
from onnxgrad.cpu.core.tiles import (
    BLOCK_WORDS,
    PANEL,
    PARTS,
    SIDE,
    STEP,
    TILE_WORDS,
    begin_tiles,
    end_tiles,
    multiply_panels,
    pack_tile,
)
from onnxgrad.tensor_types import Array

DEPTH = 512  # numbers along k at a time, about; fixed, since it orders the additions
PACKED = 1 << 17  # numbers of the right matrix that a task packs at a time: they stay in the second-level cache
FEWEST = PANEL  # rows or columns of a task
SIDE_BY_SIDE = 4 * PANEL  # rows packed at a time where they, and not the numbers along k, are neighbours in memory


@native
def _depth_at_a_time(depth: int) -> int:
    """All of it in equal parts: a small one at the end would go over the result once more for nothing."""
    parts = max(1, (depth + DEPTH // 2) // DEPTH)
    return ((depth + parts - 1) // parts + STEP - 1) // STEP * STEP


def _packer(is_left: int, is_along: int) -> Any:
    """A function that packs lines: rows of the left matrix, or columns of the right one.

    They lie `line` apart, with their numbers along k `step` apart, which is 1 where `is_along`. Panel after panel of
    lines, with all of k in each, is what comes out.
    """

    @native
    def pack_lines(
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
        edge = np.empty(SIDE * STEP, source.dtype)
        panels, blocks = (lines + PANEL - 1) // PANEL, (depth + STEP - 1) // STEP
        apart = line if is_along else step
        is_apart = step != 1 and line != 1
        # Along what stands side by side in memory: what comes from far comes in time then.
        for outer in range(panels if is_along else blocks):
            for inner in range(blocks if is_along else panels):
                panel, block = (outer, inner) if is_along else (inner, outer)
                count = min(STEP, depth - block * STEP)
                here = start + panel * PANEL * line + block * STEP * step
                to = at + (panel * blocks + block) * BLOCK_WORDS
                for half in range(2):
                    valid = min(SIDE, lines - panel * PANEL - half * SIDE)
                    if valid == SIDE and count == STEP and not is_apart:
                        pack_tile(is_left, is_along, source, here, apart, factor, packed, to)
                    elif valid > 0:
                        _fill_edge(edge, source, here, line, step, valid, count)
                        pack_tile(is_left, is_along, edge, 0, STEP if is_along else SIDE, factor, packed, to)
                    else:
                        for part in range(PARTS):
                            zero(packed, to + 2 * part * TILE_WORDS, to + (2 * part + 1) * TILE_WORDS)
                    here += SIDE * line
                    to += TILE_WORDS

    return pack_lines


_pack_left_along, _pack_left, _pack_right_along, _pack_right = (
    _packer(is_left, is_along) for is_left in (1, 0) for is_along in (1, 0)
)


@native
def _fill_edge(edge: Array, source: Array, here: int, line: int, step: int, valid: int, count: int) -> None:
    """What there is of a tile, and zeros: k side by side if it is so in the source, else the lines."""
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
def _multiply_rows(
    left: Array,
    left_at: int,
    rows: int,
    right: Array,
    right_at: int,
    blocks: int,
    columns: int,
    c: Array,
    start: int,
    row: int,
    column: int,
    accumulate: bool,
    bias: Array,
    bias_at: int,
    edge: Array,
    edge_at: int,
) -> bool:
    """A panel of the left matrix times panels of the right one. `edge` is room for a piece that does not fit c.

    Without `accumulate` sums begin with the bias, if there is one. Gives whether all of them are finite.
    """
    is_finite = True
    has_bias = bias.size > 0 and not accumulate
    for first in range(0, columns, PANEL):
        panel = right_at + first // PANEL * blocks * BLOCK_WORDS
        valid, at = min(PANEL, columns - first), start + first * column
        if rows == PANEL and valid == PANEL and column == 1:
            if has_bias:
                sums = bias, bias_at + first, 0, True
                is_finite &= multiply_panels(left, left_at, right, panel, blocks, c, at, row, *sums)
            else:
                is_finite &= multiply_panels(left, left_at, right, panel, blocks, c, at, row, c, at, row, accumulate)
            continue
        if has_bias:
            begin_rows(c, at, row, column, rows, valid, bias, bias_at + first)
        sums = edge, edge_at, PANEL
        is_finite &= multiply_panels(left, left_at, right, panel, blocks, *sums, *sums, False)
        put(edge, edge_at, PANEL, rows, valid, c, at, row, column, accumulate or has_bias)
    return is_finite


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
    shares: Any,
    bad: Array,
) -> None:
    """Some rows and columns of one product."""
    a_row, a_k, b_k, b_column, c_row, c_column = steps
    rows, columns, depth = sizes
    height, width = shares
    which, piece = divmod(number, (rows + height - 1) // height * ((columns + width - 1) // width))
    column, first = divmod(piece, (rows + height - 1) // height)
    column, first = column * width, first * height
    height, width = min(height, rows - first), min(width, columns - column)
    a_start, b_start = starts[which, 0] + first * a_row, starts[which, 1] + column * b_column
    c_start = starts[which, 2] + first * c_row + column * c_column

    at_a_time = _depth_at_a_time(depth)
    panel_words = at_a_time // STEP * BLOCK_WORDS
    right = np.empty((width + PANEL - 1) // PANEL * panel_words + CACHE_LINE, np.int32)
    # Rows that stand side by side in memory are read several panels at a time.
    at_once = PANEL if a_k == 1 else SIDE_BY_SIDE
    left = np.empty(at_once // PANEL * panel_words + CACHE_LINE, np.int32)
    edge = np.empty(PANEL * PANEL + CACHE_LINE, np.float32)
    right_at, left_at, edge_at = aligned(right), aligned(left), aligned(edge)
    is_finite = True
    begin_tiles()
    for k in range(0, depth, at_a_time):
        deep = min(at_a_time, depth - k)
        blocks = (deep + STEP - 1) // STEP
        at = b_start + k * b_k
        if b_k == 1:
            _pack_right_along(b, at, b_column, b_k, width, deep, np.float32(1), right, right_at)
        else:
            _pack_right(b, at, b_column, b_k, width, deep, np.float32(1), right, right_at)
        for i in range(0, height, PANEL):
            within = i % at_once
            if within == 0:
                lines, at = min(at_once, height - i), a_start + i * a_row + k * a_k
                if a_k == 1:
                    _pack_left_along(a, at, a_row, a_k, lines, deep, np.float32(factor), left, left_at)
                else:
                    _pack_left(a, at, a_row, a_k, lines, deep, np.float32(factor), left, left_at)
            panel = left_at + within // PANEL * blocks * BLOCK_WORDS
            is_finite &= _multiply_rows(
                left, panel, min(PANEL, height - i), right, right_at, blocks, width, c, c_start + i * c_row, c_row,
                c_column, k > 0, bias, column, edge, edge_at,
            )  # fmt: skip
    end_tiles()
    if not is_finite:
        bad[0] = 1


@native
def _shares(count: int, rows: int, columns: int, depth: int, threads: int) -> Any:
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
def tiled_product(
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
    """c = factor · a · b + bias for each row of `starts`. False if it cannot be had so, and c holds anything.

    The arguments are as core/product.py describes them; none of the sizes is 0.
    """
    bad = np.zeros(1, np.int64)
    rows, columns, depth = sizes
    height, width = shares = _shares(starts.shape[0], rows, columns, depth, threads)
    tasks = starts.shape[0] * ((rows + height - 1) // height) * ((columns + width - 1) // width)
    parallel(scheduler, tasks, _task, (a, b, c, bias, starts, steps, sizes, factor, shares, bad))
    return bad[0] == 0
