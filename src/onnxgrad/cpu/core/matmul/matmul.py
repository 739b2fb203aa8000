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
from onnxgrad.cpu.core.matmul.microkernel import Matrix, Panels, Strided, aligned, packed_matrix
from onnxgrad.cpu.core.matmul.store import multiply_onto
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.tensor_types import Array

DEPTH = 256  # numbers along k at a time; fixed, since it orders the additions
COLUMNS = 4096  # of the right matrix that are packed at a time
ROWS = 64  # of a task


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
    first = number * ROWS
    height = min(ROWS, rows - first)
    left = np.empty(height * depth, a.array.dtype)
    here = a.start + first * a.row_step
    for i in range(height):
        for k in range(depth):
            store(left, i * depth + k, load(a.array, here + i * a.row_step + k * a.column_step) * factor)
    target = Strided(c.array, c.start + first * c.row_step, c.row_step, c.column_step)
    some, packed = Matrix(left, 0, depth), Panels(right, aligned(right), depth)
    multiply_onto(gemm, some, packed, target, (height, depth, columns), is_first, bias, bias_start)


@native
def _by_vectors(
    a: Array,
    b: Array,
    c: Array,
    bias: Array,
    at: Any,
    steps: Any,
    sizes: Any,
    factor: Any,
    gemm: int,
    scheduler: int,
) -> None:
    a_start, b_start, c_start = at
    a_row, a_k, b_k, b_column, c_row, c_column = steps
    rows, columns, depth = sizes
    for column in range(0, columns, COLUMNS):
        n = min(COLUMNS, columns - column)
        for k in range(0, max(depth, 1), DEPTH):  # once, too, if there is nothing to add up
            d = min(DEPTH, depth - k)
            right = packed_matrix(b, b_start + column * b_column + k * b_k, b_k, b_column, d, n, scheduler)
            left, target = (
                Strided(a, a_start + k * a_k, a_row, a_k),
                Strided(c, c_start + column * c_column, c_row, c_column),
            )
            work = (left, right, target, (rows, d, n), factor, bias, column, k == 0, gemm)
            parallel(scheduler, (rows + ROWS - 1) // ROWS, _task, work)


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
    for i in range(starts.shape[0]):
        at = starts[i, 0], starts[i, 1], starts[i, 2]
        _by_vectors(a, b, c, bias, at, steps, sizes, factor, gemm, scheduler)


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
