"""The gradients of the Gelu family on the CPU: one pass, with one exponential and one division for every element.

A derivative at x and the one at -x add up to 1. So the kernels compute the derivative at -|x|, which decays like an
exponential without cancellation; at |x| it is subtracted from 1.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from onnxgrad.cpu.core.elementwise import Elementwise
from onnxgrad.cpu.core.jit import inlined
from onnxgrad.cpu.core.recurrent.activations import exp
from onnxgrad.ops.gelu import CUBIC, SCALE, TAIL
from onnxgrad.tensor_types import Array

# TAIL for float32, where t ends at 13: off by at most 3e-9.
TAIL32 = tuple(
    np.float32(coefficient)
    for coefficient in (
        -3.23786553e-05, -4.58258059e-04, 1.16066381e-04, 4.53616027e-03, -1.96857918e-02,
        5.12784570e-02, -9.80430320e-02, 1.47388995e-01, -9.30288732e-01, -7.50679255e-01,
    )
)  # fmt: skip


def gelu_grad(dY: Array, X: Array, dX: Array) -> None:
    _gelu_grad(dY, X, dX)


def fast_gelu_grad(dY: Array, X: Array, dX: Array) -> None:
    _fast_gelu_grad(dY, X, dX)


def quick_gelu_grad(dY: Array, X: Array, dX: Array, alpha: float) -> None:
    _quick_gelu_grad(dY, X, dX, alpha)


def bias_gelu_grad_dx(dY: Array, X: Array, B: Array, dX: Array) -> None:
    _gelu_grad.with_bias(dY, X, B, dX)


def bias_fast_gelu_grad_dx(dY: Array, X: Array, B: Array, dX: Array) -> None:
    _fast_gelu_grad.with_bias(dY, X, B, dX)


@inlined
def _gelu_derivative(x: float) -> float:
    """Φ(x) + x · φ(x), with Φ the normal distribution and φ its density."""
    number, t = type(x), abs(x)
    below = exp(number(-0.5) * t * t) * _shape_of_tail(t)
    below = t * number(0) if t > _end_of_tail(t) else below  # NaN for an infinite number, as everywhere
    return below if x < number(0) else number(1) - below


@inlined
def _fast_gelu_derivative(x: float) -> float:
    """The derivative of x · sigmoid(z) with z = 2 · SCALE · (x + CUBIC · x³)."""
    number, t = type(x), abs(x)
    square = t * t
    z = t * (number(2 * SCALE) + number(2 * SCALE * CUBIC) * square)
    growth = t * (number(2 * SCALE) + number(6 * SCALE * CUBIC) * square)
    below = _sigmoid_tail(z, growth, t)
    return below if x < number(0) else number(1) - below


@inlined
def _swish_derivative(z: float, t: float) -> float:
    """The derivative of x · sigmoid(z) where z is proportional to x; t is |x|."""
    number = type(z)
    below = _sigmoid_tail(abs(z), abs(z), t)
    return below if z < number(0) else number(1) - below


@inlined
def _sigmoid_tail(z: float, growth: float, t: float) -> float:
    """sigmoid(-z) - growth · sigmoid(z) · sigmoid(-z), for z ≥ 0; t is |x|, infinite where the result is NaN."""
    number = type(z)
    e = exp(-z)
    share = number(1) / (number(1) + e)
    return t * number(0) if z > number(87) else e * share * (number(1) - growth * share)


def _end_of_tail(t: float) -> float:
    """Where nothing is left of the derivative at -t."""
    raise NotImplementedError("for compiled code only")


def _shape_of_tail(t: float) -> float:
    """The derivative at -t divided by exp(-t² / 2)."""
    raise NotImplementedError("for compiled code only")


@overload(_end_of_tail, strict=False)
def _end_of_tail_for(t: Any) -> Any:
    end = np.float32(13) if t == types.float32 else 37.5
    return lambda t: end


# Line by line: LLVM leaves longer loops as they are, and then the loop around them runs on no vectors.
@overload(_shape_of_tail, strict=False)
def _shape_of_tail_for(t: Any) -> Any:
    if t == types.float32:

        def shape32(t: Any) -> Any:
            w = (t - np.float32(4)) / (t + np.float32(4))
            q = TAIL32[0] * w + TAIL32[1]
            q = q * w + TAIL32[2]
            q = q * w + TAIL32[3]
            q = q * w + TAIL32[4]
            q = q * w + TAIL32[5]
            q = q * w + TAIL32[6]
            q = q * w + TAIL32[7]
            q = q * w + TAIL32[8]
            q = q * w + TAIL32[9]
            return q * (np.float32(1) + np.float32(0.25) * t)

        return shape32

    def shape64(t: Any) -> Any:
        w = (t - 4.0) / (t + 4.0)
        q = TAIL[0] * w + TAIL[1]
        q = q * w + TAIL[2]
        q = q * w + TAIL[3]
        q = q * w + TAIL[4]
        q = q * w + TAIL[5]
        q = q * w + TAIL[6]
        q = q * w + TAIL[7]
        q = q * w + TAIL[8]
        q = q * w + TAIL[9]
        q = q * w + TAIL[10]
        q = q * w + TAIL[11]
        q = q * w + TAIL[12]
        q = q * w + TAIL[13]
        q = q * w + TAIL[14]
        q = q * w + TAIL[15]
        q = q * w + TAIL[16]
        q = q * w + TAIL[17]
        q = q * w + TAIL[18]
        q = q * w + TAIL[19]
        q = q * w + TAIL[20]
        q = q * w + TAIL[21]
        q = q * w + TAIL[22]
        return q * (1.0 + 0.25 * t)

    return shape64


def _gelu(dY: float, X: float) -> float:
    return dY * _gelu_derivative(X)


def _fast_gelu(dY: float, X: float) -> float:
    return dY * _fast_gelu_derivative(X)


def _quick_gelu(dY: float, X: float, alpha: float) -> float:
    return dY * _swish_derivative(X * alpha, abs(X))


_gelu_grad, _fast_gelu_grad, _quick_gelu_grad = Elementwise(_gelu), Elementwise(_fast_gelu), Elementwise(_quick_gelu)
