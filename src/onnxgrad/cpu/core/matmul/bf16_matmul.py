"""Products of float32 matrices whose numbers are rounded to bfloat16 first, and whose sums are float32.

Two numbers that follow each other along k are one word, which AVX-512's instruction for bfloat16 multiplies and adds in
one go: twice as fast as float32. Other processors widen them again, and gain nothing. The arguments are those of
matmul.py; factor · a is rounded, not a.
"""

from typing import Any

import numpy as np

from onnxgrad.cpu.core.halves import bfloat16_pair, load, store
from onnxgrad.cpu.core.jit import native
from onnxgrad.cpu.core.matmul.microkernel import PACKED, Matrix, Panels, Strided, aligned, packed_size
from onnxgrad.cpu.core.matmul.microkernel import ROWS as TILE_ROWS
from onnxgrad.cpu.core.matmul.store import multiply_onto
from onnxgrad.cpu.core.matmul.transpose import transpose
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.vectors import VECTOR_BYTES
from onnxgrad.tensor_types import Array

DEPTH = 1024  # numbers along k at a time; fixed, since it orders the additions
COLUMNS = 2048  # of the right matrix that are packed at a time
ROWS = 64  # of a task
WIDTH = 3 * VECTOR_BYTES // 4  # columns of a panel


@native
def _pack_line(source: Array, start: int, step: int, depth: int, factor: Any, packed: Array, at: int) -> None:
    """The numbers of a line along k as words."""
    if step == 1:  # so that it becomes vector moves
        for k in range(depth // 2):
            first, second = load(source, start + 2 * k) * factor, load(source, start + 2 * k + 1) * factor
            store(packed, at + k, bfloat16_pair(first, second))
    else:
        for k in range(depth // 2):
            first = load(source, start + 2 * k * step) * factor
            second = load(source, start + (2 * k + 1) * step) * factor
            store(packed, at + k, bfloat16_pair(first, second))
    if depth % 2:
        last = load(source, start + (depth - 1) * step) * factor
        store(packed, at + depth // 2, bfloat16_pair(last, 0))


@native
def _pack_words(
    source: Array, start: int, step: int, k: int, depth: int, lines: int, factor: Any, packed: Array, at: int
) -> None:
    """Of lines whose first numbers stand side by side the words of k and k + 1, side by side."""
    here, following = start + k * step, start + min(k + 1, depth - 1) * step
    second = factor * (k + 1 < depth)  # 0 after an odd number of them
    for j in range(lines):
        word = bfloat16_pair(load(source, here + j) * factor, load(source, following + j) * second)
        store(packed, at + j, word)


@native
def _pack_panel(number: int, b: Strided, depth: int, columns: int, packed: Array) -> None:
    """A panel of the right matrix: words [k, column within panel]."""
    first = number * WIDTH
    taken, words = min(WIDTH, columns - first), (depth + 1) // 2
    start, at = b.start + first * b.column_step, aligned(packed) + first * words
    one = b.array.dtype.type(1)
    if b.column_step == 1:
        for k in range(words):
            _pack_words(b.array, start, b.row_step, 2 * k, depth, taken, one, packed, at + k * WIDTH)
    else:
        lines = np.empty(taken * words, np.int32)
        for j in range(taken):
            _pack_line(b.array, start + j * b.column_step, b.row_step, depth, one, lines, j * words)
        transpose(lines, 0, words, taken, words, packed, at, WIDTH)
    for k in range(words):
        for j in range(taken, WIDTH):
            store(packed, at + k * WIDTH + j, 0)


@native
def _packed_rows(a: Strided, rows: int, depth: int, factor: Any) -> Matrix:
    """Rows of the left matrix: one after the other or, where columns stand side by side, in panels."""
    words = (depth + 1) // 2
    packed = np.empty((rows + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS * words, np.int32)
    if a.row_step == 1 and a.column_step != 1:
        line = np.empty(ROWS, np.int32)
        for k in range(words):
            _pack_words(a.array, a.start, a.column_step, 2 * k, depth, rows, factor, line, 0)
            for first in range(0, rows, TILE_ROWS):
                for j in range(TILE_ROWS):  # of known length, so that it becomes one vector move
                    store(packed, first * words + k * TILE_ROWS + j, load(line, first + j))
        return Matrix(packed, 0, PACKED)
    for i in range(rows):
        _pack_line(a.array, a.start + i * a.row_step, a.column_step, depth, factor, packed, i * words)
    return Matrix(packed, 0, words)


@native
def _task(
    number: int,
    a: Strided,
    right: Array,
    c: Strided,
    sizes: Any,
    factor: Any,
    bias: Array,
    bias_start: int,
    is_first: bool,
    gemm: int,
) -> None:
    """Some rows of a times all of the packed columns; `is_first`: nothing has been added to c yet."""
    rows, depth, columns = sizes
    words = (depth + 1) // 2
    first = number * ROWS
    height = min(ROWS, rows - first)
    left = _packed_rows(
        Strided(a.array, a.start + first * a.row_step, a.row_step, a.column_step), height, depth, factor
    )
    packed = Panels(right, aligned(right), words)
    target = Strided(c.array, c.start + first * c.row_step, c.row_step, c.column_step)
    multiply_onto(gemm, left, packed, target, (height, words, columns), is_first, bias, bias_start)


@native
def matmul_of_bf16(
    a: Array,
    b: Array,
    c: Array,
    bias: Array,
    starts: Array,
    steps: Any,
    sizes: Any,
    factor: Any,
    threads: int,
    gemm: int,
    scheduler: int,
) -> None:
    """c = bf16(factor · a) · bf16(b) + bias, for each row of `starts`."""
    a_row, a_k, b_k, b_column, c_row, c_column = steps
    rows, columns, depth = sizes
    scale = a.dtype.type(factor)
    for i in range(starts.shape[0]):
        for column in range(0, columns, COLUMNS):
            n = min(COLUMNS, columns - column)
            for k in range(0, max(depth, 1), DEPTH):  # once, too, if there is nothing to add up
                d = min(DEPTH, depth - k)
                right = np.empty(packed_size(a, (d + 1) // 2, n), np.int32)
                source = Strided(b, starts[i, 1] + column * b_column + k * b_k, b_k, b_column)
                parallel(scheduler, (n + WIDTH - 1) // WIDTH, _pack_panel, (source, d, n, right))
                left = Strided(a, starts[i, 0] + k * a_k, a_row, a_k)
                target = Strided(c, starts[i, 2] + column * c_column, c_row, c_column)
                work = (left, right, target, (rows, d, n), scale, bias, column, k == 0, gemm)
                parallel(scheduler, (rows + ROWS - 1) // ROWS, _task, work)
