"""What losses of class labels have in common: exact logarithms, and sums of losses and of what they count for."""

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.launch import to_type

SUMS = 1024  # of programs that are added up at once


@triton.jit
def log(x):
    """The natural logarithm in float64: a GPU's own of float32 is off by a few units near 1."""
    return tl.log(x.to(tl.float64))


@triton.jit
def sum_of_losses(sums, output, programs, BLOCK: tl.constexpr, IS_MEAN: tl.constexpr):
    losses = tl.zeros([BLOCK], tl.float64)
    counts = tl.zeros([BLOCK], tl.float64)
    for start in range(0, programs, BLOCK):
        program = start + tl.arange(0, BLOCK)
        losses += tl.load(sums + program, program < programs, other=0)
        if IS_MEAN:
            counts += tl.load(sums + programs + program, program < programs, other=0)
    loss = tl.sum(losses, 0)
    if IS_MEAN:
        total = tl.sum(counts, 0)
        loss = loss / tl.where(total == 0, 1.0, total)
    if output.dtype.element_ty != tl.float64:
        loss = loss.to(tl.float32)
    tl.store(output, to_type(loss, output.dtype.element_ty))


def total_of(label: torch.Tensor, weight: torch.Tensor | None, classes: int, ignore_index: int) -> torch.Tensor:
    """What all samples count for together, or 1 if that is nothing, without waiting for the GPU."""
    counted = label != ignore_index
    if weight is None:
        total = counted.sum().to(torch.float64)
    else:
        inside = counted & (label >= 0) & (label < classes)
        each = weight.to(torch.float64)[torch.where(inside, label, 0).to(torch.int64)]
        total = torch.where(inside, each, 0.0).sum()
    return torch.where(total == 0, 1.0, total).reshape(1)
