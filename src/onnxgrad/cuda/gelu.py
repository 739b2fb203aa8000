"""The gradients of the Gelu family on CUDA: one pass, with or without a bias."""

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.cuda.core.launch import bits_of, ceil_div, float_of, launch, to_type
from onnxgrad.ops.gelu import CUBIC, SCALE

BLOCK = 1024


def gelu_grad(dY: torch.Tensor, X: torch.Tensor, dX: torch.Tensor, bad: BadIndex) -> None:
    _run(dY, X, None, dX, "Gelu")


def fast_gelu_grad(dY: torch.Tensor, X: torch.Tensor, dX: torch.Tensor, bad: BadIndex) -> None:
    _run(dY, X, None, dX, "FastGelu")


def quick_gelu_grad(dY: torch.Tensor, X: torch.Tensor, dX: torch.Tensor, alpha: float, bad: BadIndex) -> None:
    _run(dY, X, None, dX, "QuickGelu", alpha)


def bias_gelu_grad_dx(dY: torch.Tensor, X: torch.Tensor, B: torch.Tensor, dX: torch.Tensor, bad: BadIndex) -> None:
    _run(dY, X, B, dX, "Gelu")


def bias_fast_gelu_grad_dx(dY: torch.Tensor, X: torch.Tensor, B: torch.Tensor, dX: torch.Tensor, bad: BadIndex) -> None:
    _run(dY, X, B, dX, "FastGelu")


def _run(
    dY: torch.Tensor, X: torch.Tensor, B: torch.Tensor | None, dX: torch.Tensor, name: str, alpha: float = 0
) -> None:
    if dX.numel() == 0:
        return
    bias, columns = (X, 1) if B is None else (B, B.numel())  # without a bias nothing is read of it
    launch(
        _some, ceil_div(dX.numel(), BLOCK), dY.view(-1), X.view(-1), bias.view(-1), dX.view(-1), dX.numel(), columns,
        bits_of(alpha), name, B is not None, SCALE, CUBIC, BLOCK,
        tl.float64 if dX.dtype == torch.float64 else tl.float32,
    )  # fmt: skip


@triton.jit
def _some(
    dY, X, B, dX, count, columns, alpha,
    NAME: tl.constexpr, HAS_BIAS: tl.constexpr, SCALE: tl.constexpr, CUBIC: tl.constexpr, BLOCK: tl.constexpr,
    WORK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    g = tl.load(dY + at, here, other=0).to(WORK)
    x = tl.load(X + at, here, other=0).to(WORK)
    if HAS_BIAS:
        x += tl.load(B + at % columns, here, other=0).to(WORK)
    if NAME == "Gelu":
        u = x * 0.7071067811865476
        derivative = (0.5 + 0.5 * tl.math.erf(u)) + u * tl.exp(-u * u) * 0.5641895835477563
    elif NAME == "FastGelu":
        square = x * x
        derivative = _swish_derivative(
            x, x * (2 * SCALE + 2 * SCALE * CUBIC * square), 2 * SCALE + 6 * SCALE * CUBIC * square
        )
    else:
        tl.static_assert(NAME == "QuickGelu")
        steepness = float_of(alpha, WORK)
        derivative = _swish_derivative(x, x * steepness, steepness)
    tl.store(dX + at, to_type(g * derivative, dX.dtype.element_ty), here)


@triton.jit
def _swish_derivative(x, z, growth):
    """The derivative of x · sigmoid(z), growth being dz/dx."""
    e = tl.exp(-tl.abs(z))  # never overflows
    above = 1 / (1 + e)
    below = e * above
    # In this order a square that overflows is multiplied by nothing: what fades away does so long before.
    bend = x * below
    return tl.where(z < 0, below, above) + tl.where(bend == 0, bend, bend * growth) * above
