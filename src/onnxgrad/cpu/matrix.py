"""PermutedMatMul on the CPU: products of matrices that lie in memory in any order; half types widen to float32."""

import math
from collections.abc import Sequence

import numpy as np

from onnxgrad.cpu.core.convert import input_of, narrow, widen, working_copy
from onnxgrad.cpu.core.matmul.launch_matmul import launch_matmul
from onnxgrad.tensor_types import Array

Axes = list[tuple[int, int]]  # size and step in memory of each


def permuted_mat_mul(
    A: Array,
    B: Array,
    bias: Array | None,
    Y: Array,
    alpha: float,
    permA: Sequence[int] | None,
    permB: Sequence[int] | None,
    permY: Sequence[int] | None,
    precision: str,
) -> None:
    if Y.size == 0:
        return
    a, b, offset, result = widen(A), widen(B), input_of(bias, A.dtype), working_copy(Y, A.dtype)
    starts, steps, sizes = _layout(_axes(A, permA), _axes(B, permB), _axes(Y, _undone(permY)))
    is_rounded = result.itemsize == 4 and precision == "bfloat16"
    may_swap = bias is None and not (is_rounded and alpha != 1)  # alpha · A is rounded, and not alpha · B
    if may_swap and steps[5] != 1 and steps[4] == 1:  # the columns stand side by side: transpose all three
        a_row, a_k, b_k, b_column, c_row, c_column = steps
        a, b, starts = b, a, np.ascontiguousarray(starts[:, [1, 0, 2]])
        steps, sizes = (b_column, b_k, a_k, a_row, c_column, c_row), (sizes[1], sizes[0], sizes[2])
    launch_matmul(a, b, result, offset, starts, steps, sizes, float(alpha), is_rounded)
    narrow(result, Y)


def _axes(array: Array, perm: Sequence[int] | None) -> Axes:
    """Of the array in C order, which is what native code gets."""
    axes = [(size, math.prod(array.shape[k + 1 :])) for k, size in enumerate(array.shape)]
    return axes if not perm else [axes[k] for k in perm]


def _undone(perm: Sequence[int] | None) -> list[int] | None:
    return None if not perm else [list(perm).index(k) for k in range(len(perm))]


def _layout(a: Axes, b: Axes, c: Axes) -> tuple[Array, tuple[int, ...], tuple[int, int, int]]:
    """`starts`, `steps` and `sizes`, as core/matmul/matmul.py describes them."""
    (rows, a_row), (depth, a_k), (_, b_k), (columns, b_column) = *a[-2:], *b[-2:]
    (_, c_row), (_, c_column) = c[-2:]
    batches = [(size, _step(a, k), _step(b, k), step) for k, (size, step) in enumerate(c[:-2], -len(c)) if size > 1]
    # Matrices that follow one another and are multiplied with the same one are one matrix.
    while batches and batches[-1][1:] == (rows * a_row, 0, rows * c_row):
        rows *= batches.pop()[0]
    starts = np.zeros((1, 3), np.int64)
    for size, *steps in batches:
        starts = (starts[:, None] + np.arange(size)[:, None] * np.array(steps)).reshape(-1, 3)
    return starts, (a_row, a_k, b_k, b_column, c_row, 1 if columns == 1 else c_column), (rows, columns, depth)


def _step(axes: Axes, k: int) -> int:
    """The step along an axis counted from the last, 0 where it is broadcast."""
    return 0 if -k > len(axes) or axes[k][0] == 1 else axes[k][1]
