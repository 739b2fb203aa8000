"""Activation functions. Where one has a kink, its gradient there is PyTorch's."""

import onnx_ir as ir

from onnxgrad.graph.broadcast import sum_to_shape
from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import no_gradient, nondiff, op, vjp
from onnxgrad.schema import MICROSOFT, OWN


def only_where(condition: Tensor, g: Tensor) -> Tensor:
    """The gradient where the condition holds, else 0; a product takes half the time of Where in onnxruntime."""
    return g * op.CastLike(condition, g)


vjp("Relu", X=lambda g, n: op.ReluGrad(g, n.Y), doc="0 at 0.")
vjp("ReluGrad", domain=MICROSOFT, dY=lambda g, n: op.ReluGrad(g, n.X), X=nondiff)
vjp(
    "LeakyRelu",
    doc="alpha at 0.",
    X=lambda g, n: op.LeakyReluGrad(g, n.X if n.alpha < 0 else n.Y, alpha=n.alpha),
)
vjp("LeakyReluGrad", domain=MICROSOFT, dY=lambda g, n: op.LeakyReluGrad(g, n.Y, alpha=n.alpha), Y=nondiff)
vjp("ThresholdedRelu", X=lambda g, n: only_where(n.alpha < n.X, g), doc="0 at alpha.")
vjp("Shrink", input=lambda g, n: only_where(op.Abs(n.input) > n.lambd, g), doc="0 at lambd and -lambd.")

vjp(
    "PRelu",
    doc="The slope at 0.",
    X=lambda g, n: op.Where(n.X > 0, g, g * n.slope),
    slope=lambda g, n: sum_to_shape(only_where(~(n.X > 0), g * n.X), n.slope),
)


def _below_zero(X: Tensor, derivative: Tensor, other: float) -> Tensor:
    """One derivative where X is not positive, another elsewhere."""
    return op.Where(X > 0, other, derivative)


# The derivatives below zero come from the results, so nothing overflows and a second derivative is one of the operator.
vjp("Elu", X=lambda g, n: g * _below_zero(n.X, n.Y + n.alpha, 1.0), doc="alpha at 0.")
vjp("Celu", X=lambda g, n: g * _below_zero(n.X, n.Y / n.alpha + 1, 1.0))
vjp("Selu", X=lambda g, n: g * _below_zero(n.X, n.Y + n.gamma * n.alpha, n.gamma), doc="gamma · alpha at 0.")

vjp("Sigmoid", X=lambda g, n: op.SigmoidGrad(g, n.Y))
vjp(
    "SigmoidGrad",
    domain=MICROSOFT,
    dY=lambda g, n: op.SigmoidGrad(g, n.Y),
    Y=lambda g, n: g * n.dY * (1 - n.Y * 2),
)
vjp("Tanh", input=lambda g, n: op.TanhGrad(g, n.output))
vjp("TanhGrad", domain=MICROSOFT, dY=lambda g, n: op.TanhGrad(g, n.Y), Y=lambda g, n: g * n.dY * n.Y * -2)
vjp("HardSigmoid", X=lambda g, n: only_where((n.Y > 0) & (n.Y < 1), g * n.alpha), doc="0 at both kinks.")
vjp("Softplus", X=lambda g, n: g * op.Sigmoid(n.X))


def _mish(g: Tensor, n: NodeView) -> Tensor:
    X = n.X
    t = op.Tanh(op.Softplus(X))
    return g * (t + X * op.Sigmoid(X) * (1 - t * t))


def _softsign(g: Tensor, n: NodeView) -> Tensor:
    d = 1 + op.Abs(n.input)
    return g / (d * d)


vjp("HardSwish", X=lambda g, n: op.HardSwishGrad(g, n.X), doc="0 at -3, 1 at 3.")
vjp(
    "HardSwishGrad",
    domain=OWN,
    dY=lambda g, n: op.HardSwishGrad(g, n.X),
    X=lambda g, n: only_where((n.X > -3) & (n.X < 3), g * n.dY / 3),
)
vjp("Mish", X=_mish)
vjp("Softsign", input=_softsign)


def _clip(g: Tensor, n: NodeView) -> Tensor:
    x, low, high = n.input, n.min, n.max
    if _is_hard_tanh(n):
        inside = op.ReluGrad(g, n.output) if _bound(low) == 0 else only_where(n.output > low, g)
        return only_where(n.output < high, inside)
    if low is None or high is None or _in_order(low, high):
        return only_where(x.equals(n.output), g)
    return only_where((x >= low) & (x <= high), g)


def _is_hard_tanh(n: NodeView) -> bool:
    """Whether it is PyTorch's hardtanh or relu6, which are flat at their bounds, and not its clamp, which is not.

    Other exporters do not say, but from 0 to 6 it is ReLU6.
    """
    if n.torch_op:
        return n.torch_op.startswith(("aten.hardtanh", "aten.relu6")) and n.min is not None and n.max is not None
    return _bound(n.min) == 0 and _bound(n.max) == 6


def _bound(x: Tensor | None) -> float | None:
    """The number, if it is a constant one; exporters put casts behind it."""
    value = None if x is None else before_casts(x.value)
    number = None if x is None or value is None else x.builder.constant_of(value)
    return float(number.reshape(())) if number is not None and number.size == 1 else None


def before_casts(value: ir.Value) -> ir.Value:
    """What a value was before it was cast to another type."""
    producer = value.producer()
    while producer is not None and producer.op_type in ("Cast", "CastLike") and producer.inputs[0] is not None:
        value = producer.inputs[0]
        producer = value.producer()
    return value


def _in_order(low: Tensor, high: Tensor) -> bool:
    """Whether the bounds are known, the lower one below."""
    a, b = low.constant, high.constant
    return a is not None and b is not None and bool((a <= b).all())


def _clip_min(g: Tensor, n: NodeView) -> Tensor:
    below = n.input < n.min
    return sum_to_shape(only_where(below if n.max is None else below & (n.min < n.max), g), n.min)


def _clip_max(g: Tensor, n: NodeView) -> Tensor:
    above = n.input > n.max
    return sum_to_shape(only_where(above if n.min is None else above | (n.max < n.min), g), n.max)


vjp(
    "Clip",
    doc="At a bound the gradient goes to the input; if min is above max, to max. ReLU6 and Hardtanh have 0 there.",
    input=_clip,
    min=_clip_min,
    max=_clip_max,
)


no_gradient("Hardmax")
