"""The Gelu family, onnx's and onnxruntime's, and the gradients of its gradients."""

import math

from onnxgrad.graph.broadcast import sum_to_shape
from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.ops.gelu import CUBIC, SCALE
from onnxgrad.rules import op, vjp
from onnxgrad.schema import MICROSOFT


def _fast_gelu(g: Tensor, n: NodeView) -> Tensor:
    return op.FastGeluGrad(g, n.X) if n.bias is None else op.BiasFastGeluGrad_dX(g, n.X, n.bias)


def _bias_gelu(g: Tensor, n: NodeView) -> Tensor:
    return op.BiasGeluGrad_dX(g, n.A, n.B)


vjp("Gelu", X=lambda g, n: (op.FastGeluGrad if n.approximate == "tanh" else op.GeluGrad)(g, n.X))
vjp("Gelu", domain=MICROSOFT, X=lambda g, n: op.GeluGrad(g, n.X))
vjp("BiasGelu", domain=MICROSOFT, A=_bias_gelu, B=lambda g, n: sum_to_shape(_bias_gelu(g, n), n.B))
vjp("FastGelu", domain=MICROSOFT, X=_fast_gelu, bias=lambda g, n: sum_to_shape(_fast_gelu(g, n), n.bias))
vjp("QuickGelu", domain=MICROSOFT, X=lambda g, n: op.QuickGeluGrad(g, n.X, alpha=n.alpha))
vjp("Swish", X=lambda g, n: op.QuickGeluGrad(g, n.X, alpha=n.alpha))


# Second derivatives. Beyond the bounds they are 0 in any type, and no square overflows within them.
def _gelu_second_derivative(X: Tensor) -> Tensor:
    """φ(X) · (2 - X²), with φ the density of the normal distribution."""
    x = op.Clip(X, -38.0, 38.0)
    square = x * x
    return op.Exp(square * -0.5) * (2 - square) * (1 / math.sqrt(2 * math.pi))


def _fast_gelu_second_derivative(X: Tensor) -> Tensor:
    """The second derivative of X · sigmoid(z), with z = 2 · SCALE · (X + CUBIC · X³)."""
    x = op.Clip(X, -12.0, 12.0)
    square = x * x
    s = op.Sigmoid(x * (square * (2 * SCALE * CUBIC) + 2 * SCALE))
    dz = square * (6 * SCALE * CUBIC) + 2 * SCALE
    return s * (1 - s) * (dz * 2 + square * (12 * SCALE * CUBIC) + x * dz * dz * (1 - s * 2))


def _quick_gelu_second_derivative(X: Tensor, alpha: float) -> Tensor:
    """The second derivative of X · sigmoid(alpha · X)."""
    z = op.Clip(X * alpha, -700.0, 700.0)
    s = op.Sigmoid(z)
    return s * (1 - s) * (z * (1 - s * 2) + 2) * alpha


def _bias_gelu_grad(g: Tensor, n: NodeView) -> Tensor:
    return g * n.dY * _gelu_second_derivative(n.X + n.B)


def _bias_fast_gelu_grad(g: Tensor, n: NodeView) -> Tensor:
    return g * n.dY * _fast_gelu_second_derivative(n.X + n.B)


vjp(
    "GeluGrad",
    domain=MICROSOFT,
    dY=lambda g, n: op.GeluGrad(g, n.X),
    X=lambda g, n: g * n.dY * _gelu_second_derivative(n.X),
)
vjp(
    "FastGeluGrad",
    domain=MICROSOFT,
    dY=lambda g, n: op.FastGeluGrad(g, n.X),
    X=lambda g, n: g * n.dY * _fast_gelu_second_derivative(n.X),
)
vjp(
    "QuickGeluGrad",
    domain=MICROSOFT,
    dY=lambda g, n: op.QuickGeluGrad(g, n.X, alpha=n.alpha),
    X=lambda g, n: g * n.dY * _quick_gelu_second_derivative(n.X, n.alpha),
)
vjp(
    "BiasGeluGrad_dX",
    domain=MICROSOFT,
    dY=lambda g, n: op.BiasGeluGrad_dX(g, n.X, n.B),
    X=_bias_gelu_grad,
    B=lambda g, n: sum_to_shape(_bias_gelu_grad(g, n), n.B),
)
vjp(
    "BiasFastGeluGrad_dX",
    domain=MICROSOFT,
    dY=lambda g, n: op.BiasFastGeluGrad_dX(g, n.X, n.B),
    X=_bias_fast_gelu_grad,
    B=lambda g, n: sum_to_shape(_bias_fast_gelu_grad(g, n), n.B),
)
