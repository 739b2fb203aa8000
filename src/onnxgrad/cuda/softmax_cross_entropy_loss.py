"""The softmax cross entropy on CUDA, a program for some samples each.

SoftmaxCrossEntropyLossInternal goes along the classes once for the highest score and the sum of exponentials, and once
more to write their logarithms, but reads only once what fits into one tile. Each program leaves the sum of its losses,
and one adds these up, always in the same order. For SoftmaxCrossEntropyLossGrad, what samples count for is added up,
then log_prob goes through once.
"""

import math

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.activations import exp
from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.cuda.core.launch import ceil_div, counting_type, launch, power_of_two, to_type
from onnxgrad.cuda.core.losses import SUMS, log, sum_of_losses, total_of
from onnxgrad.ops.softmax_cross_entropy_loss import check_output_type, ignored_label
from onnxgrad.tensor_types import Array

TILE = 4096  # elements, at most
NEIGHBOURS = 64  # samples of one program where they lie side by side in memory: 256 bytes of float32


def softmax_cross_entropy_loss_internal(
    scores: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor | None,
    ignore_index: Array | None,
    output: torch.Tensor | None,
    log_prob: torch.Tensor | None,
    reduction: str,
    output_type: int | None,
    bad: BadIndex,
) -> None:
    check_output_type(str(scores.dtype).removeprefix("torch."), output_type)
    classes, inner = scores.shape[1], math.prod(scores.shape[2:])
    ignored = ignored_label(ignore_index)
    bad.about_labels(labels, classes, ignored)
    samples = labels.numel()
    if samples == 0:
        if output is not None:
            output.zero_()
        return
    height, length = _tile(samples, classes, inner)
    programs = ceil_div(samples, height)
    sums = None if reduction == "none" else torch.empty(2 * programs, dtype=torch.float64, device=scores.device)
    each = output.view(-1) if output is not None and sums is None else None
    launch(
        _losses, programs, scores.view(-1), labels.view(-1), weights, each,
        None if log_prob is None else log_prob.view(-1), sums, bad.position, samples, classes, inner, ignored, programs,
        height, length, classes <= length, weights is not None, each is not None, sums is not None,
        log_prob is not None, bad.position is not None,
        counting_type(scores.numel()), tl.float64 if scores.dtype == torch.float64 else tl.float32,
    )  # fmt: skip
    if output is not None and sums is not None:
        launch(
            sum_of_losses, 1, sums, output.view(-1), programs, min(SUMS, power_of_two(programs)), reduction == "mean"
        )


