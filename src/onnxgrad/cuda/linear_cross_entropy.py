"""LinearCrossEntropy on CUDA: chunks of rows go through cuBLAS, one Triton kernel that makes gradients, and cuBLAS.

Nothing waits for the GPU. Products are cuBLAS's, by way of torch: of half numbers with sums in float32, of float32 in
TF32 if torch.backends.cuda.matmul.allow_tf32 says so.
"""

import math

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.activations import exp
from onnxgrad.cuda.core.cublas import sums_in_float32
from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.cuda.core.launch import ceil_div, counting_type, launch, power_of_two, sums_dtype, to_type
from onnxgrad.cuda.core.losses import SUMS, log, sum_of_losses, total_of

CHUNK = 1 << 28  # bytes of logits at a time: with fewer rows, dX has too few tiles for all multiprocessors
ALIGNED = 64  # classes in a row are made a multiple of that: cuBLAS is far slower on rows that begin anywhere
BLOCK = 4096  # classes that a program takes at once


def linear_cross_entropy(
    X: torch.Tensor,
    W: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor | None,
    scale: torch.Tensor | None,
    loss: torch.Tensor | None,
    dX: torch.Tensor | None,
    dW: torch.Tensor | None,
    dB: torch.Tensor | None,
    transW: int,
    reduction: str,
    ignore_index: int,
    precision: str,
    bad: BadIndex,
) -> None:
    rows, depth, classes = math.prod(X.shape[:-1]), X.shape[-1], W.shape[0 if transW else 1]
    bad.about_labels(labels, classes, ignore_index)
    if rows == 0:
        for result in (loss, dW, dB):
            if result is not None:
                result.zero_()
        return
    sums, dtype, device = sums_dtype(X.dtype), X.dtype, X.device
    is_rounded = precision == "bfloat16" and dtype == torch.float32
    x = X.view(rows, depth)
    width = ceil_div(classes, ALIGNED) * ALIGNED
    w = W if transW and W.dtype == dtype else _with_rows(W if transW else W.t(), width, dtype)
    if is_rounded:
        x, w = (matrix.bfloat16().to(dtype) for matrix in (x, w))
    to_x = None if dX is None else dX.view(rows, depth)
    to_w = None if dW is None else dW if transW else dW.t()
    if to_w is not None and to_w.dtype != sums:
        to_w = torch.empty(classes, depth, dtype=sums, device=device)
    to_b = None if dB is None else torch.zeros(classes, dtype=sums, device=device)
    total = total_of(labels, weights, classes, ignore_index) if reduction == "mean" else None
    losses = torch.empty(2 * rows, dtype=torch.float64, device=device)
    is_replaced = any(result is not None for result in (dX, dW, dB))
    chunks = ceil_div(rows * width * dtype.itemsize, CHUNK)
    at_once = ceil_div(ceil_div(rows, chunks), ALIGNED) * ALIGNED if chunks > 1 else rows
    logits = torch.empty(at_once, width, dtype=dtype, device=device)
    for first in range(0, rows, at_once):
        some, chunk = x[first : first + at_once], logits[: rows - first]
        with sums_in_float32():
            torch.mm(some, w.t(), out=chunk[:, : w.shape[0]])
        launch(
            _rows, len(chunk), chunk, labels.view(-1), bias, weights, scale, total, losses, bad.position, first, rows,
            classes, width, ignore_index, min(BLOCK, power_of_two(width)), bias is not None, weights is not None,
            scale is not None, total is not None, is_replaced, bad.position is not None, dtype.itemsize == 2,
            counting_type(logits.numel()), tl.float64 if sums == torch.float64 else tl.float32, num_warps=8,
        )  # fmt: skip
        if to_b is not None:
            to_b += chunk[:, :classes].sum(0, dtype=sums)
        if is_rounded:
            chunk.copy_(chunk.bfloat16())
        with sums_in_float32():
            if to_x is not None:
                torch.mm(chunk[:, : w.shape[0]], w, out=to_x[first : first + at_once])
            if to_w is not None:
                # The last few classes by themselves: all 50257 of GPT-2 at once take 0.713 ms on an H200, in two 0.496.
                whole = classes // ALIGNED * ALIGNED
                for some_classes in (slice(0, whole), slice(whole, classes)):
                    if some_classes.start < some_classes.stop:
                        _add_product(to_w[some_classes], chunk[:, some_classes].t(), some, is_first=first == 0)
    if dW is not None and to_w is not None and to_w.data_ptr() != dW.data_ptr():
        dW.copy_(to_w if transW else to_w.t())
    if dB is not None and to_b is not None:
        dB.copy_(to_b)
    if loss is not None:
        launch(sum_of_losses, 1, losses, loss.view(-1), rows, min(SUMS, power_of_two(rows)), reduction == "mean")


