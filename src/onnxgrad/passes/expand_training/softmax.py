"""Softmax as opsets before 13 have it: along an axis and all after it, as if they were one."""

from onnxgrad.graph.builder import op
from onnxgrad.graph.tensor import Tensor
from onnxgrad.passes.expand_training.registry import expands


def _is_last(x: Tensor, axis: int) -> bool:
    return axis == -1 or (x.shape is not None and axis == len(x.shape) - 1)


def flat_softmax(op_type: str, x: Tensor, axis: int) -> Tensor:
    """Softmax or LogSoftmax."""
    if _is_last(x, axis):
        return getattr(op, op_type)(x, axis=-1)  # type: ignore[no-any-return]
    return op.Reshape(getattr(op, op_type)(op.Flatten(x, axis=axis), axis=-1), op.Shape(x), allowzero=1)  # type: ignore[no-any-return]


def softmax_gradient(op_type: str, dY: Tensor, Y: Tensor, axis: int) -> Tensor:
    """By SoftmaxGrad_13 or LogSoftmaxGrad_13."""
    if _is_last(dY, axis):
        return getattr(op, op_type)(dY, Y, axis=-1)  # type: ignore[no-any-return]
    flat = getattr(op, op_type)(op.Flatten(dY, axis=axis), op.Flatten(Y, axis=axis), axis=-1)
    return op.Reshape(flat, op.Shape(dY), allowzero=1)  # type: ignore[no-any-return]


@expands("SoftmaxGrad")
def _softmax_grad(dY: Tensor, Y: Tensor, *, axis: int = 1) -> Tensor:
    return softmax_gradient("SoftmaxGrad_13", dY, Y, axis)


@expands("LogSoftmaxGrad")
def _log_softmax_grad(dY: Tensor, X: Tensor, *, axis: int = 1) -> Tensor:
    return softmax_gradient("LogSoftmaxGrad_13", dY, X, axis)  # though it is called X, it is LogSoftmax's output