def _tile(samples: int, classes: int, inner: int) -> tuple[int, int]:
    """How many samples a program has, and how many of their classes it takes at once."""
    side_by_side = 1 if inner == 1 else min(NEIGHBOURS, power_of_two(inner))
    length = min(power_of_two(max(classes, 1)), TILE // side_by_side)
    return side_by_side * max(1, min(power_of_two(samples), TILE // 4) // (side_by_side * length)), length


@triton.jit
def _samples(
    labels, bad, samples, classes, inner, ignore_index, LINES: tl.constexpr, CHECK: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """A program's samples: their numbers, which exist, which count, their classes, and where their scores begin.

    With CHECK, `bad` is lowered to the first whose label is no class.
    """
    line = tl.program_id(0).to(KIND) * LINES + tl.arange(0, LINES)
    exists = line < samples
    chosen = tl.load(labels + line, exists, other=0).to(tl.int64)
    ignored = chosen == ignore_index
    outside = (chosen < 0) | (chosen >= classes)
    if CHECK:
        wrong = exists & outside & (ignored == 0)
        first = tl.min(tl.where(wrong, line.to(tl.int64), 0x7FFFFFFFFFFFFFFF), 0)
        if tl.sum(wrong.to(tl.int32), 0) > 0:
            tl.atomic_min(bad, first)
    counted = exists & (ignored == 0) & (outside == 0)
    return line, exists, counted, chosen, (line // inner) * (classes * inner) + line % inner


@triton.jit
def _losses(
    scores, labels, weights, output, log_prob, sums, bad, samples, classes, inner, ignore_index, programs,
    LINES: tl.constexpr, LENGTH: tl.constexpr, ONE_TILE: tl.constexpr, WEIGHTED: tl.constexpr, EACH: tl.constexpr,
    SUMMED: tl.constexpr, KEPT: tl.constexpr, CHECK: tl.constexpr, KIND: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    line, exists, counted, chosen, start_of = _samples(
        labels, bad, samples, classes, inner, ignore_index, LINES, CHECK, KIND
    )
    step = tl.arange(0, LENGTH).to(KIND)
    lowest = float("-inf")
    if ONE_TILE:
        here = exists[:, None] & (step < classes)[None, :]
        at = start_of[:, None] + (step * inner)[None, :]
        x = tl.load(scores + at, here, other=lowest).to(WORK)
        highest = tl.max(x, 1)
        shifted = x - highest[:, None]
        total = tl.sum(tl.where(here, exp(shifted), 0), 1)
        if KEPT:
            result = shifted - log(total)[:, None].to(WORK)
            tl.store(log_prob + at, to_type(result, log_prob.dtype.element_ty), here)
    else:
        # What loops gather is as wide as a tile: Triton 3.6 fails on some of those that reduce tiles of float64.
        highest_at = tl.full([LINES, LENGTH], lowest, WORK)
        total_at = tl.zeros([LINES, LENGTH], WORK)  # of exponentials of differences to the highest so far
        for start in range(0, classes, LENGTH):
            here = exists[:, None] & (start + step < classes)[None, :]
            at = start_of[:, None] + ((start + step) * inner)[None, :]
            x = tl.load(scores + at, here, other=lowest).to(WORK)
            higher = tl.maximum(highest_at, x)
            origin = tl.where(higher == lowest, 0, higher)  # -inf has no difference to itself
            total_at = total_at * exp(highest_at - origin) + exp(x - origin)
            highest_at = higher
        highest = tl.max(highest_at, 1)
        total = tl.sum(total_at * exp(highest_at - tl.where(highest == lowest, 0, highest)[:, None]), 1)
        if KEPT:
            rest = log(total)[:, None].to(WORK)
            for start in range(0, classes, LENGTH):
                here = exists[:, None] & (start + step < classes)[None, :]
                at = start_of[:, None] + ((start + step) * inner)[None, :]
                x = tl.load(scores + at, here, other=lowest).to(WORK)
                result = (x - highest[:, None]) - rest
                tl.store(log_prob + at, to_type(result, log_prob.dtype.element_ty), here)
    right = tl.load(scores + start_of + chosen * inner, counted, other=0).to(WORK)
    loss = log(total) - (right - highest).to(tl.float64)
    counts = counted.to(tl.float64)
    if WEIGHTED:
        counts = tl.load(weights + chosen, counted, other=0).to(tl.float64)
    # A sample that does not count has no loss, whatever its scores are, NaN maybe.
    loss = tl.where(counted, loss * counts, 0)
    if EACH:
        tl.store(output + line, to_type(loss.to(WORK), output.dtype.element_ty), exists)
    if SUMMED:
        tl.store(sums + tl.program_id(0), tl.sum(loss, 0))
        tl.store(sums + programs + tl.program_id(0), tl.sum(counts, 0))


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
    total = total_of(label, weight, classes, ignore_index) if reduction == "mean" else None
    height, length = _tile(samples, classes, inner)
    launch(
        _lines, ceil_div(samples, height), dY.view(-1), log_prob.view(-1), label.view(-1), weight, d_logits.view(-1),
        total, bad.position, samples, classes, inner, ignore_index,
        height, length, reduction == "none", weight is not None, total is not None, bad.position is not None,
        counting_type(log_prob.numel()), tl.float64 if log_prob.dtype == torch.float64 else tl.float32,
    )  # fmt: skip


@triton.jit
def _lines(
    dY, log_prob, label, weight, d_logits, total, bad, samples, classes, inner, ignore_index,
    LINES: tl.constexpr, LENGTH: tl.constexpr, EACH: tl.constexpr, WEIGHTED: tl.constexpr, IS_MEAN: tl.constexpr,
    CHECK: tl.constexpr, KIND: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    line, exists, counted, chosen, start_of = _samples(
        label, bad, samples, classes, inner, ignore_index, LINES, CHECK, KIND
    )
    each = tl.load(dY + line * (1 if EACH else 0), counted, other=0).to(WORK)
    if IS_MEAN:
        each = (each.to(tl.float64) / tl.load(total)).to(WORK)
    if WEIGHTED:
        each *= tl.load(weight + chosen, counted, other=0).to(WORK)
    step = tl.arange(0, LENGTH).to(KIND)
    for start in range(0, classes, LENGTH):
        here = exists[:, None] & (start + step < classes)[None, :]
        at = start_of[:, None] + ((start + step) * inner)[None, :]
        # A sample that does not count has 0 in `each`; what it says, NaN maybe, is not read.
        probability = exp(tl.load(log_prob + at, here & counted[:, None], other=0).to(WORK))
        right = ((start + step)[None, :] == chosen[:, None]).to(WORK)
        result = (probability - right) * each[:, None]
        tl.store(d_logits + at, to_type(result, d_logits.dtype.element_ty), here)
