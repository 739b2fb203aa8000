"""The gradients of the Gelu family: GeluGrad, FastGeluGrad and QuickGeluGrad, and those of Gelus that add a bias.

Unlike those of activation.py, these are no formulas that all backends share. What is exact and fast differs: here erfc
in float64; on the CPU a polynomial that fits vector registers; on a GPU its own erf; in ONNX functions Erf, which
runtimes lack for float64, where the polynomial stands in.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from onnxgrad.op import op
from onnxgrad.ops.activation import common_shape
from onnxgrad.schema import Dim, Known
from onnxgrad.tensor_types import Array, T

# FastGelu(x) = x/2 · (1 + tanh(SCALE · (x + CUBIC · x³)))
SCALE, CUBIC = math.sqrt(2 / math.pi), 0.044715

# The derivative of Gelu at -t over exp(-t² / 2) · (1 + t / 4), as a polynomial of w = (t - 4) / (t + 4), the highest
# power first. t runs from 0 to 38, where the derivative underflows, so w runs from -1 to below 1; the function between
# is smooth. Interpolated in Chebyshev's nodes, it is off by at most 1e-17.
TAIL = (
    9.961237467139309e-11, -6.64102623231548e-10, -3.63490211446792e-09, 1.1439237503767686e-09,
    2.793765503562688e-08, 2.0189951992750128e-08, -1.4744310053070005e-07, -2.2705715449941025e-07,
    7.44045428961488e-07, 1.7366274896168696e-06, -4.467063903016735e-06, -1.200822872490779e-05,
    3.710150663835105e-05, 7.081465109669148e-05, -0.0004129990441847531, 6.562589310364014e-05,
    0.004499828777150903, -0.019678449794551665, 0.051286105722092294, -0.09804333133848948,
    0.14738848844385827, -0.9302887422280777, -0.7506792401518809,
)  # fmt: skip


def _shape_rule(dY: Known, X: Known) -> tuple[Dim, ...] | None:
    return common_shape(dY, X, "X")


def _shape_rule_with_bias(dY: Known, X: Known, B: Known) -> tuple[Dim, ...] | None:
    dims = common_shape(dY, X, "X")
    if dims is None or B.dims is None:
        return dims
    if len(dims) == 0:
        raise ValueError("X is a scalar, expected at least one dimension")
    if len(B.dims) != 1:
        raise ValueError(f"B has shape {list(B.dims)}, expected one dimension")
    if isinstance(dims[-1], int) and isinstance(B.dims[0], int) and dims[-1] != B.dims[0]:
        raise ValueError(f"B has {B.dims[0]} numbers, expected {dims[-1]} as the last dimension of X has")
    return (*dims[:-1], B.dims[0] if dims[-1] is None else dims[-1])


def _product(dY: Array, derivative: Callable[..., Any], *inputs: Array) -> Any:
    """dY · derivative(sum of the inputs), rounded once."""
    with np.errstate(invalid="ignore", over="ignore"):  # an infinite x has no derivative; x³ may overflow, with no harm
        x = sum(i.astype(np.float64) for i in inputs)
        return (dY.astype(np.float64) * derivative(x)).astype(dY.dtype)


def _gelu_derivative(x: Array) -> Any:
    # Φ by erfc, which loses nothing for negative x.
    below = np.vectorize(math.erfc, otypes=[np.float64])(-x * math.sqrt(0.5)) / 2
    return below + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _swish_derivative(x: Array, z: Array, growth: Array) -> Any:
    """The derivative of x · sigmoid(z), growth being x · dz/dx."""
    e = np.exp(-np.abs(z))  # never overflows
    above, below = 1 / (1 + e), e / (1 + e)
    faded = np.isinf(growth) & np.isfinite(x)  # where below is 0
    return np.where(z < 0, below, above) + np.where(faded, 0, growth) * above * below


def _fast_gelu_derivative(x: Array) -> Any:
    return _swish_derivative(x, 2 * SCALE * (x + CUBIC * x**3), 2 * SCALE * (x + 3 * CUBIC * x**3))


def _quick_gelu_derivative(x: Array, alpha: float) -> Any:
    return _swish_derivative(x, alpha * x, alpha * x)


@op("GeluGrad", outputs="dX", shape=_shape_rule)
def gelu_grad(dY: T, X: T) -> T:
    """Gradient of Gelu: dX = dY · (Φ(X) + X · φ(X)), with Φ the normal distribution and φ its density.

    float16 and bfloat16 compute in float32 and round once.
    """
    dX: T = _product(dY, _gelu_derivative, X)
    return dX


@op("FastGeluGrad", outputs="dX", shape=_shape_rule)
def fast_gelu_grad(dY: T, X: T) -> T:
    """Gradient of FastGelu, Y = X/2 · (1 + tanh(√(2/π) · (X + 0.044715 · X³))): dX = dY times its derivative.

    float16 and bfloat16 compute in float32 and round once.
    """
    dX: T = _product(dY, _fast_gelu_derivative, X)
    return dX


@op(
    "QuickGeluGrad",
    outputs="dX",
    shape=lambda dY, X, alpha: common_shape(dY, X, "X"),
)
def quick_gelu_grad(dY: T, X: T, alpha: float = 1.702) -> T:
    """Gradient of QuickGelu, Y = X · s with s = sigmoid(alpha · X): dX = dY · (s + alpha · X · s · (1 - s)).

    float16 and bfloat16 compute in float32 and round once.
    """
    dX: T = _product(dY, lambda x: _quick_gelu_derivative(x, alpha), X)
    return dX


@op("BiasGeluGrad_dX", outputs="dX", shape=_shape_rule_with_bias)
def bias_gelu_grad_dx(dY: T, X: T, B: T) -> T:
    """Gradient of BiasGelu, Gelu(X + B), in X: GeluGrad(dY, X + B), with B along the last dimension.

    float16 and bfloat16 compute in float32 and round once.
    """
    dX: T = _product(dY, _gelu_derivative, X, B)
    return dX


@op("BiasFastGeluGrad_dX", outputs="dX", shape=_shape_rule_with_bias)
def bias_fast_gelu_grad_dx(dY: T, X: T, B: T) -> T:
    """Gradient of FastGelu(X + B) in X: FastGeluGrad(dY, X + B), with B along the last dimension.

    float16 and bfloat16 compute in float32 and round once.
    """
    dX: T = _product(dY, _fast_gelu_derivative, X, B)
    return dX
