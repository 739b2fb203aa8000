"""BroadcastGradientArgs: the axes over which a broadcast operator's gradients are summed."""

from collections.abc import Sequence

import numpy as np

from onnxgrad.op import op
from onnxgrad.schema import Dim, Known
from onnxgrad.tensor_types import Array, Shape


def broadcast_axes(a_shape: Sequence[int], b_shape: Sequence[int]) -> tuple[list[int], list[int]]:
    """The axes along which a, and b, were stretched to the broadcast shape, from last to first."""
    rank = max(len(a_shape), len(b_shape))
    a_dims = [-1] * (rank - len(a_shape)) + list(a_shape)  # -1: no such dimension
    b_dims = [-1] * (rank - len(b_shape)) + list(b_shape)
    a_axes, b_axes = [], []
    for axis in range(rank - 1, -1, -1):
        a, b = a_dims[axis], b_dims[axis]
        if a == b:
            continue
        if a == -1 or (a == 1 and b != -1):
            a_axes.append(axis)
        elif b in (1, -1):
            b_axes.append(axis)
        else:
            raise ValueError(
                f"a_shape {list(a_shape)} and b_shape {list(b_shape)} do not broadcast: "
                f"{a} against {b} on axis {axis - rank}"
            )
    return a_axes, b_axes


def _shape_rule(a_shape: Known, b_shape: Known) -> tuple[tuple[Dim], tuple[Dim]]:
    a, b = a_shape.numbers, b_shape.numbers
    if a is None or b is None:
        return (None,), (None,)
    a_axes, b_axes = broadcast_axes(a, b)
    return (len(a_axes),), (len(b_axes),)


def _longest(a_shape: Array, b_shape: Array) -> tuple[int, int]:
    rank = max(a_shape.size, b_shape.size)
    return rank, rank


@op("BroadcastGradientArgs", outputs=("a_axes?", "b_axes?"), shape=_shape_rule, longest=_longest)
def broadcast_gradient_args(a_shape: Shape, b_shape: Shape) -> tuple[Shape, Shape]:
    """The axes to sum a gradient over, to undo the broadcasting of two shapes.

    The shapes are aligned at their last dimension. An axis goes to a_axes where a's dimension is 1 and b's is not, or
    where a has no such dimension; likewise b_axes. Axes count in the broadcast shape and are listed from last to
    first. 0 against 1 is a broadcast; any other difference is an error.
    """
    a_axes, b_axes = broadcast_axes(a_shape.tolist(), b_shape.tolist())
    return np.array(a_axes, np.int64), np.array(b_axes, np.int64)
