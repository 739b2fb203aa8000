"""Batch normalization on CUDA, and its gradient: programs add up slices of channels, others finish, a last pass writes.

A tile is some channels high where a channel's numbers lie apart in memory, so that its rows lie beside each other.
Tiles are added up in the type to compute in, their sums in float64, always in the same order.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.cuda.core.launch import (
    bits_of,
    ceil_div,
    counting_type,
    float_of,
    launch,
    narrowed,
    power_of_two,
    sums_dtype,
    to_type,
)

TILE = 2048  # elements, at most
BESIDE = 32  # elements that should lie beside each other: 128 bytes of float32
TILES = 4  # of a program, at least
PROGRAMS = 512  # that share the channels, if these are large enough
CHANNELS = 128  # of a program that finishes sums
KEPT = tl.constexpr(5)  # numbers for each channel: of each slice four sums and the shift; then p, q, k and r
WARPS = 4


def batch_normalization_grad(
    dY: torch.Tensor,
    X: torch.Tensor,
    scale: torch.Tensor,
    mean: torch.Tensor | None,
    inv_std: torch.Tensor | None,
    X_grad: torch.Tensor | None,
    scale_grad: torch.Tensor | None,
    bias_grad: torch.Tensor | None,
    epsilon: float,
    bad: BadIndex,
) -> None:
    channels = scale.numel()
    if channels == 0:
        return
    blocks, sizes, tile, kinds = _sizes(X, channels)
    _, _, count, _, slices = sizes
    kept = torch.empty(slices * channels * KEPT.value, dtype=torch.float64, device=X.device)
    dY, X = dY.view(-1), X.view(-1)
    measured = mean is None or inv_std is None
    means, inverses = (scale, scale) if mean is None or inv_std is None else (mean, inv_std)
    launch(_add_up, blocks * slices, dY, X, means, kept, *sizes, *tile, True, measured, *kinds, num_warps=WARPS)
    launch(
        _finish, ceil_div(channels, CHANNELS), kept, scale, inverses,
        kept if scale_grad is None else scale_grad, kept if bias_grad is None else bias_grad,
        channels, count, slices, bits_of(epsilon), CHANNELS, measured, scale_grad is not None, bias_grad is not None,
        *kinds,
        num_warps=WARPS,
    )  # fmt: skip
    if X_grad is not None and count > 0:
        launch(_apply, blocks * slices, dY, X, X_grad.view(-1), kept, *sizes, *tile, True, *kinds, num_warps=WARPS)


def _sizes(X: torch.Tensor, channels: int) -> tuple[int, tuple[int, ...], tuple[int, int], tuple[Any, Any]]:
    """Blocks of channels; channels, numbers of a channel in one image, in all, in a slice, slices; the tile; types."""
    size = max(1, math.prod(X.shape[2:]))
    count = X.numel() // channels
    height = min(power_of_two(channels), power_of_two(ceil_div(BESIDE, size)))
    length = min(power_of_two(max(1, count)), TILE // height)
    blocks = ceil_div(channels, height)
    slices = max(1, min(ceil_div(PROGRAMS, blocks), count // (TILES * length)))
    per_slice = ceil_div(ceil_div(count, slices), length) * length
    kinds = counting_type(X.numel()), tl.float64 if sums_dtype(X.dtype) == torch.float64 else tl.float32
    return blocks, (channels, size, count, per_slice, slices), (height, length), kinds


@triton.jit
def _add_up(
    dY, X, mean, kept, channels, size, count, per_slice, slices,
    HEIGHT: tl.constexpr, LENGTH: tl.constexpr, OF_GRADIENT: tl.constexpr, MEASURED: tl.constexpr, KIND: tl.constexpr,
    WORK: tl.constexpr,
):  # fmt: skip
    """Of a slice of some channels the sums of g, g · d, d and d², as far as they are asked for.

    d is x less a shift: the mean if it is given, or else that of the first tile.
    """
    number = tl.program_id(0).to(KIND)
    channel = number // slices * HEIGHT + tl.arange(0, HEIGHT)
    step = tl.arange(0, LENGTH).to(KIND)
    there = (channel < channels)[:, None]
    if MEASURED:  # the mean of the first tile
        here = there & (step < count)[None, :]
        at = (step // size)[None, :] * channels * size + channel[:, None] * size + (step % size)[None, :]
        shift = tl.sum(tl.load(X + at, here, other=0).to(WORK), 1, keep_dims=True)
        shift /= tl.maximum(tl.minimum(count, LENGTH), 1).to(WORK)
    else:
        shift = tl.load(mean + channel, channel < channels, other=0).to(WORK)[:, None]
    level = tl.zeros([HEIGHT], tl.float64)
    along = tl.zeros([HEIGHT], tl.float64)
    total = tl.zeros([HEIGHT], tl.float64)
    square = tl.zeros([HEIGHT], tl.float64)
    first = number % slices * per_slice
    end = tl.minimum(first + per_slice, count)
    for start in range(first, end, LENGTH):
        element = start + step
        here = there & (element < end)[None, :]
        at = (element // size)[None, :] * channels * size + channel[:, None] * size + (element % size)[None, :]
        d = tl.where(here, tl.load(X + at, here, other=0).to(WORK) - shift, 0)
        if OF_GRADIENT:
            g = tl.load(dY + at, here, other=0).to(WORK)
            level += tl.sum(g, 1).to(tl.float64)
            along += tl.sum(g * d, 1).to(tl.float64)
        if MEASURED:
            total += tl.sum(d, 1).to(tl.float64)
            square += tl.sum(d * d, 1).to(tl.float64)
    to = kept + (number % slices * channels + channel) * KEPT
    tl.store(to, level, channel < channels)
    tl.store(to + 1, along, channel < channels)
    tl.store(to + 2, total, channel < channels)
    tl.store(to + 3, square, channel < channels)
    tl.store(to + 4, tl.reshape(shift, [HEIGHT]).to(tl.float64), channel < channels)


@triton.jit
def _finish(
    kept, scale, inv_std, scale_grad, bias_grad, channels, count, slices, epsilon,
    CHANNELS: tl.constexpr, MEASURED: tl.constexpr, OF_SCALE: tl.constexpr, OF_BIAS: tl.constexpr, KIND: tl.constexpr,
    WORK: tl.constexpr,
):  # fmt: skip
    """The gradients of scale and bias; the first slice's sums become p, q, k and r: X_grad = p·g + q·(x - k) + r."""
    channel = tl.program_id(0).to(KIND) * CHANNELS + tl.arange(0, CHANNELS)
    here = channel < channels
    level = tl.zeros([CHANNELS], tl.float64)
    along = tl.zeros([CHANNELS], tl.float64)
    total = tl.zeros([CHANNELS], tl.float64)
    square = tl.zeros([CHANNELS], tl.float64)
    for number in range(slices):
        at = kept + (number * channels + channel) * KEPT
        level += tl.load(at, here, other=0)
        along += tl.load(at + 1, here, other=0)
        total += tl.load(at + 2, here, other=0)
        square += tl.load(at + 3, here, other=0)
    to = kept + channel * KEPT
    centre = tl.load(to + 4, here, other=0)
    share = 1 / tl.maximum(count, 1).to(tl.float64)
    if MEASURED:
        beyond = total * share
        variance = square * share - beyond * beyond
        inv = 1 / tl.sqrt(tl.where(variance < 0, 0.0, variance) + float_of(epsilon, tl.float64))
        centre += beyond
        along -= beyond * level
    else:
        inv = tl.load(inv_std + channel, here, other=0).to(tl.float64)
    if OF_SCALE:
        tl.store(scale_grad + channel, narrowed(along * inv, scale_grad.dtype.element_ty), here)
    if OF_BIAS:
        tl.store(bias_grad + channel, narrowed(level, bias_grad.dtype.element_ty), here)
    p = tl.load(scale + channel, here, other=0).to(tl.float64) * inv
    q = -p * inv * inv * along * share
    k = centre.to(WORK).to(tl.float64)  # what of it a number of that type can hold
    tl.store(to, p, here)
    tl.store(to + 1, q, here)
    tl.store(to + 2, k, here)
    tl.store(to + 3, q * (k - centre) - p * level * share, here)


