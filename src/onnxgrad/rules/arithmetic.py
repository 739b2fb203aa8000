"""Operators of numbers, element by element, with broadcasting."""

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import no_gradient, nondiff, op, vjp
from onnxgrad.rules.activation import before_casts, only_where
from onnxgrad.rules.registry import Function

vjp("Add", broadcast=True, A=lambda g, n: g, B=lambda g, n: g)
vjp("Sub", broadcast=True, A=lambda g, n: g, B=lambda g, n: -g)
vjp("Mul", broadcast=True, A=lambda g, n: g * n.B, B=lambda g, n: g * n.A)
vjp("Div", broadcast=True, A=lambda g, n: g / n.B, B=lambda g, n: -g * n.C / n.B)
vjp("Sum", broadcast=True, data_0=lambda g, n, k: g)
vjp("Mean", broadcast=True, data_0=lambda g, n, k: g / len(n.data_0))
vjp(
    "Where",
    broadcast=True,
    condition=nondiff,
    X=lambda g, n: op.Where(n.condition, g, 0),
    Y=lambda g, n: op.Where(n.condition, 0, g),
)


def _pow_base(g: Tensor, n: NodeView) -> Tensor:
    exponent = n.Y
    number = exponent.constant
    X = n.X
    if number is not None and number.size == 1:
        if float(number.reshape(())) == 2:
            return g * (X + X)
        return g * (op.CastLike(exponent, X) * X ** op.CastLike(exponent - 1, X))
    # 0 to the power of -1 is infinite, yet the gradient of x⁰ is zero everywhere.
    y = op.CastLike(exponent, X)
    return op.Where(y.equals(0), 0, g * y * X ** op.Where(y.equals(0), 1, y - 1))


def _pow_exponent(g: Tensor, n: NodeView) -> Tensor:
    X, Z = n.X, n.Z
    # As in PyTorch: 0 to the power of anything not negative stays 0, so its gradient is 0 and not 0 · -∞.
    flat = X.equals(0) & (op.CastLike(n.Y, X) >= 0)
    dZ = g * op.Where(flat, 0, Z * op.Log(op.Where(flat, 1, X)))
    return op.CastLike(dZ, n.Y)


vjp(
    "Pow",
    broadcast=True,
    doc="As in PyTorch, the gradient of the exponent is 0 where the base is 0 and the exponent not negative.",
    X=_pow_base,
    Y=_pow_exponent,
)


def _mod(g: Tensor, n: NodeView) -> Tensor:
    A, B = n.A, n.B
    quotient = A / B
    whole = op.Floor(quotient)
    if n.fmod:
        whole = op.Where(quotient < 0, op.Ceil(quotient), whole)
    return -g * whole


vjp("Mod", broadcast=True, A=lambda g, n: g, B=_mod)


def _extreme(better: str) -> Function:
    """The gradient goes to the largest or smallest; where several are, each gets an equal share.

    That is PyTorch's maximum. Where it is a clamp, all goes to what is clamped, the first input.
    """

    def function(g: Tensor, n: NodeView, k: int) -> Tensor:
        inputs = n.data_0
        if len(inputs) == 1:
            return g
        result = getattr(n, better)
        if _is_clamp(n):
            is_first = inputs[0].equals(result)
            return only_where(is_first if k == 0 else ~is_first, g)
        winners = [op.CastLike(x.equals(result), g) for x in inputs]
        total = winners[0]
        for other in winners[1:]:
            total = total + other
        return g * winners[k] / total

    return function


def _is_clamp(n: NodeView) -> bool:
    """Whether torch's exporter says so, or it is one of Max and Min by constants, one after the other."""
    if n.torch_op:
        return n.torch_op.startswith("aten.clamp") and len(n.data_0) == 2
    other = "Min" if n.node.op_type == "Max" else "Max"
    around = [n.data_0[0].value.producer(), *n.node.outputs[0].consumers()]
    pairs = [node for node in around if node is not None and node.op_type == other]
    return _is_bounded_by_constant(n.node) and any(map(_is_bounded_by_constant, pairs))


def _is_bounded_by_constant(node: ir.Node) -> bool:
    bound = node.inputs[1] if len(node.inputs) == 2 else None
    if bound is None:
        return False
    source = before_casts(bound)
    producer = source.producer()
    return source.is_initializer() if producer is None else producer.op_type == "Constant"


TIES = "Where several inputs tie, each gets an equal share, as in PyTorch; in a clamp the first one gets all."
vjp("Max", broadcast=True, doc=TIES, data_0=_extreme("max"))
vjp("Min", broadcast=True, doc=TIES, data_0=_extreme("min"))

vjp("Neg", X=lambda g, n: -g)
vjp("Abs", X=lambda g, n: g * op.Sign(n.X))
vjp("Reciprocal", X=lambda g, n: -g * n.Y * n.Y)
vjp("Sqrt", X=lambda g, n: g / (n.Y + n.Y))
vjp("Exp", input=lambda g, n: g * n.output)
vjp("Log", input=lambda g, n: g / n.input)
vjp("Erf", input=lambda g, n: g * (2 / np.sqrt(np.pi)) * op.Exp(-n.input * n.input))

vjp("Sin", input=lambda g, n: g * op.Cos(n.input))
vjp("Cos", input=lambda g, n: -g * op.Sin(n.input))
vjp("Tan", input=lambda g, n: g * (1 + n.output * n.output))
vjp("Asin", input=lambda g, n: g / op.Sqrt(1 - n.input * n.input))
vjp("Acos", input=lambda g, n: -g / op.Sqrt(1 - n.input * n.input))
vjp("Atan", input=lambda g, n: g / (1 + n.input * n.input))
vjp("Sinh", input=lambda g, n: g * op.Cosh(n.input))
vjp("Cosh", input=lambda g, n: g * op.Sinh(n.input))
vjp("Asinh", input=lambda g, n: g / op.Sqrt(n.input * n.input + 1))
vjp("Acosh", input=lambda g, n: g / op.Sqrt(n.input * n.input - 1))
vjp("Atanh", input=lambda g, n: g / (1 - n.input * n.input))

no_gradient(
    "And", "ArgMax", "ArgMin", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Ceil", "Equal",
    "Floor", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not", "Or", "Round", "Sign", "Xor",
)  # fmt: skip
