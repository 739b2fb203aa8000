"""Products of matrices of any size and layout, one or many: by AMX where the processor has it, else by vectors.

starts  where each product's a, b and c begin, a row for each
steps   from row to row and from k to k of a, from k to k and column to column of b, from row to row and column to
        column of c
sizes   rows, columns, depth
bias    one number for each column, or empty
threads how many may help, which decides how the work is cut and not what comes out
"""

from typing import Any

import numpy as np

from onnxgrad.cpu.core.halves import load, store
from onnxgrad.cpu.core.jit import native
from onnxgrad.cpu.core.matmul.amx_matmul import amx_matmul
from onnxgrad.cpu.core.matmul.microkernel import PACKED, Matrix, Panels, Strided, aligned, packed_matrix
from onnxgrad.cpu.core.matmul.microkernel import ROWS as TILE_ROWS
from onnxgrad.cpu.core.matmul.outer import pack_left
from onnxgrad.cpu.core.matmul.store import multiply_onto
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.tensor_types import Array

DEPTH = 512  # numbers along k at a time, about; fixed, since it orders the additions
COLUMNS = 2048  # of the right matrix that are packed at a time
ROWS = 64  # of a task, at most
MANY = 1 << 22  # multiplications of a product from which on threads share it: smaller ones are a task each


@native
def _depth_at_a_time(depth: int) -> int:
    """All of it in equal chunks: a small one at the end would go over the result once more for nothing."""
    chunks = max(1, (depth + DEPTH // 2) // DEPTH)
    return max(1, (depth + chunks - 1) // chunks)


@native
def _packed_rows(a: Strided, rows: int, depth: int, factor: Any) -> Matrix:
    """Rows of the left matrix: one after the other or, where columns stand side by side, in panels."""
    if a.column_step == 1 and factor == 1:
        return Matrix(a.array, a.start, a.row_step)
    packed = np.empty((rows + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS * depth, a.array.dtype)
    row_step = depth
    if a.row_step == 1 and a.column_step != 1:
        pack_left(a.array, a.start, a.column_step, depth, rows, packed)
        row_step = PACKED
    elif a.column_step == 1:  # so that it becomes vector moves
        for i in range(rows):
            for k in range(depth):
                store(packed, i * depth + k, load(a.array, a.start + i * a.row_step + k))
    else:
        for i in range(rows):
            for k in range(depth):
                store(packed, i * depth + k, load(a.array, a.start + i * a.row_step + k * a.column_step))
    if factor != 1:
        for i in range(packed.size):
            store(packed, i, load(packed, i) * factor)
    return Matrix(packed, 0, row_step)


@native
def _task(
    number: int,
    height: int,
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
    """Up to `height` rows of a times all of the packed columns; `is_first`: nothing has been added to c yet."""
    rows, depth, columns = sizes
    first = number * height
    count = min(height, rows - first)
    some = Strided(a.array, a.start + first * a.row_step, a.row_step, a.column_step)
    left = _packed_rows(some, count, depth, factor)
    target = Strided(c.array, c.start + first * c.row_step, c.row_step, c.column_step)
    packed = Panels(right, aligned(right), depth)
    multiply_onto(gemm, left, packed, target, (count, depth, columns), is_first, bias, bias_start)


@native
def _by_vectors(
    which: int,
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
    """One of the products."""
    a_row, a_k, b_k, b_column, c_row, c_column = steps
    rows, columns, depth = sizes
    shared = (rows + 2 * threads - 1) // (2 * threads)
    height = min(ROWS, (shared + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS)
    at_a_time = _depth_at_a_time(depth)
    for column in range(0, columns, COLUMNS):
        n = min(COLUMNS, columns - column)
        for k in range(0, max(depth, 1), at_a_time):  # once, too, if there is nothing to add up
            d = min(at_a_time, depth - k)
            right = packed_matrix(b, starts[which, 1] + column * b_column + k * b_k, b_k, b_column, d, n, scheduler)
            left = Strided(a, starts[which, 0] + k * a_k, a_row, a_k)
            target = Strided(c, starts[which, 2] + column * c_column, c_row, c_column)
            work = (height, left, right, target, (rows, d, n), factor, bias, column, k == 0, gemm)
            parallel(scheduler, (rows + height - 1) // height, _task, work)


@native
def matmul_by_vectors(
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
    """c = factor · a · b + bias, for each row of `starts`."""
    count, work = starts.shape[0], sizes[0] * sizes[1] * sizes[2]
    scale = a.dtype.type(factor)
    if count > 1 and (work < MANY or count >= 4 * threads):
        products = (a, b, c, bias, starts, steps, sizes, scale, 1, gemm, 0)
        parallel(scheduler, count, _by_vectors, products)
        return
    for i in range(count):
        _by_vectors(i, a, b, c, bias, starts, steps, sizes, scale, threads, gemm, scheduler)


@native
def matmul_by_amx(
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
    """The same of float32 numbers; products of numbers that are infinite, or nearly so, are left to vectors."""
    if sizes[2] == 0 or not amx_matmul(a, b, c, bias, starts, steps, sizes, factor, threads, scheduler):
        matmul_by_vectors(a, b, c, bias, starts, steps, sizes, factor, threads, gemm, scheduler)
