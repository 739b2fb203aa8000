"""SoftmaxGrad_13 and LogSoftmaxGrad_13: the gradients of Softmax and LogSoftmax, since opset 13 along one axis."""

import numpy as np

from onnxgrad.arguments import check_axis
from onnxgrad.op import op
from onnxgrad.schema import Dim, Known, agree
from onnxgrad.tensor_types import T, accumulator


def _shape_rule(dY: Known, Y: Known, axis: int) -> tuple[Dim, ...] | None:
    if dY.dims is None or Y.dims is None:
        return dY.dims if Y.dims is None else Y.dims
    if not agree(dY.dims, Y.dims):
        raise ValueError(f"dY has shape {list(dY.dims)}, expected {list(Y.dims)} as Y has")
    if not Y.dims:
        raise ValueError("Y is a scalar, expected at least one dimension")
    check_axis(axis, len(Y.dims))
    return tuple(there if here is None else here for here, there in zip(Y.dims, dY.dims, strict=True))


@op("SoftmaxGrad_13", outputs="dX", shape=_shape_rule)
def softmax_grad_13(dY: T, Y: T, axis: int = -1) -> T:
    """Gradient of Softmax: dX = Y · (dY - sum of dY · Y along `axis`), Y being what Softmax gave.

    float16 and bfloat16 compute in float32 and round once.
    """
    dtype = accumulator(Y.dtype)
    g, y = dY.astype(dtype), Y.astype(dtype)
    dX: T = y * (g - np.sum(g * y, axis, keepdims=True))
    return dX.astype(Y.dtype)


@op("LogSoftmaxGrad_13", outputs="dX", shape=_shape_rule)
def log_softmax_grad_13(dY: T, Y: T, axis: int = -1) -> T:
    """Gradient of LogSoftmax: dX = dY - exp(Y) · sum of dY along `axis`, Y being what LogSoftmax gave.

    float16 and bfloat16 compute in float32 and round once.
    """
    dtype = accumulator(Y.dtype)
    g, y = dY.astype(dtype), Y.astype(dtype)
    dX: T = g - np.exp(y) * np.sum(g, axis, keepdims=True)
    return dX.astype(Y.dtype)
