"""ReluGrad, LeakyReluGrad, SigmoidGrad and TanhGrad on CUDA: one pass."""

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.cuda.core.launch import bits_of, ceil_div, float_of, launch, to_type

BLOCK = 1024


def relu_grad(dY: torch.Tensor, X: torch.Tensor, dX: torch.Tensor, bad: BadIndex) -> None:
    _run(dY, X, dX, "Relu")


def leaky_relu_grad(dY: torch.Tensor, Y: torch.Tensor, dX: torch.Tensor, alpha: float, bad: BadIndex) -> None:
    _run(dY, Y, dX, "LeakyRelu", alpha)


def sigmoid_grad(dY: torch.Tensor, Y: torch.Tensor, dX: torch.Tensor, bad: BadIndex) -> None:
    _run(dY, Y, dX, "Sigmoid")


def tanh_grad(dY: torch.Tensor, Y: torch.Tensor, dX: torch.Tensor, bad: BadIndex) -> None:
    _run(dY, Y, dX, "Tanh")


def _run(dY: torch.Tensor, Y: torch.Tensor, dX: torch.Tensor, name: str, alpha: float = 0) -> None:
    if dX.numel() == 0:
        return
    launch(
        _some, ceil_div(dX.numel(), BLOCK), dY.view(-1), Y.view(-1), dX.view(-1), dX.numel(), bits_of(alpha), name,
        BLOCK, tl.float64 if dX.dtype == torch.float64 else tl.float32,
    )  # fmt: skip


@triton.jit
def _some(dY, Y, dX, count, alpha, NAME: tl.constexpr, BLOCK: tl.constexpr, WORK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    g = tl.load(dY + at, here, other=0).to(WORK)
    y = tl.load(Y + at, here, other=0).to(WORK)
    if NAME == "Relu":
        result = tl.where(y > 0, g, 0.0)
    elif NAME == "LeakyRelu":
        result = tl.where(y > 0, g, g * float_of(alpha, WORK))
    elif NAME == "Sigmoid":
        result = g * y * (1 - y)
    else:
        tl.static_assert(NAME == "Tanh")
        result = g * (1 - y * y)
    tl.store(dX + at, to_type(result, dX.dtype.element_ty), here)
