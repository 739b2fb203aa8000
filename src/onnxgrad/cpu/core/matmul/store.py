"""Rows of a product on their way into memory."""

from typing import Any

import numpy as np

from onnxgrad.cpu.core.halves import load, store
from onnxgrad.cpu.core.jit import native
from onnxgrad.cpu.core.matmul.microkernel import Matrix, Panels, Strided, multiply
from onnxgrad.tensor_types import Array


@native
def begin_rows(c: Strided, rows: int, columns: int, bias: Array, bias_start: int) -> None:
    """c[i, j] = bias[j]."""
    if c.column_step == 1:  # so that it becomes vector moves
        for i in range(rows):
            for j in range(columns):
                store(c.array, c.start + i * c.row_step + j, load(bias, bias_start + j))
        return
    for i in range(rows):
        for j in range(columns):
            store(c.array, c.start + i * c.row_step + j * c.column_step, load(bias, bias_start + j))


@native
def put(product: Matrix, c: Strided, rows: int, columns: int, accumulate: bool) -> None:
    """c[i, j] (+)= product[i, j]."""
    for i in range(rows):
        for j in range(columns):
            at = c.start + i * c.row_step + j * c.column_step
            new = load(product.array, product.start + i * product.row_step + j)
            store(c.array, at, load(c.array, at) + new if accumulate else new)


@native
def multiply_onto(
    gemm: int, left: Matrix, right: Panels, c: Strided, sizes: Any, is_first: bool, bias: Array, bias_start: int
) -> None:
    """c (+)= left · right, for packed matrices; `is_first`: c begins with the bias, if there is one, else with 0."""
    rows, depth, columns = sizes
    accumulate = not is_first
    if is_first and bias.size > 0:
        begin_rows(c, rows, columns, bias, bias_start)
        accumulate = True
    if c.column_step == 1:
        multiply(gemm, left, right, Matrix(c.array, c.start, c.row_step), (rows, depth, columns), accumulate)
        return
    product = Matrix(np.empty(rows * columns, c.array.dtype), 0, columns)
    multiply(gemm, left, right, product, (rows, depth, columns), False)
    put(product, c, rows, columns, accumulate)
