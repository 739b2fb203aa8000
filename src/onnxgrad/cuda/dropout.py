"""SeededDropout on CUDA: the draws of the CPU, bit for bit."""

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.cuda.core.launch import bits_of, ceil_div, float_of, launch, to_type
from onnxgrad.ops.dropout import BITS, FIRST, GAMMA, SECOND, threshold

BLOCK = 1024


def seeded_dropout(data: torch.Tensor, seed: torch.Tensor, output: torch.Tensor, ratio: float, bad: BadIndex) -> None:
    if data.numel() == 0:
        return
    work = tl.float64 if data.dtype == torch.float64 else tl.float32
    launch(
        _drop, ceil_div(data.numel(), BLOCK), data.view(-1), seed.view(-1), output.view(-1),
        data.numel(), bits_of(1 / (1 - ratio)), threshold(ratio), BLOCK, GAMMA, FIRST, SECOND, 64 - BITS, work,
    )  # fmt: skip


@triton.jit
def _drop(
    data, seed, output, count, scale, limit,
    BLOCK: tl.constexpr, GAMMA: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, LAST: tl.constexpr,
    WORK: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < count
    z = ((position + 1) + tl.load(seed)).to(tl.uint64, bitcast=True) * GAMMA
    z = (z ^ (z >> 30)) * FIRST
    z = (z ^ (z >> 27)) * SECOND
    z = z ^ (z >> 31)
    kept = (z >> LAST).to(tl.int64) >= limit
    scaled = tl.load(data + position, inside, other=0).to(WORK) * float_of(scale, WORK)
    tl.store(output + position, to_type(tl.where(kept, scaled, 0), output.dtype.element_ty), inside)
