"""SoftmaxCrossEntropyLossGrad on CUDA: what samples count for is added up, then log_prob goes through once."""

import math

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.activate import exp
from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.cuda.core.launch import ceil_div, counting_type, launch, power_of_two, to_type

TILE = 4096  # elements, at most
NEIGHBOURS = 64  # samples of one program where they lie side by side in memory: 256 bytes of float32


def softmax_cross_entropy_loss_grad(
    dY: torch.Tensor,
    log_prob: torch.Tensor,
    label: torch.Tensor,
    weight: torch.Tensor | None,
    d_logits: torch.Tensor,
    reduction: str,
    ignore_index: int,
    bad: BadIndex,
) -> None:
    classes, inner = log_prob.shape[1], math.prod(log_prob.shape[2:])
    bad.about_labels(label, classes, ignore_index)
    samples = label.numel()
    if samples == 0:
        return
    total = _total(label, weight, classes, ignore_index) if reduction == "mean" else None
    side_by_side = 1 if inner == 1 else min(NEIGHBOURS, power_of_two(inner))
    length = min(power_of_two(max(classes, 1)), TILE // side_by_side)
    height = side_by_side * max(1, min(power_of_two(samples), TILE // 4) // (side_by_side * length))
    launch(
        _lines, ceil_div(samples, height), dY.view(-1), log_prob.view(-1), label.view(-1), weight, d_logits.view(-1),
        total, bad.position, samples, classes, inner, ignore_index,
        height, length, reduction == "none", weight is not None, total is not None, bad.position is not None,
        counting_type(log_prob.numel()), tl.float64 if log_prob.dtype == torch.float64 else tl.float32,
    )  # fmt: skip


def _total(label: torch.Tensor, weight: torch.Tensor | None, classes: int, ignore_index: int) -> torch.Tensor:
    """What all samples count for together, or 1 if that is nothing, without waiting for the GPU."""
    counted = label != ignore_index
    if weight is None:
        total = counted.sum().to(torch.float64)
    else:
        inside = counted & (label >= 0) & (label < classes)
        each = weight.to(torch.float64)[torch.where(inside, label, 0).to(torch.int64)]
        total = torch.where(inside, each, 0.0).sum()
    return torch.where(total == 0, 1.0, total).reshape(1)


@triton.jit
def _lines(
    dY, log_prob, label, weight, d_logits, total, bad, samples, classes, inner, ignore_index,
    LINES: tl.constexpr, LENGTH: tl.constexpr, EACH: tl.constexpr, WEIGHTED: tl.constexpr, IS_MEAN: tl.constexpr,
    CHECK: tl.constexpr, KIND: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(KIND) * LINES + tl.arange(0, LINES)
    exists = line < samples
    chosen = tl.load(label + line, exists, other=0).to(tl.int64)
    ignored = chosen == ignore_index
    outside = (chosen < 0) | (chosen >= classes)
    if CHECK:
        wrong = exists & outside & (ignored == 0)
        first = tl.min(tl.where(wrong, line.to(tl.int64), 0x7FFFFFFFFFFFFFFF), 0)
        if tl.sum(wrong.to(tl.int32), 0) > 0:
            tl.atomic_min(bad, first)
    counts = exists & (ignored == 0) & (outside == 0)
    each = tl.load(dY + line * (1 if EACH else 0), counts, other=0).to(WORK)
    if IS_MEAN:
        each = (each.to(tl.float64) / tl.load(total)).to(WORK)
    if WEIGHTED:
        each *= tl.load(weight + chosen, counts, other=0).to(WORK)
    start_of = (line // inner) * (classes * inner) + line % inner
    step = tl.arange(0, LENGTH).to(KIND)
    for start in range(0, classes, LENGTH):
        here = exists[:, None] & (start + step < classes)[None, :]
        at = start_of[:, None] + ((start + step) * inner)[None, :]
        # A sample that does not count has 0 in `each`; what it says, NaN maybe, is not read.
        probability = exp(tl.load(log_prob + at, here & counts[:, None], other=0).to(WORK))
        right = ((start + step)[None, :] == chosen[:, None]).to(WORK)
        result = (probability - right) * each[:, None]
        tl.store(d_logits + at, to_type(result, d_logits.dtype.element_ty), here)
