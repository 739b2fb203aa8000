"""Activation functions of recurrent operators and their derivatives in Triton: exact to a few roundings in any type."""

import triton
import triton.language as tl


@triton.jit
def exp(x):
    """The exponential function to within three units in the last place.

    A GPU's own multiplies by log₂ e first, whose rounding grows with x: at -10 eight units are lost in float32.
    """
    if x.dtype == tl.float64:
        return tl.exp(x)
    x = tl.where(x < -150.0, -150.0, x)  # which gives 0, and taken from itself is a number
    k = tl.floor(x * 1.4426950408889634 + 0.5)
    rest = (x - k * 0.693359375) - k * -2.12194440e-4  # ln 2 as a sum of two, the first of which times k is exact
    half = tl.floor(k * 0.5)
    return tl.exp2(rest * 1.4426950408889634) * tl.exp2(half) * tl.exp2(k - half)


@triton.jit
def _tanh(x):
    """Away from 0 by the exponential function; near it that would cancel, and Lambert's continued fraction serves."""
    size = tl.abs(x)
    e = tl.exp(-2 * size)
    far = (1 - e) / (1 + e)
    square = x * x
    fraction = 15 + square * 0
    for k in tl.static_range(7):
        fraction = (13 - 2 * k) + square / fraction
    return tl.where(size > 0.6, tl.where(x < 0, -far, far), x / fraction)


@triton.jit
def _expm1(x):
    t = _tanh(x * 0.5)
    return tl.where(tl.abs(x) < 0.5, 2 * t / (1 - t), tl.exp(x) - 1)


@triton.jit
def _log1p(e):
    """For 0 ≤ e ≤ 1: 2 artanh(e / (2 + e)) as a series."""
    s = e / (2 + e)
    square = s * s
    total = square * 0 + 1.0 / 35
    for k in tl.static_range(17):
        total = total * square + 1.0 / (33 - 2 * k)
    return 2 * s * total


@triton.jit
def activate(NAME: tl.constexpr, x, alpha, beta):
    """y = NAME(x)."""
    if NAME == "Sigmoid":
        e = tl.exp(-tl.abs(x))  # never overflows
        y = tl.where(x >= 0, 1 / (1 + e), e / (1 + e))
    elif NAME == "Tanh":
        y = _tanh(x)
    elif NAME == "Relu":
        y = tl.where(x != x, x, tl.maximum(x, 0.0))
    elif NAME == "HardSigmoid":
        y = tl.where(x != x, x, tl.minimum(tl.maximum(alpha * x + beta, 0.0), 1.0))
    elif NAME == "LeakyRelu":
        y = tl.where(x > 0, x, alpha * x)
    elif NAME == "ScaledTanh":
        y = alpha * _tanh(beta * x)
    elif NAME == "Elu":
        y = tl.where(x > 0, x, alpha * _expm1(tl.minimum(x, 0.0)))
    elif NAME == "Softsign":
        y = x / (1 + tl.abs(x))
    elif NAME == "Softplus":
        y = tl.maximum(x, 0.0) + _log1p(tl.exp(-tl.abs(x)))
    elif NAME == "ThresholdedRelu":
        y = tl.where(x > alpha, x, x * 0.0)
    else:
        tl.static_assert(NAME == "Affine")
        y = alpha * x + beta
    return y


@triton.jit
def derivative(NAME: tl.constexpr, y, alpha, beta):
    """dy/dx, read off the result y; at a kink the choices of onnxgrad.activations."""
    if NAME == "Sigmoid":
        d = y * (1 - y)
    elif NAME == "Tanh":
        d = 1 - y * y
    elif NAME == "Relu":
        d = tl.where(y > 0, y * 0 + 1, y * 0)
    elif NAME == "HardSigmoid":
        d = tl.where((y > 0) & (y < 1), y * 0 + alpha, y * 0)
    elif NAME == "LeakyRelu":
        d = tl.where(y > 0, y * 0 + 1, y * 0 + alpha)
    elif NAME == "ScaledTanh":
        d = tl.where(alpha != 0, beta * (alpha - y * y / tl.where(alpha != 0, alpha, 1.0)), y * 0)
    elif NAME == "Elu":
        d = tl.where(y > 0, y * 0 + 1, y + alpha)
    elif NAME == "Softsign":
        d = (1 - tl.abs(y)) * (1 - tl.abs(y))
    elif NAME == "Softplus":
        d = -_expm1(-y)
    elif NAME == "ThresholdedRelu":
        d = tl.where((y > alpha) & (y != 0), y * 0 + 1, y * 0)
    else:
        tl.static_assert(NAME == "Affine")
        d = y * 0 + alpha
    return d