@triton.jit
def _apply(
    dY, X, result, kept, channels, size, count, per_slice, slices,
    HEIGHT: tl.constexpr, LENGTH: tl.constexpr, OF_GRADIENT: tl.constexpr, KIND: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(KIND)
    channel = number // slices * HEIGHT + tl.arange(0, HEIGHT)
    step = tl.arange(0, LENGTH).to(KIND)
    there = channel < channels
    coefficients = kept + channel * KEPT
    p = tl.load(coefficients, there, other=0).to(WORK)[:, None]
    q = tl.load(coefficients + 1, there, other=0).to(WORK)[:, None]
    k = tl.load(coefficients + 2, there, other=0).to(WORK)[:, None]
    r = tl.load(coefficients + 3, there, other=0).to(WORK)[:, None]
    first = number % slices * per_slice
    end = tl.minimum(first + per_slice, count)
    for start in range(first, end, LENGTH):
        element = start + step
        here = there[:, None] & (element < end)[None, :]
        at = (element // size)[None, :] * channels * size + channel[:, None] * size + (element % size)[None, :]
        new = q * (tl.load(X + at, here, other=0).to(WORK) - k) + r
        if OF_GRADIENT:
            new = p * tl.load(dY + at, here, other=0).to(WORK) + new
        tl.store(result + at, to_type(new, result.dtype.element_ty), here)


def batch_norm_internal(
    X: torch.Tensor,
    scale: torch.Tensor,
    B: torch.Tensor,
    input_mean: torch.Tensor,
    input_var: torch.Tensor,
    Y: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    saved_mean: torch.Tensor | None,
    saved_inv_std: torch.Tensor | None,
    epsilon: float,
    momentum: float,
    training_mode: int,
    bad: BadIndex,
) -> None:
    channels = scale.numel()
    if channels == 0:
        return
    blocks, sizes, tile, kinds = _sizes(X, channels)
    _, _, count, _, slices = sizes
    kept = torch.empty(slices * channels * KEPT.value, dtype=torch.float64, device=X.device)
    X = X.view(-1)
    if training_mode:
        launch(_add_up, blocks * slices, X, X, scale, kept, *sizes, *tile, False, True, *kinds, num_warps=WARPS)
    statistics = (running_mean, running_var, saved_mean, saved_inv_std)
    launch(
        _tell, ceil_div(channels, CHANNELS), kept, scale, B, input_mean, input_var,
        *(kept if s is None else s for s in statistics),
        channels, count, slices, bits_of(epsilon), bits_of(momentum), CHANNELS, training_mode != 0,
        *(s is not None for s in statistics), *kinds,
        num_warps=WARPS,
    )  # fmt: skip
    if Y is not None and count > 0:
        launch(_apply, blocks * slices, X, X, Y.view(-1), kept, *sizes, *tile, False, *kinds, num_warps=WARPS)


@triton.jit
def _tell(
    kept, scale, bias, mean, variance, running_mean, running_var, saved_mean, saved_inv_std, channels, count, slices,
    epsilon, momentum,
    CHANNELS: tl.constexpr, MEASURED: tl.constexpr, RUNNING_MEAN: tl.constexpr, RUNNING_VAR: tl.constexpr,
    SAVED_MEAN: tl.constexpr, SAVED_INV_STD: tl.constexpr, KIND: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """The statistics; the first slice's sums become q, k and r: Y = q · (x - k) + r."""
    channel = tl.program_id(0).to(KIND) * CHANNELS + tl.arange(0, CHANNELS)
    here = channel < channels
    to = kept + channel * KEPT
    centre = tl.load(mean + channel, here, other=0).to(tl.float64)
    spread = tl.load(variance + channel, here, other=0).to(tl.float64)
    new_mean, new_spread = centre, spread
    if MEASURED:
        total = tl.zeros([CHANNELS], tl.float64)
        square = tl.zeros([CHANNELS], tl.float64)
        for number in range(slices):
            at = kept + (number * channels + channel) * KEPT
            total += tl.load(at + 2, here, other=0)
            square += tl.load(at + 3, here, other=0)
        share = 1 / tl.maximum(count, 1).to(tl.float64)
        beyond = total * share
        measured = square * share - beyond * beyond
        measured = tl.where(measured < 0, 0.0, measured)
        average = tl.load(to + 4, here, other=0) + beyond
        old = float_of(momentum, tl.float64)
        new_mean, new_spread = centre * old + average * (1 - old), spread * old + measured * (1 - old)
        centre, spread = average, measured
    inv = 1 / tl.sqrt(spread + float_of(epsilon, tl.float64))
    if RUNNING_MEAN:
        tl.store(running_mean + channel, narrowed(new_mean, running_mean.dtype.element_ty), here)
    if RUNNING_VAR:
        tl.store(running_var + channel, narrowed(new_spread, running_var.dtype.element_ty), here)
    if SAVED_MEAN:
        tl.store(saved_mean + channel, narrowed(centre, saved_mean.dtype.element_ty), here)
    if SAVED_INV_STD:
        tl.store(saved_inv_std + channel, narrowed(inv, saved_inv_std.dtype.element_ty), here)
    q = tl.load(scale + channel, here, other=0).to(tl.float64) * inv
    k = centre.to(WORK).to(tl.float64)  # what of it a number of that type can hold
    tl.store(to + 1, q, here)
    tl.store(to + 2, k, here)
    tl.store(to + 3, tl.load(bias + channel, here, other=0).to(tl.float64) + q * (k - centre), here)
