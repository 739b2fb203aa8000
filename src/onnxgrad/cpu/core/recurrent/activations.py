"""Activation functions over ranges of memory: mostly branch-free, so that they run on vectors."""

import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import overload

from onnxgrad.cpu.core.halves import load, store
from onnxgrad.cpu.core.jit import inlined, int64, machine_code, native
from onnxgrad.ops.families.activations import ACTIVATIONS
from onnxgrad.tensor_types import Array

CODES = {name: code for code, name in enumerate(ACTIVATIONS)}
SIGMOID, TANH, RELU, HARD_SIGMOID, LEAKY_RELU, SCALED_TANH = (
    CODES[n] for n in ("Sigmoid", "Tanh", "Relu", "HardSigmoid", "LeakyRelu", "ScaledTanh")
)
ELU, SOFTSIGN, SOFTPLUS, THRESHOLDED_RELU, AFFINE = (
    CODES[n] for n in ("Elu", "Softsign", "Softplus", "ThresholdedRelu", "Affine")
)


@machine_code
def _float_of_bits(typing_context: Any, bits: Any) -> Any:
    return types.float32(types.int32), lambda context, builder, signature, v: builder.bitcast(v[0], ir.FloatType())


@machine_code
def _bits_of_float(typing_context: Any, number: Any) -> Any:
    return types.int32(types.float32), lambda context, builder, signature, v: builder.bitcast(v[0], ir.IntType(32))


@machine_code
def _double_of_bits(typing_context: Any, bits: Any) -> Any:
    return types.float64(types.int64), lambda context, builder, signature, v: builder.bitcast(v[0], ir.DoubleType())


@machine_code
def _bits_of_double(typing_context: Any, number: Any) -> Any:
    return types.int64(types.float64), lambda context, builder, signature, v: builder.bitcast(v[0], ir.IntType(64))


def exp(x: float) -> float:
    """e to the power of x, for native code."""
    raise NotImplementedError("for compiled code only")


def _tanh(x: float) -> float:
    raise NotImplementedError("for compiled code only")


@overload(exp, strict=False)
def _exp_for(x: Any) -> Any:
    if x != types.float32:

        def exp64(x: Any) -> Any:
            # As below; the polynomial's relative error is 1.7e-19.
            x = -707.7 if x < -707.7 else x
            x = 709.78 if x > 709.78 else x
            rounded = x * 1.4426950408889634 + 6755399441055744.0
            n = rounded - 6755399441055744.0
            r = x - n * 0.6931471803691238 - n * 1.9082149292705877e-10
            q = 2.091813816945801e-09
            q = q * r + 2.5105217695684516e-08
            q = q * r + 2.7557263277791584e-07
            q = q * r + 2.755725539833871e-06
            q = q * r + 2.4801587336443602e-05
            q = q * r + 0.00019841269874822307
            q = q * r + 0.0013888888888879073
            q = q * r + 0.008333333333326134
            q = q * r + 0.04166666666666668
            q = q * r + 0.1666666666666667
            q = q * r + 0.5
            half = _double_of_bits((_bits_of_double(rounded) + int64(1022)) << int64(52))  # 2^1024 is not a float64
            return (1.0 + (r + r * r * q)) * half * 2.0

        return exp64

    def exp32(x: Any) -> Any:
        # e^x = 2^n · e^r with |r| <= ln2 / 2; e^r by a minimax polynomial, relative error 1.1e-8. ln2 is split in two
        # so that n · ln2 is exact where it counts. The sum with 1.5 · 2^23 rounds to a whole number n and leaves it in
        # the lowest bits. Outside, the result is 0 or inf to float32's reach; NaN stays NaN.
        x = np.float32(-86.6) if x < np.float32(-86.6) else x
        x = np.float32(88.72) if x > np.float32(88.72) else x
        rounded = x * np.float32(1.44269504) + np.float32(12582912)
        n = rounded - np.float32(12582912)
        r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
        q = np.float32(0.001394121441990137)
        q = q * r + np.float32(0.00836323481053114)
        q = q * r + np.float32(0.04166637361049652)
        q = q * r + np.float32(0.16666576266288757)
        q = q * r + np.float32(0.5)
        half = _float_of_bits((_bits_of_float(rounded) + np.int32(126)) << np.int32(23))  # 2^128 is not a float32
        return (np.float32(1) + (r + r * r * q)) * half * np.float32(2)

    return exp32


@overload(_tanh, strict=False)
def _tanh_for(x: Any) -> Any:
    if x != types.float32:

        def tanh64(x: Any) -> Any:
            return math.tanh(x)

        return tanh64

    def tanh32(x: Any) -> Any:
        # Near 0 a minimax polynomial in x² (relative error 2.8e-8), further out by e^2x, which there loses nothing.
        u = x * x
        p = np.float32(-0.005942382384091616)
        p = p * u + np.float32(0.020889246836304665)
        p = p * u + np.float32(-0.05382793769240379)
        p = p * u + np.float32(0.1333261877298355)
        p = p * u + np.float32(-0.333333283662796)
        near = x + x * u * p
        far = np.float32(1) - np.float32(2) / (exp(np.float32(2) * abs(x)) + np.float32(1))
        return near if abs(x) < np.float32(0.64) else (far if x > 0 else -far)

    return tanh32


@inlined
def probability(log: float) -> float:
    """e to the power of a logarithm that is negative or not much above 0; of -inf it is 0, and NaN stays NaN."""
    lowest = type(log)(-700)  # whose exponential is 0, and which taken from itself is a number
    log = lowest if log < lowest else log
    return exp(log) + (log - log)


