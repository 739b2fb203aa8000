"""Softmax and LogSoftmax, and the gradients of their gradients."""

from onnxgrad.graph.builder import MICROSOFT
from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import op, vjp

vjp("Softmax", input=lambda g, n: op.SoftmaxGrad_13(g, n.output, axis=n.axis))
vjp("LogSoftmax", input=lambda g, n: op.LogSoftmaxGrad_13(g, n.output, axis=n.axis))


def _along(x: Tensor, n: NodeView) -> Tensor:
    return op.ReduceSum(x, [n.axis], keepdims=1)


# dX = Y · (dY - s) with s the sum of dY · Y: in dY this is the same function again.
vjp(
    "SoftmaxGrad_13",
    domain=MICROSOFT,
    dY=lambda g, n: op.SoftmaxGrad_13(g, n.Y, axis=n.axis),
    Y=lambda g, n: g * (n.dY - _along(n.dY * n.Y, n)) - n.dY * _along(g * n.Y, n),
)


def _probability(g: Tensor, n: NodeView) -> Tensor:
    """exp(Y) times the gradient that reaches it."""
    return g * op.Exp(n.Y)


# dX = dY - exp(Y) · the sum of dY.
vjp(
    "LogSoftmaxGrad_13",
    domain=MICROSOFT,
    dY=lambda g, n: g - _along(_probability(g, n), n),
    Y=lambda g, n: -_probability(g, n) * _along(n.dY, n),
)
