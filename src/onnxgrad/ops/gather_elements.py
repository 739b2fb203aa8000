"""GatherElementsGrad: the gradient of GatherElements."""

import numpy as np

from onnxgrad.arguments import check_axis, check_indices
from onnxgrad.op import op
from onnxgrad.schema import Dim, Known, agree
from onnxgrad.tensor_types import Index, Shape, T, accumulator


def _shape_rule(dY: Known, shape: Known, indices: Known, axis: int) -> tuple[Dim, ...] | None:
    dims = shape.as_shape
    if dims is not None and not dims:
        raise ValueError("shape is empty, expected at least one dimension")
    if dims is not None and indices.dims is not None and len(indices.dims) != len(dims):
        raise ValueError(f"indices has {len(indices.dims)} dimensions, expected {len(dims)} as shape {list(dims)} has")
    if dY.dims is not None and indices.dims is not None and not agree(dY.dims, indices.dims):
        raise ValueError(f"dY has shape {list(dY.dims)}, expected {list(indices.dims)} as indices has")
    if dims is None:
        return None
    axis = check_axis(axis, len(dims))
    for k, (given, limit) in enumerate(zip(indices.dims or (), dims, strict=False)):
        if k != axis and isinstance(given, int) and isinstance(limit, int) and given > limit:
            raise ValueError(
                f"indices has {given} elements on axis {k}, expected at most {limit} for shape {list(dims)}"
            )
    return dims


@op("GatherElementsGrad", outputs="dX", shape=_shape_rule)
def gather_elements_grad(dY: T, shape: Shape, indices: Index, axis: int = 0) -> T:
    """Gradient of GatherElements: adds each element of dY into zeros of `shape`, where GatherElements had read it.

    dX[i0, …, indices[i0, …], …] += dY[i0, …], the index standing in for the coordinate along `axis`; repeated
    indices add up, negative ones count from the end. float16 and bfloat16 add up in float32 and round once.
    """
    dims: list[int] = shape.tolist()
    axis %= len(dims)
    check_indices(indices, dims[axis])
    # Where each element of dY goes in dX, counted through in C order.
    target, rest, stride = np.zeros(indices.size, np.int64), np.arange(indices.size), 1
    for k in reversed(range(len(dims))):
        coordinate = indices.ravel() % dims[k] if k == axis else rest % indices.shape[k]
        target, rest, stride = target + coordinate * stride, rest // indices.shape[k], stride * dims[k]
    dX = np.zeros(stride, accumulator(dY.dtype))
    np.add.at(dX, target, dY.astype(dX.dtype).ravel())
    return dX.astype(dY.dtype).reshape(dims)