@native
def clamp(values: Array, start: int, count: int, limit: float) -> None:
    """Clips values to ±limit; NaN stays NaN."""
    low, high = values.dtype.type(-limit), values.dtype.type(limit)
    for i in range(start, start + count):
        x = load(values, i)
        store(values, i, low if x < low else high if x > high else x)


class Activation(NamedTuple):
    """An activation function with its parameters."""

    code: int
    alpha: float
    beta: float


class Activations(NamedTuple):
    """The activations of all directions, one after the other, and the clip of their inputs."""

    codes: Array
    parameters: Array  # alpha and beta of each
    clip: float  # 0: none


@native
def activation_of(activations: Activations, number: int) -> Activation:
    """One of them."""
    parameters = activations.parameters
    return Activation(activations.codes[number], parameters[number, 0], parameters[number, 1])


@native
def activate(f: Activation, values: Array, start: int, count: int) -> None:
    """values[start : start + count] = f of each."""
    code, alpha, beta = f
    one, a, b = values.dtype.type(1), values.dtype.type(alpha), values.dtype.type(beta)
    nil = values.dtype.type(0)
    stop = start + count
    if code == SIGMOID:
        for i in range(start, stop):
            store(values, i, one / (one + exp(-load(values, i))))
    elif code == TANH:
        for i in range(start, stop):
            store(values, i, _tanh(load(values, i)))
    elif code == RELU:
        for i in range(start, stop):
            x = load(values, i)
            store(values, i, nil if x < nil else x)
    elif code == HARD_SIGMOID:
        for i in range(start, stop):
            x = a * load(values, i) + b
            store(values, i, nil if x < nil else one if x > one else x)
    elif code == LEAKY_RELU:
        for i in range(start, stop):
            x = load(values, i)
            store(values, i, x if x > nil else a * x)
    elif code == SCALED_TANH:
        for i in range(start, stop):
            store(values, i, a * _tanh(b * load(values, i)))
    elif code == ELU:
        for i in range(start, stop):
            x = load(values, i)
            store(values, i, x if x > nil else a * values.dtype.type(math.expm1(x)))
    elif code == SOFTSIGN:
        for i in range(start, stop):
            x = load(values, i)
            store(values, i, x / (one + abs(x)))
    elif code == SOFTPLUS:
        for i in range(start, stop):
            x = load(values, i)
            store(values, i, max(x, nil) + values.dtype.type(math.log1p(math.exp(-abs(x)))))
    elif code == THRESHOLDED_RELU:
        for i in range(start, stop):
            x = load(values, i)
            store(values, i, nil if x <= a else x)
    elif code == AFFINE:
        for i in range(start, stop):
            store(values, i, a * load(values, i) + b)


@native
def activate_clipped(f: Activation, clip: float, values: Array, start: int, count: int) -> None:
    """values[start : start + count] = f of each, clipped first."""
    if clip > 0:
        clamp(values, start, count, clip)
    activate(f, values, start, count)


@native
def within_clip(values: Array, at: int, count: int, clip: float, within: Array) -> None:
    """within[i] = 1 where clip leaves values[at + i] as it is, else 0."""
    for i in range(count):
        within[i] = abs(load(values, at + i)) <= clip


@native
def scale(values: Array, at: int, factors: Array, start: int, count: int) -> None:
    """values[at + i] *= factors[start + i]."""
    for i in range(count):
        store(values, at + i, load(values, at + i) * load(factors, start + i))


@native
def times_derivative(f: Activation, results: Array, at: int, gradients: Array, start: int, count: int) -> None:
    """gradients[start + i] *= f's derivative where its result is results[at + i]."""
    code, alpha, beta = f
    one, a, b = gradients.dtype.type(1), gradients.dtype.type(alpha), gradients.dtype.type(beta)
    nil = gradients.dtype.type(0)
    if code == SIGMOID:
        for i in range(count):
            y = load(results, at + i)
            store(gradients, start + i, load(gradients, start + i) * (y * (one - y)))
    elif code == TANH:
        for i in range(count):
            y = load(results, at + i)
            store(gradients, start + i, load(gradients, start + i) * (one - y * y))
    elif code == RELU:
        for i in range(count):
            store(gradients, start + i, load(gradients, start + i) * (one if load(results, at + i) > nil else nil))
    elif code == HARD_SIGMOID:
        for i in range(count):
            y = load(results, at + i)
            store(gradients, start + i, load(gradients, start + i) * (a if nil < y < one else nil))
    elif code == LEAKY_RELU:
        for i in range(count):
            store(gradients, start + i, load(gradients, start + i) * (one if load(results, at + i) > nil else a))
    elif code == SCALED_TANH:
        for i in range(count):
            y = load(results, at + i)
            store(gradients, start + i, load(gradients, start + i) * (b * (a - y * y / a) if a != nil else nil))
    elif code == ELU:
        for i in range(count):
            y = load(results, at + i)
            store(gradients, start + i, load(gradients, start + i) * (one if y > nil else y + a))
    elif code == SOFTSIGN:
        for i in range(count):
            away = one - abs(load(results, at + i))
            store(gradients, start + i, load(gradients, start + i) * (away * away))
    elif code == SOFTPLUS:
        for i in range(count):
            derivative = gradients.dtype.type(-math.expm1(-load(results, at + i)))
            store(gradients, start + i, load(gradients, start + i) * derivative)
    elif code == THRESHOLDED_RELU:
        for i in range(count):
            y = load(results, at + i)
            store(gradients, start + i, load(gradients, start + i) * (one if y > a and y != nil else nil))
    elif code == AFFINE:
        for i in range(count):
            store(gradients, start + i, load(gradients, start + i) * a)
