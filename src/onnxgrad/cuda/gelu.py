"""The gradients of the Gelu family on CUDA: one pass, with or without a bias."""

import math

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.elementwise import Elementwise
from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.ops.gelu import CUBIC, SCALE

# FastGelu(x) = x · sigmoid(z) with z = Z1 · x + Z3 · x³, and dz/dx = Z1 + DZ2 · x²
Z1, Z3, DZ2 = map(tl.constexpr, (2 * SCALE, 2 * SCALE * CUBIC, 6 * SCALE * CUBIC))
ROOT_HALF, INVERSE_ROOT_PI = tl.constexpr(math.sqrt(0.5)), tl.constexpr(1 / math.sqrt(math.pi))


def gelu_grad(dY: torch.Tensor, X: torch.Tensor, dX: torch.Tensor, bad: BadIndex) -> None:
    GELU_GRAD(dY, X, dX)


def fast_gelu_grad(dY: torch.Tensor, X: torch.Tensor, dX: torch.Tensor, bad: BadIndex) -> None:
    FAST_GELU_GRAD(dY, X, dX)


def quick_gelu_grad(dY: torch.Tensor, X: torch.Tensor, dX: torch.Tensor, alpha: float, bad: BadIndex) -> None:
    QUICK_GELU_GRAD(dY, X, dX, alpha=alpha)


def bias_gelu_grad_dx(dY: torch.Tensor, X: torch.Tensor, B: torch.Tensor, dX: torch.Tensor, bad: BadIndex) -> None:
    GELU_GRAD(dY, X, dX, bias=B)


def bias_fast_gelu_grad_dx(dY: torch.Tensor, X: torch.Tensor, B: torch.Tensor, dX: torch.Tensor, bad: BadIndex) -> None:
    FAST_GELU_GRAD(dY, X, dX, bias=B)


def _gelu(dY, X):
    u = X * ROOT_HALF
    return dY * ((0.5 + 0.5 * tl.math.erf(u)) + u * tl.exp(-u * u) * INVERSE_ROOT_PI)


def _fast_gelu(dY, X):
    square = X * X
    return dY * _swish_derivative(X, X * (square * Z3 + Z1), square * DZ2 + Z1)


def _quick_gelu(dY, X, alpha):
    return dY * _swish_derivative(X, X * alpha, alpha)


@triton.jit
def _swish_derivative(x, z, growth):
    """The derivative of x · sigmoid(z), growth being dz/dx."""
    e = tl.exp(-tl.abs(z))  # never overflows
    above = 1 / (1 + e)
    below = e * above
    # In this order a square that overflows is multiplied by 0: the product underflows long before.
    change = x * below
    return tl.where(z < 0, below, above) + tl.where(change == 0, change, change * growth) * above


GELU_GRAD, FAST_GELU_GRAD, QUICK_GELU_GRAD = Elementwise(_gelu), Elementwise(_fast_gelu), Elementwise(_quick_gelu)
