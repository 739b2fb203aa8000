"""GatherGrad: the gradient of Gather."""

import math
from typing import Any

import numpy as np

from onnxgrad.arguments import check_axis, check_indices
from onnxgrad.op import op
from onnxgrad.schema import Dim, Known, agree
from onnxgrad.tensor_types import Index, Shape32, T, accumulator


def _shape_rule(shape: Known, indices: Known, dY: Known, axis: int) -> tuple[Dim, ...] | None:
    dims = shape.as_shape
    if dims is None:
        return None
    if not dims:
        raise ValueError("shape is empty, expected at least one dimension")
    axis = check_axis(axis, len(dims))
    if indices.dims is None or dY.dims is None:
        return dims
    expected = (*dims[:axis], *indices.dims, *dims[axis + 1 :])
    if not agree(dY.dims, expected):
        raise ValueError(
            f"dY has shape {list(dY.dims)}, expected {list(expected)} for shape {list(dims)}, "
            f"indices of shape {list(indices.dims)} and axis {axis}"
        )
    # Around the axis dX has dY's dimensions, so what the shape input leaves open may be known there.
    around = (*dY.dims[:axis], None, *dY.dims[axis + len(indices.dims) :])
    return tuple(there if here is None else here for here, there in zip(dims, around, strict=True))


@op("GatherGrad", outputs="dX", shape=_shape_rule)
def gather_grad(shape: Shape32, indices: Index, dY: T, axis: int = 0) -> T:
    """Gradient of Gather: adds each slice of dY into zeros of `shape`, where Gather had read it.

    dX[…, indices[i], …] += dY[…, i, …] along `axis`; repeated indices add up, negative ones count from the end.
    float16 and bfloat16 add up in float32 and round once. An index outside [-s, s-1] is an error.
    """
    dims: list[int] = shape.tolist()
    axis %= len(dims)
    check_indices(indices, dims[axis])
    outer, size, inner = math.prod(dims[:axis]), dims[axis], math.prod(dims[axis + 1 :])
    dX = np.zeros((outer, size, inner), accumulator(dY.dtype))
    where: Any = (slice(None), indices.ravel())
    np.add.at(dX, where, dY.astype(dX.dtype).reshape(outer, indices.size, inner))
    return dX.astype(dY.dtype).reshape(dims)
