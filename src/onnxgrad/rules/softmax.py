"""Softmax and LogSoftmax, and the gradients of their gradients."""

from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import op, vjp
from onnxgrad.schema import MICROSOFT


def _without_hidden_nan(Y: Tensor) -> Tensor:
    """Rows masked altogether are NaN, which ONNX's Attention replaces by a Where: 0 · NaN would bring them back."""
    consumers = [node for node, _ in Y.value.uses()]
    casts = [node.outputs[0] for node in consumers if node.op_type in ("Cast", "Identity")]
    consumers += [node for value in casts for node, _ in value.uses()]
    return op.Where(op.IsNaN(Y), 0, Y) if any(node.op_type == "Where" for node in consumers) else Y


vjp("Softmax", input=lambda g, n: op.SoftmaxGrad_13(g, _without_hidden_nan(n.output), axis=n.axis))
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
