"""GatherGrad: the gradient of Gather."""

from typing import Any

import numpy as np

from onnxgrad.arguments import check_axis, check_indices
from onnxgrad.op import op
from onnxgrad.schema import Dim, Known
from onnxgrad.tensor_types import Array, Index, Shape32, T, accumulator


def _shape_rule(shape: Known, indices: Known, dY: Known, axis: int) -> tuple[Dim, ...] | None:
    spelled = shape.as_shape
    if spelled is None or shape.numbers is not None or indices.dims is None or dY.dims is None:
        return spelled
    # Around the axis dX has dY's dimensions, so what the shape input leaves open may be known there.
    axis = check_axis(axis, len(spelled))
    around: tuple[Dim, ...] = (*dY.dims[:axis], None, *dY.dims[axis + len(indices.dims) :])
    if len(around) != len(spelled):
        raise ValueError(f"dY has {len(dY.dims)} dimensions, expected {len(spelled) - 1 + len(indices.dims)}")
    return tuple(there if here is None else here for here, there in zip(spelled, around, strict=True))


def _check(shape: Array, indices: Array, dY: Array, axis: int) -> None:
    dims = shape.tolist()
    if not dims:
        raise ValueError("shape is empty, expected at least one dimension")
    axis = check_axis(axis, len(dims))
    expected = (*dims[:axis], *indices.shape, *dims[axis + 1 :])
    if dY.shape != expected:
        raise ValueError(
            f"dY has shape {list(dY.shape)}, expected {list(expected)} for shape {dims}, "
            f"indices of shape {list(indices.shape)} and axis {axis}"
        )


@op("GatherGrad", outputs="dX", shape=_shape_rule, check=_check)
def gather_grad(shape: Shape32, indices: Index, dY: T, axis: int = 0) -> T:
    """Gradient of Gather: adds each slice of dY into zeros of `shape`, where Gather had read it.

    dX[…, indices[i], …] += dY[…, i, …] along `axis`; repeated indices add up, negative ones count from the end.
    float16 and bfloat16 add up in float32 and round once. An index outside [-s, s-1] is an error.
    """
    dims: list[Any] = shape.tolist()
    axis %= len(dims)
    check_indices(indices, dims[axis])
    dX = np.zeros(dims, accumulator(dY.dtype))
    where: Any = (slice(None),) * axis + (indices,)
    np.add.at(dX, where, dY.astype(dX.dtype))
    return dX.astype(dY.dtype)
