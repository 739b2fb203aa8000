"""GatherElementsGrad: the gradient of GatherElements."""

from typing import Any

import numpy as np

from onnxgrad.arguments import check_axis, check_indices
from onnxgrad.op import op
from onnxgrad.schema import Dim, Known
from onnxgrad.tensor_types import Array, Index, Shape, T, accumulator


def _shape_rule(dY: Known, shape: Known, indices: Known, axis: int) -> tuple[Dim, ...] | None:
    return shape.as_shape


def _check(dY: Array, shape: Array, indices: Array, axis: int) -> None:
    dims = shape.tolist()
    if not dims:
        raise ValueError("shape is empty, expected at least one dimension")
    if indices.ndim != len(dims):
        raise ValueError(f"indices has {indices.ndim} dimensions, expected {len(dims)} as shape {dims} has")
    if dY.shape != indices.shape:
        raise ValueError(f"dY has shape {list(dY.shape)}, expected {list(indices.shape)} as indices has")
    axis = check_axis(axis, len(dims))
    for k, (given, limit) in enumerate(zip(indices.shape, dims, strict=True)):
        if k != axis and given > limit:
            raise ValueError(f"indices has {given} elements on axis {k}, expected at most {limit} for shape {dims}")


@op("GatherElementsGrad", outputs="dX", shape=_shape_rule, check=_check)
def gather_elements_grad(dY: T, shape: Shape, indices: Index, axis: int = 0) -> T:
    """Gradient of GatherElements: adds each element of dY into zeros of `shape`, where GatherElements had read it.

    dX[i0, …, indices[i0, …], …] += dY[i0, …], the index standing in for the coordinate along `axis`; repeated
    indices add up, negative ones count from the end. float16 and bfloat16 add up in float32 and round once.
    """
    dims: list[Any] = shape.tolist()
    axis %= len(dims)
    check_indices(indices, dims[axis])
    dX = np.zeros(dims, accumulator(dY.dtype))
    where: list[Any] = list(np.indices(indices.shape, sparse=True))
    where[axis] = indices
    np.add.at(dX, tuple(where), dY.astype(dX.dtype))
    return dX.astype(dY.dtype)
