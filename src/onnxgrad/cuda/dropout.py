"""DropoutGrad, and SeededDropout on CUDA: the draws of the CPU, bit for bit."""

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.cuda.core.launch import bits_of, ceil_div, divide, float_of, launch, to_type
from onnxgrad.ops import dropout

BLOCK = 1024
GAMMA, FIRST, SECOND = map(tl.constexpr, (dropout.GAMMA, dropout.FIRST, dropout.SECOND))
UNUSED = tl.constexpr(64 - dropout.BITS)  # bits of a draw


def seeded_dropout(data: torch.Tensor, seed: torch.Tensor, output: torch.Tensor, ratio: float, bad: BadIndex) -> None:
    if data.numel() == 0:
        return
    work = tl.float64 if data.dtype == torch.float64 else tl.float32
    launch(
        _drop, ceil_div(data.numel(), BLOCK), data.view(-1), seed.view(-1), output.view(-1),
        data.numel(), bits_of(1 / (1 - ratio)), dropout.threshold(ratio), BLOCK, work,
    )  # fmt: skip


@triton.jit
def draw(position, seed):
    """The number of an element that is compared with the threshold."""
    z = ((position.to(tl.int64) + 1) + seed).to(tl.uint64, bitcast=True) * GAMMA
    z = (z ^ (z >> 30)) * FIRST
    z = (z ^ (z >> 27)) * SECOND
    z = z ^ (z >> 31)
    return (z >> UNUSED).to(tl.int64)


@triton.jit
def _drop(data, seed, output, count, scale, limit, BLOCK: tl.constexpr, WORK: tl.constexpr):
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < count
    kept = draw(position, tl.load(seed)) >= limit
    scaled = tl.load(data + position, inside, other=0).to(WORK) * float_of(scale, WORK)
    tl.store(output + position, to_type(tl.where(kept, scaled, 0), output.dtype.element_ty), inside)


def dropout_grad(
    dy: torch.Tensor,
    mask: torch.Tensor,
    ratio: torch.Tensor | None,
    training_mode: torch.Tensor | None,
    dx: torch.Tensor,
    bad: BadIndex,
) -> None:
    if dy.numel() == 0:
        return
    launch(
        _keep, ceil_div(dy.numel(), BLOCK), dy.view(-1), mask.view(-1), dy if ratio is None else ratio,
        mask if training_mode is None else training_mode, dx.view(-1), dy.numel(), ratio is not None,
        training_mode is not None, BLOCK, tl.float64 if dy.dtype == torch.float64 else tl.float32,
    )  # fmt: skip


@triton.jit
def _keep(
    dy, mask, ratio, training, dx, count,
    HAS_RATIO: tl.constexpr, HAS_TRAINING: tl.constexpr, BLOCK: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < count
    g = tl.load(dy + position, inside, other=0).to(WORK)
    kept = tl.load(mask + position, inside, other=0) != 0
    share = tl.full([1], 0.5, WORK)
    if HAS_RATIO:
        share = share * 0 + tl.load(ratio).to(WORK)
    dropped = share != 0
    if HAS_TRAINING:
        dropped = dropped & (tl.load(training) != 0)
    result = tl.where(dropped, tl.where(kept, divide(g, 1 - share), 0), g)
    tl.store(dx + position, to_type(result, dx.dtype.element_ty), inside)
