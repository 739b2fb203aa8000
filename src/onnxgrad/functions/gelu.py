"""The gradients of the Gelu family as ONNX functions."""

import math
from collections.abc import Callable

from onnx import TensorProto

from onnxgrad.functions.body import Body, Value
from onnxgrad.ops.gelu import CUBIC, SCALE, TAIL


def gelu_grad(o: Body, dY: Value, X: Value, B: Value | None = None) -> list[Value]:
    """onnxruntime has no Erf for float64, and onnx.reference computes it in float32: there a polynomial serves."""

    def compute(kind: int, derivative: Callable[[Body, Value], Value]) -> list[Value]:
        x = o.Cast(X, to=kind)
        if B is not None:
            x = x + o.Cast(B, to=kind)
        return [o.CastLike(o.Cast(dY, to=kind) * derivative(o, x), dY)]

    fine = 1 + 2**-40  # takes 41 bits
    is_double = o.Cast(o.like(fine, dY), to=TensorProto.DOUBLE).equals(fine)
    return o.choose(
        is_double,
        lambda: compute(TensorProto.DOUBLE, _write_by_tail),
        lambda: compute(TensorProto.FLOAT, _write_by_erf),
    )


def _write_by_erf(o: Body, x: Value) -> Value:
    u = x * math.sqrt(0.5)
    return (o.Erf(u) * 0.5 + 0.5) + u * o.Exp(-u * u) * (1 / math.sqrt(math.pi))


def _write_by_tail(o: Body, x: Value) -> Value:
    t = o.Abs(x)
    w = (t - 4.0) / (t + 4.0)
    shape = w * TAIL[0] + TAIL[1]
    for coefficient in TAIL[2:]:
        shape = shape * w + coefficient
    below = o.Exp(t * t * -0.5) * (shape * (t * 0.25 + 1.0))
    return o.Where(x < 0, below, 1 - below)


def fast_gelu_grad(o: Body, dY: Value, X: Value, B: Value | None = None) -> list[Value]:
    def compute(work: Callable[[Value], Value]) -> list[Value]:
        x = work(X) if B is None else work(X) + work(B)
        s, rest = _write_sigmoid(o, x * (x * x * (2 * SCALE * CUBIC) + 2 * SCALE))
        # In this order an x² that overflows is multiplied by nothing: the bend is 0 long before.
        bend = x * rest
        return [work(dY) * (s + (bend + bend * x * x * (3 * CUBIC)) * (2 * SCALE))]

    return o.in_work_type(dY, compute)


def quick_gelu_grad(o: Body, dY: Value, X: Value, alpha: float) -> list[Value]:
    def compute(work: Callable[[Value], Value]) -> list[Value]:
        x = work(X)
        s, rest = _write_sigmoid(o, x * alpha)
        return [work(dY) * (s + x * rest * alpha)]

    return o.in_work_type(dY, compute)


def _write_sigmoid(o: Body, z: Value) -> tuple[Value, Value]:
    """s = sigmoid(z) and s · (1 - s), which onnxruntime's Sigmoid is not exact enough for."""
    e = o.Exp(-o.Abs(z))
    above = o.Reciprocal(e + 1)
    below = e * above
    return o.Where(z < 0, below, above), above * below


bias_gelu_grad_dx = gelu_grad


bias_fast_gelu_grad_dx = fast_gelu_grad