def _with_rows(matrix: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """A copy in another type, with rows of zeros at its end."""
    copy = torch.empty(rows, matrix.shape[1], dtype=dtype, device=matrix.device)
    copy[: len(matrix)] = matrix
    copy[len(matrix) :] = 0
    return copy


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, is_first: bool) -> None:
    """total (+)= a · b, where a and b may be half numbers and the total float32."""
    beta = 0 if is_first else 1
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:  # in the interpreter
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=beta, out=total)


@triton.jit
def _rows(
    logits, labels, bias, weights, scale, total, losses, bad, first, rows, classes, width, ignore_index,
    LENGTH: tl.constexpr, BIASED: tl.constexpr, WEIGHTED: tl.constexpr, SCALED: tl.constexpr, IS_MEAN: tl.constexpr,
    REPLACED: tl.constexpr, CHECK: tl.constexpr, ROUGH: tl.constexpr, KIND: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """The loss of a row, whose logits may be replaced by their gradient, with zeros up to the row's width."""
    row = tl.program_id(0).to(tl.int64)
    line = first + row
    chosen = tl.load(labels + line).to(tl.int64)
    outside = (chosen < 0) | (chosen >= classes)
    ignored = chosen == ignore_index
    if CHECK:
        wrong = outside & (ignored == 0)
        if wrong:
            tl.atomic_min(bad, line)
    counted = (ignored == 0) & (outside == 0)
    known = tl.where(counted, chosen, 0)
    logits += row * width
    step = tl.arange(0, LENGTH).to(KIND)
    LOWEST: tl.constexpr = -1e308 if tl.float64 == WORK else -3e38  # a number: -inf has no difference to itself
    highest_at = tl.full([LENGTH], LOWEST, WORK)
    total_at = tl.zeros([LENGTH], WORK)  # of exponentials of differences to the highest so far
    for start in range(0, classes, LENGTH):
        x = _logits(logits, bias, start + step, classes, width, BIASED, WORK)
        # Of x and the highest so far, one becomes the highest, and the other's exponential is the only one needed.
        power = _power(-tl.abs(x - highest_at), ROUGH)
        total_at = tl.where(x > highest_at, total_at * power + 1, total_at + power)
        highest_at = tl.maximum(highest_at, x)
    highest = tl.max(highest_at, 0)
    powers = tl.sum(total_at * _power(highest_at - highest, ROUGH), 0)
    right = tl.load(logits + known, counted, other=0).to(WORK)
    if BIASED:
        right += tl.load(bias + known, counted, other=0).to(WORK)
    counts = counted.to(tl.float64)
    if WEIGHTED:
        counts = tl.load(weights + known, counted, other=0).to(tl.float64)
    # A row that does not count has no loss, whatever its logits are, NaN maybe.
    loss = tl.where(counted, (log(powers) - (right - highest).to(tl.float64)) * counts, 0)
    tl.store(losses + line, loss)
    tl.store(losses + rows + line, counts)
    if REPLACED:
        each = counts
        if IS_MEAN:
            each = each / tl.load(total)
        if SCALED:
            each = each * tl.load(scale).to(tl.float64)
        each = each.to(WORK)
        share = (1 / powers.to(tl.float64)).to(WORK)
        for start in range(0, width, LENGTH):
            place = start + step
            x = _logits(logits, bias, place, classes, width, BIASED, WORK)
            result = (_power(x - highest, ROUGH) * share - (place == known).to(WORK)) * each
            result = tl.where(counted, result, 0)
            tl.store(logits + place, to_type(result, logits.dtype.element_ty), place < width)


@triton.jit
def _logits(logits, bias, place, classes, width, BIASED: tl.constexpr, WORK: tl.constexpr):
    """Those of a row, -inf from `classes` on; masked by its width, which is even enough for wide loads."""
    x = tl.where(place < classes, tl.load(logits + place, place < width, other=0).to(WORK), float("-inf"))
    if BIASED:
        x += tl.load(bias + place, place < classes, other=0).to(WORK)
    return x


@triton.jit
def _power(x, ROUGH: tl.constexpr):
    """e to the power of x; of logits that were half numbers the GPU's own is good enough, and takes a third."""
    if ROUGH:
        return tl.exp(x)
    else:  # noqa: RET505 - which Triton compiles only if it is not
        return exp(x)
