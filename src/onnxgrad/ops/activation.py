"""ReluGrad, LeakyReluGrad, SigmoidGrad and TanhGrad: gradients that an activation's own result tells."""

import numpy as np

from onnxgrad.op import op
from onnxgrad.schema import Dim, Known, agree
from onnxgrad.tensor_types import T, accumulator


def common_shape(dY: Known, other: Known, name: str) -> tuple[Dim, ...] | None:
    """The shape of both, with all that is known of either."""
    if dY.dims is None or other.dims is None:
        return dY.dims if other.dims is None else other.dims
    if not agree(dY.dims, other.dims):
        raise ValueError(f"dY has shape {list(dY.dims)}, expected {list(other.dims)} as {name} has")
    return tuple(there if here is None else here for here, there in zip(other.dims, dY.dims, strict=True))


def _as_input(dY: Known, X: Known) -> tuple[Dim, ...] | None:
    return common_shape(dY, X, "X")


def _as_result(dY: Known, Y: Known) -> tuple[Dim, ...] | None:
    return common_shape(dY, Y, "Y")


@op("ReluGrad", outputs="dX", shape=_as_input)
def relu_grad(dY: T, X: T) -> T:
    """Gradient of Relu: dX = dY where X > 0, else 0. X may as well be what Relu gave."""
    dX: T = np.where(X > 0, dY, dY.dtype.type(0))
    return dX


@op(
    "LeakyReluGrad",
    outputs="dX",
    shape=lambda dY, Y, alpha: common_shape(dY, Y, "Y"),
)
def leaky_relu_grad(dY: T, Y: T, alpha: float = 0.01) -> T:
    """Gradient of LeakyRelu: dX = dY where Y > 0, else dY · alpha.

    Y is what LeakyRelu gave or, which a negative alpha asks for, what it was given. float16 and bfloat16 compute in
    float32 and round once.
    """
    work = accumulator(dY.dtype)
    small = (dY.astype(work) * work.type(alpha)).astype(dY.dtype)
    dX: T = np.where(Y > 0, dY, small)
    return dX


@op("SigmoidGrad", outputs="dX", shape=_as_result)
def sigmoid_grad(dY: T, Y: T) -> T:
    """Gradient of Sigmoid: dX = dY · Y · (1 - Y), Y being what Sigmoid gave.

    float16 and bfloat16 compute in float32 and round once.
    """
    work = accumulator(Y.dtype)
    y = Y.astype(work)
    dX: T = dY.astype(work) * y * (1 - y)
    return dX.astype(Y.dtype)


@op("TanhGrad", outputs="dX", shape=_as_result)
def tanh_grad(dY: T, Y: T) -> T:
    """Gradient of Tanh: dX = dY · (1 - Y²), Y being what Tanh gave.

    float16 and bfloat16 compute in float32 and round once.
    """
    work = accumulator(Y.dtype)
    y = Y.astype(work)
    dX: T = dY.astype(work) * (1 - y * y)
    return dX.astype(Y.dtype)
