"""The optimizers' updates on a GPU: the functions of cpu/core/optimizers.py, one program a chunk.

`verdict` is what `judge` found about a step, and stays on the GPU: the loss, the norm of the gradient, the factor that
clips it, and 1 if the step is good. After one that is not, nothing is updated until the host writes a 1 there again.

Kernels that change the parameters `p` write their copy in a half type as well, `half`, if there is one.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.launch import bits_of, float_of, launch, narrowed
from onnxgrad.tensor_types import Array

BLOCK = 1 << 12  # elements of a chunk
WARPS = 8
LOSS, NORM, FACTOR, IS_GOOD = range(4)  # of a verdict
GOOD = tl.constexpr(IS_GOOD)
VECTOR = tl.constexpr(4)  # elements that are loaded and stored at once; chunks begin at multiples


@triton.jit
def _elements(chunks, verdict, BLOCK: tl.constexpr):
    """The elements of this program's chunk, which of them are updated, which are near, and the row of its group.

    Those near are loaded and stored: the ones that are updated, and the gap behind them up to a whole vector.
    """
    at = chunks + 4 * tl.program_id(0).to(tl.int64)
    start, stop, group = tl.multiple_of(tl.load(at), VECTOR), tl.load(at + 1), tl.load(at + 2)
    i = start + tl.arange(0, BLOCK)
    stop = tl.where(tl.load(verdict + GOOD) != 0, stop, start)
    return i, i < stop, i < tl.cdiv(stop, VECTOR) * VECTOR, group


@triton.jit
def _store_parameters(p, half, i, x, inside, near):
    """Writes parameters and their half copy; gaps stay zero, whatever the update made of them."""
    x = tl.where(inside, x, 0.0)
    tl.store(p + i, x, near)
    if half is not None:
        tl.store(half + i, narrowed(x, half.dtype.element_ty), near)


@triton.jit
def _sgd(chunks, verdict, hyper, p, g, momentum_of, half, WIDTH: tl.constexpr, MOMENTUM: tl.constexpr,
         FIRST: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i, inside, near, group = _elements(chunks, verdict, BLOCK)
    kind: tl.constexpr = p.dtype.element_ty
    row = hyper + group * WIDTH
    rate, decay, momentum = tl.load(row).to(kind), tl.load(row + 1).to(kind), tl.load(row + 2).to(kind)
    keep, nesterov = tl.load(row + 3).to(kind), tl.load(row + 4) != 0
    now = tl.load(p + i, near)
    step = tl.load(g + i, near) + decay * now
    if MOMENTUM:
        moved = step if FIRST else momentum * tl.load(momentum_of + i, near) + keep * step
        tl.store(momentum_of + i, moved, near)
        step = tl.where(momentum != 0, tl.where(nesterov, step + momentum * moved, moved), step)
    _store_parameters(p, half, i, now - rate * step, inside, near)


def sgd(
    chunks: Any, verdict: Any, hyper: Array, p: Any, g: Any, momentum_of: Any, first: bool, half: Any = None
) -> None:
    _launch(_sgd, chunks, verdict, hyper, p, g, momentum_of, half, len(momentum_of) > 0, first)


@triton.jit
def _adam(chunks, verdict, hyper, p, g, m, v, half, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    i, inside, near, group = _elements(chunks, verdict, BLOCK)
    kind: tl.constexpr = p.dtype.element_ty
    row = hyper + group * WIDTH
    beta1, beta2, eps = tl.load(row + 1).to(kind), tl.load(row + 2).to(kind), tl.load(row + 3).to(kind)
    l2, before, after = tl.load(row + 4).to(kind), tl.load(row + 5).to(kind), tl.load(row + 6).to(kind)
    rate = tl.load(row + 7).to(kind)
    now = tl.load(p + i, near)
    grad = tl.load(g + i, near) + l2 * now
    mean = beta1 * tl.load(m + i, near) + (1 - tl.load(row + 1)).to(kind) * grad
    square = beta2 * tl.load(v + i, near) + (1 - tl.load(row + 2)).to(kind) * grad * grad
    tl.store(m + i, mean, near)
    tl.store(v + i, square, near)
    now = now * before - rate * mean / (tl.sqrt(square) + eps)
    _store_parameters(p, half, i, now - after * now, inside, near)


def adam(chunks: Any, verdict: Any, hyper: Array, p: Any, g: Any, m: Any, v: Any, half: Any = None) -> None:
    _launch(_adam, chunks, verdict, hyper, p, g, m, v, half)


@triton.jit
def _adagrad(chunks, verdict, hyper, p, g, total, half, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    i, inside, near, group = _elements(chunks, verdict, BLOCK)
    kind: tl.constexpr = p.dtype.element_ty
    row = hyper + group * WIDTH
    rate, decay, eps = tl.load(row).to(kind), tl.load(row + 1).to(kind), tl.load(row + 2).to(kind)
    now = tl.load(p + i, near)
    grad = tl.load(g + i, near) + decay * now
    square = tl.load(total + i, near) + grad * grad
    tl.store(total + i, square, near)
    _store_parameters(p, half, i, now - rate * grad / (tl.sqrt(square) + eps), inside, near)


def adagrad(chunks: Any, verdict: Any, hyper: Array, p: Any, g: Any, total: Any, half: Any = None) -> None:
    _launch(_adagrad, chunks, verdict, hyper, p, g, total, half)


@triton.jit
def _rmsprop(chunks, verdict, hyper, p, g, square, mean, momentum_of, half, WIDTH: tl.constexpr,
             MOMENTUM: tl.constexpr, CENTERED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i, inside, near, group = _elements(chunks, verdict, BLOCK)
    kind: tl.constexpr = p.dtype.element_ty
    row = hyper + group * WIDTH
    rate, decay, eps = tl.load(row).to(kind), tl.load(row + 1).to(kind), tl.load(row + 2).to(kind)
    alpha, momentum = tl.load(row + 3).to(kind), tl.load(row + 4).to(kind)
    new = (1 - tl.load(row + 3)).to(kind)
    now = tl.load(p + i, near)
    grad = tl.load(g + i, near) + decay * now
    spread = alpha * tl.load(square + i, near) + new * grad * grad
    tl.store(square + i, spread, near)
    if CENTERED:
        middle = alpha * tl.load(mean + i, near) + new * grad
        tl.store(mean + i, middle, near)
        spread -= middle * middle
    step = grad / (tl.sqrt(spread) + eps)
    if MOMENTUM:
        moved = momentum * tl.load(momentum_of + i, near) + step
        tl.store(momentum_of + i, moved, near)
        step = tl.where(momentum != 0, moved, step)
    _store_parameters(p, half, i, now - rate * step, inside, near)


def rmsprop(
    chunks: Any, verdict: Any, hyper: Array, p: Any, g: Any, square: Any, mean: Any, momentum_of: Any, centered: bool,
    half: Any = None,
) -> None:  # fmt: skip
    _launch(_rmsprop, chunks, verdict, hyper, p, g, square, mean, momentum_of, half, len(momentum_of) > 0, centered)


@triton.jit
def _lamb_direction(chunks, verdict, hyper, p, g, m, v, direction, sums, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    i, inside, near, group = _elements(chunks, verdict, BLOCK)
    kind: tl.constexpr = p.dtype.element_ty
    row = hyper + group * WIDTH
    beta1, beta2, eps = tl.load(row + 1).to(kind), tl.load(row + 2).to(kind), tl.load(row + 3).to(kind)
    decay, corrected1, corrected2 = tl.load(row + 4).to(kind), tl.load(row + 5).to(kind), tl.load(row + 6).to(kind)
    now, grad = tl.load(p + i, near, 0.0), tl.load(g + i, near, 0.0)
    mean = beta1 * tl.load(m + i, near, 0.0) + (1 - tl.load(row + 1)).to(kind) * grad
    square = beta2 * tl.load(v + i, near, 0.0) + (1 - tl.load(row + 2)).to(kind) * grad * grad
    tl.store(m + i, mean, near)
    tl.store(v + i, square, near)
    step = tl.where(inside, (mean / corrected1) / (tl.sqrt(square / corrected2) + eps) + decay * now, 0.0)
    tl.store(direction + i, step, near)
    k = tl.program_id(0)
    tl.store(sums + 2 * k, tl.sum(now.to(tl.float64) * now.to(tl.float64), 0))
    tl.store(sums + 2 * k + 1, tl.sum(step.to(tl.float64) * step.to(tl.float64), 0))


@triton.jit
def _lamb_move(chunks, verdict, hyper, p, direction, ratios, half, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    i, inside, near, group = _elements(chunks, verdict, BLOCK)
    number = tl.load(chunks + 4 * tl.program_id(0).to(tl.int64) + 3)
    rate = (tl.load(hyper + group * WIDTH) * tl.load(ratios + number)).to(p.dtype.element_ty)
    _store_parameters(p, half, i, tl.load(p + i, near) - rate * tl.load(direction + i, near), inside, near)


def lamb_direction(
    chunks: Any, verdict: Any, hyper: Array, p: Any, g: Any, m: Any, v: Any, direction: Any, sums: Any
) -> None:
    _launch(_lamb_direction, chunks, verdict, hyper, p, g, m, v, direction, sums)


def lamb_ratios(chunks: Any, verdict: Any, sums: Any, ratios: Any) -> None:
    # The chunks of a parameter lie side by side; this adds them up in the same order every time.
    of_each = torch.bincount(chunks[:, 3], minlength=len(ratios))
    sizes = torch.segment_reduce(sums, "sum", lengths=of_each, axis=0).sqrt_()
    whole = (sizes[:, 0] > 0) & (sizes[:, 1] > 0)
    ratios.copy_(torch.where(whole, sizes[:, 0] / sizes[:, 1], 1.0))


def lamb_move(chunks: Any, verdict: Any, hyper: Array, p: Any, direction: Any, ratios: Any, half: Any = None) -> None:
    _launch(_lamb_move, chunks, verdict, hyper, p, direction, ratios, half)


@triton.jit
def _squares(chunks, g, sums, BLOCK: tl.constexpr):
    at = chunks + 4 * tl.program_id(0).to(tl.int64)
    i = tl.load(at) + tl.arange(0, BLOCK)
    x = tl.load(g + i, i < tl.load(at + 1), 0.0).to(tl.float64)
    tl.store(sums + tl.program_id(0), tl.sum(x * x, 0))


def squares(chunks: Any, verdict: Any, g: Any, sums: Any) -> None:
    launch(_squares, len(chunks), chunks, g, sums, BLOCK, num_warps=WARPS)


@triton.jit
def _judge(verdict, sums, count, loss, limit, CLIPS: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, count, BLOCK):
        k = start + tl.arange(0, BLOCK)
        total += tl.load(sums + k, k < count, 0.0)
    norm = tl.sqrt(tl.sum(total, 0))
    found = tl.load(loss).to(tl.float64)
    tl.store(verdict, found)
    tl.store(verdict + 1, norm)
    if CLIPS:
        most = float_of(limit, tl.float64)
        tl.store(verdict + 2, tl.where(norm > most, most / (norm + 1e-6), 1.0))
    is_finite = (norm - norm == 0) & (found - found == 0)
    tl.store(verdict + GOOD, tl.where(is_finite, tl.load(verdict + GOOD), 0.0))


def judge(chunks: Any, verdict: Any, sums: Any, loss: Any, clip_norm: float | None) -> None:
    """Takes the sums of `squares` and the loss, and writes the verdict."""
    limit = bits_of(clip_norm or 0.0)
    launch(_judge, 1, verdict, sums, len(sums), loss, limit, clip_norm is not None, 1024, num_warps=WARPS)


def clip(chunks: Any, verdict: Any, g: Any) -> None:
    """Multiplies by the factor of the verdict."""
    g.mul_(verdict[FACTOR])


def replace(chunks: Any, verdict: Any, current: Any, following: Any) -> None:
    """current[...] = following, if the step is good."""
    torch.where(verdict[IS_GOOD] != 0, following, current, out=current)


@triton.jit
def _average(chunks, verdict, weights, p, averages, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    i, _, near, _ = _elements(chunks, verdict, BLOCK)
    weight = tl.load(weights)
    new, old = weight.to(p.dtype.element_ty), (1 - weight).to(p.dtype.element_ty)
    now, average = tl.load(p + i, near), tl.load(averages + i, near)
    step = now - average
    tl.store(averages + i, tl.where(weight < 0.5, average + new * step, now - old * step), near)


def average(chunks: Any, verdict: Any, p: Any, averages: Any, weight: float) -> None:
    _launch(_average, chunks, verdict, np.array([[weight]]), p, averages)


def scale(chunks: Any, verdict: Any, g: Any, factor: float) -> None:
    g.mul_(factor)


def clamp(chunks: Any, verdict: Any, g: Any, limit: float) -> None:
    g.clamp_(-limit, limit)


def add(chunks: Any, verdict: Any, total: Any, g: Any) -> None:
    total.add_(g)


def _launch(kernel: Any, chunks: Any, verdict: Any, hyper: Any, p: Any, *rest: Any) -> None:
    numbers = torch.from_numpy(np.ascontiguousarray(hyper)) if isinstance(hyper, np.ndarray) else hyper
    if p.is_cuda and not numbers.is_cuda:
        numbers = numbers.pin_memory().to(p.device, non_blocking=True)  # or the host would wait for the step before
    tensors = [x for x in rest if x is None or isinstance(x, torch.Tensor)]
    settings = [bool(x) for x in rest if not (x is None or isinstance(x, torch.Tensor))]
    args = (chunks, verdict, numbers, p, *tensors, numbers.shape[1], *settings, BLOCK)
    launch(kernel, len(chunks), *args, num_warps=WARPS)
