"""Images whose channels come last, on CUDA: cuDNN and cuBLAS by way of torch, the rest in Triton.

Seen with its channels first, such an image is what torch calls channels_last, and a matrix of a row for each pixel.
Batch normalization adds up slices of rows, others finish the sums, always in the same order, and a last pass writes.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.cudnn import deterministic_cudnn, padded, uses_tf32
from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.cuda.core.launch import (
    INTERPRETED,
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
from onnxgrad.ops.conv import axes_of
from onnxgrad.ops.families.windows import Axis, pool_axes, pool_settings

TILE = 4096  # numbers, of rows and channels
CHANNELS = 64  # of a tile, at most: 128 bytes of a half type lie beside each other
WARPS = 4  # of a program that adds up
ADDED = WARPS * 32 * 8  # numbers that it adds at once, 16 bytes of a half type for each thread,
LOADS = 4  # and how many of each tensor a thread has asked for by then
PROGRAMS = 528  # that add up, at most: four for each multiprocessor of an H200
POOLED = 1024  # numbers of a tile in a program that looks for largest ones, or for windows that have them
UNROLLED = tl.constexpr(16)  # elements of a window, or windows of an element, at most
SUMS = 4096  # that a program which finishes sums reads at a time, of so many channels:
FINISHED = 8
PAIRS, TAPS = 128, 16  # of a kernel's numbers that are moved at once
FLIPPED = 64  # rows and columns of a kernel, seen as a matrix, that are flipped at once
UNMASKED, BY_RESULT, BY_INPUT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # where Relu had passed numbers
COEFFICIENTS = tl.constexpr(4)  # p, q, k and r: what is written is p·g + q·(x - k) + r


def nhwc_convolution(
    X: torch.Tensor,
    W: torch.Tensor,
    B: torch.Tensor | None,
    Y: torch.Tensor,
    dilations: Sequence[int] | None,
    group: int,
    pads: Sequence[int] | None,
    strides: Sequence[int] | None,
    bad: BadIndex,
) -> None:
    """No index can be bad."""
    axes = _axes(X, W, dilations, pads, strides)
    if 0 in Y.shape:
        return
    image, kernel = (_as_computed(x) for x in (X, W))
    if 0 in X.shape:
        Y.zero_()
    elif _is_product(axes, group):
        left, right = image.view(-1, X.shape[3]), kernel.view(W.shape[:2]).t()
        _multiply(left, right, Y.view(-1, W.shape[0]))
    else:
        if group == 1:
            kernel = _with_channels_last(kernel)
        view, padding = padded(_first(image), axes)
        _convolve(view, kernel, Y, padding, [a.stride for a in axes], [a.dilation for a in axes], group)
    if B is not None:
        Y.add_(B)


def nhwc_conv_grad(
    dY: torch.Tensor,
    X: torch.Tensor,
    W: torch.Tensor,
    dX: torch.Tensor | None,
    dW: torch.Tensor | None,
    dB: torch.Tensor | None,
    dilations: Sequence[int] | None,
    group: int,
    pads: Sequence[int] | None,
    strides: Sequence[int] | None,
    bad: BadIndex,
) -> None:
    """No index can be bad."""
    axes = _axes(X, W, dilations, pads, strides)
    if dB is not None:
        dB.copy_(dY.sum([0, 1, 2], dtype=sums_dtype(dY.dtype)))
    if 0 in (*dY.shape, *X.shape, *W.shape):
        for result in (dX, dW):
            if result is not None:
                result.zero_()
        return
    gradient, image, kernel = (_as_computed(x) for x in (dY, X, W))
    if _is_product(axes, group):
        outputs, channels = W.shape[:2]
        rows = gradient.view(-1, outputs)
        if dX is not None:
            _multiply(rows, kernel.view(outputs, channels), dX.view(-1, channels))
        if dW is not None:
            _multiply(rows.t(), image.view(-1, channels), dW.view(outputs, channels))
        return
    if dX is not None and _is_product_of_some(axes, group):
        small = torch.mm(gradient.view(-1, W.shape[0]), kernel.view(W.shape[:2]))
        _spread(small, dX, axes)
        dX = None
    if dX is not None and _is_convolution_back(axes, group, W, dX):
        _convolve(_first(gradient), _flipped(kernel), dX, [a.kernel - 1 - a.before for a in axes], [1, 1], [1, 1], 1)
        dX = None
    if dX is None and dW is None:
        return
    if group == 1:
        kernel = _with_channels_last(kernel)
    view, padding = padded(_first(image), axes)
    with deterministic_cudnn(torch.backends.cudnn.benchmark):
        found = torch.ops.aten.convolution_backward(
            _first(gradient), view, kernel, None, [a.stride for a in axes], padding, [a.dilation for a in axes], False,
            [0, 0], group, [dX is not None, dW is not None, False],
        )  # fmt: skip
    if dX is not None:
        begins = [a.before - n for a, n in zip(axes, padding, strict=True)]  # behind zeros that were written
        inside = [slice(begin, begin + a.size) for a, begin in zip(axes, begins, strict=True)]
        _first(dX).copy_(found[0][:, :, inside[0], inside[1]])
    if dW is not None and found[1].is_contiguous():
        dW.copy_(found[1])
    elif dW is not None:
        _move_taps(found[1].contiguous(memory_format=torch.channels_last), dW, False)


def _first(X: torch.Tensor) -> torch.Tensor:
    """The image seen with its channels before rows and columns."""
    return X.permute(0, 3, 1, 2)


def _axes(X: torch.Tensor, W: torch.Tensor, dilations: Any, pads: Any, strides: Any) -> list[Axis]:
    attributes = {"auto_pad": "NOTSET", "dilations": dilations, "pads": pads, "strides": strides}
    return axes_of(_first(X), W, attributes)


def _as_computed(x: torch.Tensor) -> torch.Tensor:
    """cuDNN and cuBLAS add up half numbers in float32; torch does so on some CPUs only."""
    return x.to(sums_dtype(x.dtype)) if INTERPRETED else x


def _is_product(axes: Sequence[Axis], group: int) -> bool:
    """Whether every pixel is multiplied with one matrix."""
    return group == 1 and all(a.kernel == a.stride == 1 and a.before == a.after == 0 for a in axes)


def _convolve(
    image: torch.Tensor, kernel: torch.Tensor, Y: torch.Tensor, pads: list[int], strides: list[int],
    dilations: list[int], group: int,
) -> None:  # fmt: skip
    """Of an image seen with its channels first, as `padded` gives it."""
    with deterministic_cudnn(torch.backends.cudnn.benchmark):
        # torch knows better kernels than cuDNN's for some groups; and of float64 cuDNN has none for such images.
        if INTERPRETED or group > 1 or Y.dtype == torch.float64:
            result = torch.ops.aten.convolution(image, kernel, None, strides, pads, dilations, False, [0, 0], group)
            _first(Y).copy_(result)
        else:
            how = pads, strides, dilations, group, torch.backends.cudnn.benchmark, True, uses_tf32()
            torch.ops.aten.cudnn_convolution.out(image, kernel, *how, out=_first(Y))


def _is_product_of_some(axes: Sequence[Axis], group: int) -> bool:
    """Whether some pixels are multiplied with one matrix, and the others not seen."""
    return group == 1 and all(a.kernel == 1 and a.before == a.after == 0 for a in axes)


def _is_convolution_back(axes: Sequence[Axis], group: int, W: torch.Tensor, dX: torch.Tensor) -> bool:
    """Whether dX is to be a convolution of dY, whose kernels cuDNN has made faster than those for gradients.

    On an H200, the four sizes of ResNet-50 take 41, 32, 28 and 28 µs instead of 53, 35, 33 and 34.
    """
    if group > 1 or dX.dtype.itemsize > 2 or W.shape[0] % 8 or W.shape[1] % 8:
        return False
    return all(a.kernel == 3 and a.stride == a.dilation == 1 and a.before == a.after <= 2 for a in axes)


def _flipped(kernel: torch.Tensor) -> torch.Tensor:
    """The kernel that takes dY to dX: flipped along both axes, its outputs made channels, which come last in memory."""
    outputs, channels, *sizes = kernel.shape
    result = torch.empty(
        (channels, outputs, *sizes), dtype=kernel.dtype, device=kernel.device, memory_format=torch.channels_last
    )
    columns = channels * math.prod(sizes)
    launch(
        _flip, ceil_div(outputs, FLIPPED) * ceil_div(columns, FLIPPED), kernel, result, outputs, columns,
        math.prod(sizes), FLIPPED, counting_type(kernel.numel()),
    )  # fmt: skip
    return result


@triton.jit
def _flip(given, result, outputs, columns, TAPS: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr):
    number = tl.program_id(0).to(KIND)
    across = tl.cdiv(columns, SIZE)
    output = (number // across * SIZE + tl.arange(0, SIZE))[:, None]
    column = (number % across * SIZE + tl.arange(0, SIZE))[None, :]
    here = (output < outputs) & (column < columns)
    row = column // TAPS * TAPS + (TAPS - 1 - column % TAPS)
    tl.store(result + row * outputs + output, tl.load(given + output * columns + column, here), here)


def _with_channels_last(kernel: torch.Tensor) -> torch.Tensor:
    """The kernel as cuDNN wants it; torch would copy it so, too, but takes its time."""
    if kernel.shape[2:].numel() == 1:
        return kernel
    result = torch.empty_like(kernel, memory_format=torch.channels_last)
    _move_taps(kernel, result, True)
    return result


def _move_taps(given: torch.Tensor, result: torch.Tensor, to_last: bool) -> None:
    """Copies a kernel, whose channels come last in the memory of one of both."""
    pairs, taps = given.shape[:2].numel(), given.shape[2:].numel()
    launch(
        _taps, ceil_div(pairs, PAIRS) * ceil_div(taps, TAPS), given, result, pairs, given.shape[1], taps,
        to_last, PAIRS, TAPS, counting_type(given.numel()),
    )  # fmt: skip


@triton.jit
def _taps(
    given, result, pairs, channels, taps,
    TO_LAST: tl.constexpr, PAIRS: tl.constexpr, TAPS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(KIND)
    across = tl.cdiv(taps, TAPS)
    pair = (number // across * PAIRS + tl.arange(0, PAIRS))[:, None]  # of a kernel and one of its channels
    tap = (number % across * TAPS + tl.arange(0, TAPS))[None, :]
    here = (pair < pairs) & (tap < taps)
    first = pair * taps + tap
    last = (pair // channels * taps + tap) * channels + pair % channels
    moved = tl.load(given + (first if TO_LAST else last), here)
    tl.store(result + (last if TO_LAST else first), to_type(moved, result.dtype.element_ty), here)


def _spread(rows: torch.Tensor, image: torch.Tensor, axes: Sequence[Axis]) -> None:
    """Writes an image whose pixels at the strides are these rows, the others 0."""
    sizes = [n for a in axes for n in (a.size, a.windows, a.stride)]
    launch(
        _spread_pixels,
        _programs(image),
        rows,
        image,
        *image.shape[::3],
        *sizes,
        *_tile(image.shape[3]),
        counting_type(image.numel()),
    )


@triton.jit
def _spread_pixels(
    rows, image, images, channels, H, OH, SH: tl.constexpr, W, OW, SW: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    n, h, w, channel, at, there = _place(images * H * W, channels, H, W, HEIGHT, WIDTH, KIND)
    oh, ow = h // SH, w // SW
    seen = (oh * SH == h) & (ow * SW == w) & (oh < OH) & (ow < OW)
    from_ = ((n * OH + oh) * OW + ow)[:, None] * channels + channel[None, :]
    pixel = tl.load(rows + from_, there & seen[:, None], other=0)
    tl.store(image + at, to_type(pixel, image.dtype.element_ty), there)


def _multiply(left: torch.Tensor, right: torch.Tensor, result: torch.Tensor) -> None:
    if left.dtype == result.dtype:
        torch.mm(left, right, out=result)
    else:
        result.copy_(torch.mm(left, right))


def nhwc_batch_norm(
    X: torch.Tensor,
    scale: torch.Tensor,
    B: torch.Tensor,
    input_mean: torch.Tensor,
    input_var: torch.Tensor,
    Z: torch.Tensor | None,
    Y: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    saved_mean: torch.Tensor | None,
    saved_inv_std: torch.Tensor | None,
    epsilon: float,
    momentum: float,
    activation: str,
    sample_variance: int,
    bad: BadIndex,
) -> None:
    """No index can be bad."""
    if X.shape[3] == 0:
        return
    grid = _Grid(X)
    launch(
        _add_up, grid.adding, X, X, X, X, X, scale, scale, scale, scale, grid.sums, *grid.sizes,
        False, UNMASKED.value, False, False, *grid.added, *grid.kinds,
        num_warps=WARPS,
    )  # fmt: skip
    statistics = (running_mean, running_var, saved_mean, saved_inv_std)
    launch(
        _tell, grid.finishing, grid.sums, grid.coefficients, scale, B, input_mean, input_var,
        *(scale if s is None else s for s in statistics), *grid.sizes, bits_of(epsilon), bits_of(momentum),
        *(s is not None for s in statistics), sample_variance != 0, SUMS // FINISHED, FINISHED, *grid.kinds,
    )  # fmt: skip
    if Y is not None and X.numel():
        launch(
            _normalize, grid.writing, X, X if Z is None else Z, Y, grid.coefficients, *grid.sizes,
            Z is not None, activation == "Relu", *grid.tile, *grid.kinds,
        )  # fmt: skip


def nhwc_batch_norm_grad(
    dY: torch.Tensor,
    X: torch.Tensor,
    scale: torch.Tensor,
    mean: torch.Tensor,
    inv_std: torch.Tensor,
    Y: torch.Tensor | None,
    B: torch.Tensor | None,
    dY2: torch.Tensor | None,
    dX: torch.Tensor | None,
    dscale: torch.Tensor | None,
    dB: torch.Tensor | None,
    dZ: torch.Tensor | None,
    bad: BadIndex,
) -> None:
    """No index can be bad."""
    if X.shape[3] == 0:
        return
    grid = _Grid(X)
    how = BY_RESULT.value if Y is not None else BY_INPUT.value if B is not None else UNMASKED.value
    if dY2 is not None and dZ is None:
        dZ = torch.empty_like(dY)
    numbers = scale, scale if B is None else B, mean, inv_std
    launch(
        _add_up, grid.adding, X, dY, X if dY2 is None else dY2, X if Y is None else Y, X if dZ is None else dZ,
        *numbers, grid.sums, *grid.sizes, True, how, dY2 is not None, dZ is not None, *grid.added, *grid.kinds,
        num_warps=WARPS,
    )  # fmt: skip
    launch(
        _finish, grid.finishing, grid.sums, grid.coefficients, scale, mean, inv_std,
        scale if dscale is None else dscale, scale if dB is None else dB, *grid.sizes,
        dscale is not None, dB is not None, SUMS // FINISHED, FINISHED, *grid.kinds,
    )  # fmt: skip
    if X.numel() and dX is not None:
        if dZ is not None:  # it is masked
            dY, how = dZ, UNMASKED.value
        given = X, dY, X if how != BY_RESULT.value or Y is None else Y
        launch(_apply, grid.writing, *given, dX, *numbers, grid.coefficients, *grid.sizes, how, *grid.tile, *grid.kinds)


def _tile(channels: int, numbers: int = TILE) -> tuple[int, int]:
    """Its rows and its channels."""
    width = min(power_of_two(channels), CHANNELS)
    return numbers // width, width


class _Grid:
    """How programs share the rows and channels of an image, and the memory between their launches."""

    def __init__(self, X: torch.Tensor) -> None:
        channels = X.shape[3]
        rows = X.numel() // channels
        height, width = _tile(channels)
        blocks = ceil_div(channels, width)
        slices = max(1, min(PROGRAMS // blocks, ceil_div(rows, LOADS * ADDED // width)))
        self.sizes = rows, channels, blocks, slices
        self.tile, self.added = (height, width), (LOADS, ADDED // width, width)
        self.adding, self.finishing = blocks * slices, ceil_div(channels, FINISHED)
        self.writing = blocks * ceil_div(rows, height)
        work = sums_dtype(X.dtype)
        self.kinds = counting_type(X.numel()), tl.float64 if work == torch.float64 else tl.float32
        self.sums = torch.empty((2 * slices + 1) * channels, dtype=work, device=X.device)  # the last are the shifts
        self.coefficients = torch.empty(COEFFICIENTS.value * channels, dtype=work, device=X.device)


@triton.jit
def _add_up(
    X, dY, dY2, Y, dZ, scale, bias, mean, inv_std, sums, rows, channels, blocks, slices,
    OF_GRADIENT: tl.constexpr, MASK: tl.constexpr, ADDS: tl.constexpr, OF_Z: tl.constexpr,
    LOADS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """Of a slice of rows, for some channels, the sums of d and d², or of g and g · d, where d is x less a shift.

    The shift is the mean of all rows where that is known, else of the first tile. g is what Relu passes back.
    """
    number = tl.program_id(0).to(KIND)
    part, channel = number // blocks, number % blocks * WIDTH + tl.arange(0, WIDTH)
    there = channel < channels
    if OF_GRADIENT:
        shift = tl.load(mean + channel, there, other=0).to(WORK)
    else:
        few = tl.arange(0, HEIGHT).to(KIND)[:, None]
        shift = tl.sum(tl.load(X + (few * channels + channel), (few < rows) & there, other=0).to(WORK), 0)
        shift /= tl.maximum(tl.minimum(rows, HEIGHT), 1).to(WORK)
    if MASK == BY_INPUT:
        slope, level = _line(scale, bias, inv_std, channel, there, WORK)
    first_sums = tl.zeros([HEIGHT, WIDTH], WORK)
    second_sums = tl.zeros([HEIGHT, WIDTH], WORK)
    for start in range(part * LOADS * HEIGHT, rows, slices * LOADS * HEIGHT):
        row = start + tl.arange(0, LOADS * HEIGHT)
        here = (row < rows)[:, None] & there[None, :]
        at = row[:, None] * channels + channel[None, :]
        d = tl.where(here, tl.load(X + at, here, other=0).to(WORK) - shift[None, :], 0)
        if OF_GRADIENT:
            g = tl.load(dY + at, here, other=0).to(WORK)
            if ADDS:
                g += tl.load(dY2 + at, here, other=0).to(WORK)
            if MASK == BY_RESULT:
                g = tl.where(tl.load(Y + at, here, other=0).to(WORK) > 0, g, 0)
            if MASK == BY_INPUT:
                g = tl.where(d * slope[None, :] + level[None, :] > 0, g, 0)
            if OF_Z:
                tl.store(dZ + at, to_type(g, dZ.dtype.element_ty), here)
            first, second = g, g * d
        else:
            first, second = d, d * d
        first_sums += tl.sum(tl.reshape(first, [LOADS, HEIGHT, WIDTH]), 0)
        second_sums += tl.sum(tl.reshape(second, [LOADS, HEIGHT, WIDTH]), 0)
    tl.store(sums + part * channels + channel, tl.sum(first_sums, 0), there)
    tl.store(sums + (slices + part) * channels + channel, tl.sum(second_sums, 0), there)
    if part == 0:
        tl.store(sums + 2 * slices * channels + channel, shift, there)


@triton.jit
def _line(scale, bias, inv_std, channel, there, WORK: tl.constexpr):
    """What is normalized is slope · (x - mean) + level."""
    slope = tl.load(scale + channel, there, other=0).to(WORK) * tl.load(inv_std + channel, there, other=0).to(WORK)
    return slope, tl.load(bias + channel, there, other=0).to(WORK)


@triton.jit
def _totals(sums, channel, channels, slices, there, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr):
    """Both sums of all slices, for some channels."""
    step = tl.arange(0, HEIGHT).to(KIND)
    first_sums = tl.zeros([HEIGHT, WIDTH], tl.float64)
    second_sums = tl.zeros([HEIGHT, WIDTH], tl.float64)
    for start in range(0, slices, HEIGHT):
        part = start + step
        here = (part < slices)[:, None] & there[None, :]
        at = sums + part[:, None] * channels + channel[None, :]
        first_sums += tl.load(at, here, other=0).to(tl.float64)
        second_sums += tl.load(at + slices * channels, here, other=0).to(tl.float64)
    return tl.sum(first_sums, 0), tl.sum(second_sums, 0)


@triton.jit
def _tell(
    sums, coefficients, scale, bias, mean, variance, running_mean, running_var, saved_mean, saved_inv_std,
    rows, channels, blocks, slices, epsilon, momentum,
    RUNNING_MEAN: tl.constexpr, RUNNING_VAR: tl.constexpr, SAVED_MEAN: tl.constexpr, SAVED_INV_STD: tl.constexpr,
    OF_SAMPLE: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """The statistics, and p, k and r: what is normalized is p · (x - k) + r."""
    channel = tl.program_id(0).to(KIND) * WIDTH + tl.arange(0, WIDTH)
    here = channel < channels
    total, square = _totals(sums, channel, channels, slices, here, HEIGHT, WIDTH, KIND)
    share = 1 / tl.maximum(rows, 1).to(tl.float64)
    beyond = total * share
    spread = square * share - beyond * beyond
    spread = tl.where(spread < 0, 0.0, spread)
    centre = tl.load(sums + 2 * slices * channels + channel, here, other=0).to(tl.float64) + beyond
    old = float_of(momentum, tl.float64)
    inv = 1 / tl.sqrt(spread + float_of(epsilon, tl.float64))
    if RUNNING_MEAN:
        before = tl.load(mean + channel, here, other=0).to(tl.float64)
        tl.store(
            running_mean + channel, narrowed(before * old + centre * (1 - old), running_mean.dtype.element_ty), here
        )
    if RUNNING_VAR:
        before = tl.load(variance + channel, here, other=0).to(tl.float64)
        new = spread * (1 - old)
        if OF_SAMPLE:
            new += new / tl.maximum(rows - 1, 1).to(tl.float64)
        tl.store(running_var + channel, narrowed(before * old + new, running_var.dtype.element_ty), here)
    if SAVED_MEAN:
        tl.store(saved_mean + channel, narrowed(centre, saved_mean.dtype.element_ty), here)
    if SAVED_INV_STD:
        tl.store(saved_inv_std + channel, narrowed(inv, saved_inv_std.dtype.element_ty), here)
    p = tl.load(scale + channel, here, other=0).to(tl.float64) * inv
    k = centre.to(WORK).to(tl.float64)  # what of it a number of that type can hold
    r = tl.load(bias + channel, here, other=0).to(tl.float64) + p * (k - centre)
    tl.store(coefficients + channel, p.to(WORK), here)
    tl.store(coefficients + 2 * channels + channel, k.to(WORK), here)
    tl.store(coefficients + 3 * channels + channel, r.to(WORK), here)


@triton.jit
def _finish(
    sums, coefficients, scale, mean, inv_std, dscale, dB, rows, channels, blocks, slices,
    OF_SCALE: tl.constexpr, OF_BIAS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """The gradients of scale and bias, and p, q, k and r: dX = p · g + q · (x - k) + r."""
    channel = tl.program_id(0).to(KIND) * WIDTH + tl.arange(0, WIDTH)
    here = channel < channels
    level, along = _totals(sums, channel, channels, slices, here, HEIGHT, WIDTH, KIND)
    share = 1 / tl.maximum(rows, 1).to(tl.float64)
    centre = tl.load(mean + channel, here, other=0).to(tl.float64)
    inv = tl.load(inv_std + channel, here, other=0).to(tl.float64)
    if OF_SCALE:
        tl.store(dscale + channel, narrowed(along * inv, dscale.dtype.element_ty), here)
    if OF_BIAS:
        tl.store(dB + channel, narrowed(level, dB.dtype.element_ty), here)
    p = tl.load(scale + channel, here, other=0).to(tl.float64) * inv
    q = -p * inv * inv * along * share
    k = centre.to(WORK).to(tl.float64)
    tl.store(coefficients + channel, p.to(WORK), here)
    tl.store(coefficients + channels + channel, q.to(WORK), here)
    tl.store(coefficients + 2 * channels + channel, k.to(WORK), here)
    tl.store(coefficients + 3 * channels + channel, (q * (k - centre) - p * level * share).to(WORK), here)


@triton.jit
def _from_behind(blocks, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr):
    """Rows and channels of a program's tile; the last rows, which the cache may still hold, come first."""
    number = tl.num_programs(0).to(KIND) - 1 - tl.program_id(0)
    return number // blocks * HEIGHT + tl.arange(0, HEIGHT), number % blocks * WIDTH + tl.arange(0, WIDTH)


@triton.jit
def _normalize(
    X, Z, Y, coefficients, rows, channels, blocks, slices,
    ADDS: tl.constexpr, RECTIFIES: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    row, channel = _from_behind(blocks, HEIGHT, WIDTH, KIND)
    there = channel < channels
    p = tl.load(coefficients + channel, there, other=0)[None, :]
    k = tl.load(coefficients + 2 * channels + channel, there, other=0)[None, :]
    r = tl.load(coefficients + 3 * channels + channel, there, other=0)[None, :]
    here = (row < rows)[:, None] & there[None, :]
    at = row[:, None] * channels + channel[None, :]
    y = p * (tl.load(X + at, here, other=0).to(WORK) - k) + r
    if ADDS:
        y += tl.load(Z + at, here, other=0).to(WORK)
    if RECTIFIES:
        y = tl.where(y < 0, 0.0, y)  # NaN stays
    tl.store(Y + at, to_type(y, Y.dtype.element_ty), here)


@triton.jit
def _apply(
    X, dY, Y, dX, scale, bias, mean, inv_std, coefficients, rows, channels, blocks, slices,
    MASK: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    row, channel = _from_behind(blocks, HEIGHT, WIDTH, KIND)
    there = channel < channels
    here = (row < rows)[:, None] & there[None, :]
    at = row[:, None] * channels + channel[None, :]
    g = tl.load(dY + at, here, other=0).to(WORK)
    x = tl.load(X + at, here, other=0).to(WORK)
    if MASK == BY_RESULT:
        g = tl.where(tl.load(Y + at, here, other=0).to(WORK) > 0, g, 0)
    if MASK == BY_INPUT:
        slope, level = _line(scale, bias, inv_std, channel, there, WORK)
        centre = tl.load(mean + channel, there, other=0).to(WORK)
        g = tl.where((x - centre[None, :]) * slope[None, :] + level[None, :] > 0, g, 0)
    p = tl.load(coefficients + channel, there, other=0)[None, :]
    q = tl.load(coefficients + channels + channel, there, other=0)[None, :]
    k = tl.load(coefficients + 2 * channels + channel, there, other=0)[None, :]
    r = tl.load(coefficients + 3 * channels + channel, there, other=0)[None, :]
    tl.store(dX + at, to_type(p * g + (q * (x - k) + r), dX.dtype.element_ty), here)


def nhwc_max_pool(
    X: torch.Tensor,
    Y: torch.Tensor,
    ceil_mode: int,
    dilations: Sequence[int] | None,
    kernel_shape: Sequence[int] | None,
    pads: Sequence[int] | None,
    strides: Sequence[int] | None,
    bad: BadIndex,
) -> None:
    """No index can be bad."""
    if Y.numel():
        windows = _windows(X, Y, ceil_mode, dilations, kernel_shape, pads, strides)
        how = *_tile(X.shape[3], POOLED), *_kinds(X, Y)
        launch(_largest, _programs(Y, POOLED), X, Y, *windows, True, *how)


def nhwc_max_pool_grad(
    dY: torch.Tensor,
    X: torch.Tensor,
    dX: torch.Tensor,
    ceil_mode: int,
    dilations: Sequence[int] | None,
    kernel_shape: Sequence[int] | None,
    pads: Sequence[int] | None,
    strides: Sequence[int] | None,
    bad: BadIndex,
) -> None:
    """Each window notes which of its elements is the largest, then each element asks its windows."""
    if not dX.numel():
        return
    windows = _windows(X, dY, ceil_mode, dilations, kernel_shape, pads, strides)
    where = torch.empty(dY.shape, dtype=torch.int16, device=dY.device)
    how = *_tile(X.shape[3], POOLED), *_kinds(X, dY)
    if dY.numel():
        launch(_largest, _programs(dY, POOLED), X, where, *windows, False, *how)
    launch(_ask, _programs(dX, POOLED), dY, where, dX, *windows, *how)


def _windows(
    X: torch.Tensor, Y: torch.Tensor, ceil_mode: int, dilations: Any, kernel_shape: Any, pads: Any, strides: Any
) -> list[int]:
    """Images and channels, the sizes of both, then kernel, strides, dilations and pads before, of both axes each."""
    axes = pool_axes(X.shape[1:3], pool_settings("NOTSET", ceil_mode, dilations, kernel_shape, pads, strides))
    settings = [axis[k] for k in range(2, 6) for axis in axes]
    return [X.shape[0], X.shape[3], *X.shape[1:3], *Y.shape[1:3], *settings]


def _programs(image: torch.Tensor, numbers: int = TILE) -> int:
    height, width = _tile(image.shape[3], numbers)
    return ceil_div(image.shape[3], width) * ceil_div(image.numel() // image.shape[3], height)


def _kinds(X: torch.Tensor, Y: torch.Tensor) -> tuple[Any, Any]:
    return counting_type(X.numel(), Y.numel()), tl.float64 if X.dtype == torch.float64 else tl.float32


@triton.jit
def _place(pixels, channels, H, W, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr):
    """A program's tile of an image: (n, h, w) of its rows, its channels, where they lie, and which are there."""
    number = tl.program_id(0).to(KIND)
    blocks = tl.cdiv(channels, WIDTH)
    pixel = number // blocks * HEIGHT + tl.arange(0, HEIGHT)
    channel = number % blocks * WIDTH + tl.arange(0, WIDTH)
    line = pixel // W
    here = (pixel < pixels)[:, None] & (channel < channels)[None, :]
    return line // H, line % H, pixel % W, channel, pixel[:, None] * channels + channel[None, :], here


@triton.jit
def _largest(
    X, Y, images, channels, H, W, OH, OW,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    BH: tl.constexpr, BW: tl.constexpr,
    OF_VALUES: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """The largest element of each window, or which one it is, the first of equal ones."""
    n, oh, ow, channel, at, there = _place(images * OH * OW, channels, OH, OW, HEIGHT, WIDTH, KIND)
    best = tl.full([HEIGHT, WIDTH], float("-inf"), WORK)
    found = tl.full([HEIGHT, WIDTH], -1, tl.int32)
    UNROLL: tl.constexpr = KH * KW if KH * KW <= UNROLLED else 1
    for k in tl.range(KH * KW, loop_unroll_factor=UNROLL):
        h, w = oh * SH - BH + k // KW * DH, ow * SW - BW + k % KW * DW
        inside = there & ((h >= 0) & (h < H) & (w >= 0) & (w < W))[:, None]
        from_ = ((n * H + h) * W + w)[:, None] * channels + channel[None, :]
        x = tl.load(X + from_, inside, other=float("-inf")).to(WORK)
        if not OF_VALUES:
            # The first element is it until a larger one comes: nothing is larger than -inf where all are.
            found = tl.where((inside & (found < 0)) | (x > best), k, found)
        best = tl.where(x > best, x, best)
    if OF_VALUES:
        tl.store(Y + at, to_type(best, Y.dtype.element_ty), there)
    else:
        tl.store(Y + at, found.to(tl.int16), there)


@triton.jit
def _ask(
    dY, where, dX, images, channels, H, W, OH, OW,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    BH: tl.constexpr, BW: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    n, h, w, channel, at, there = _place(images * H * W, channels, H, W, HEIGHT, WIDTH, KIND)
    DOWN: tl.constexpr = ((KH - 1) * DH) // SH + 1  # windows that may hold a row: the last one, and those before
    ACROSS: tl.constexpr = ((KW - 1) * DW) // SW + 1
    total = tl.zeros([HEIGHT, WIDTH], WORK)
    UNROLL: tl.constexpr = DOWN * ACROSS if DOWN * ACROSS <= UNROLLED else 1
    for k in tl.range(DOWN * ACROSS, loop_unroll_factor=UNROLL):
        oh, ow = (h + BH) // SH - k // ACROSS, (w + BW) // SW - k % ACROSS
        high, wide = h + BH - oh * SH, w + BW - ow * SW  # from its beginning
        is_one = (high <= (KH - 1) * DH) & (wide <= (KW - 1) * DW) & (high % DH == 0) & (wide % DW == 0)
        inside = there & (is_one & (oh >= 0) & (oh < OH) & (ow >= 0) & (ow < OW))[:, None]
        tap = high // DH * KW + wide // DW
        window = ((n * OH + oh) * OW + ow)[:, None] * channels + channel[None, :]
        mine = tl.load(where + window, inside, other=-1) == tap[:, None]
        total += tl.where(mine, tl.load(dY + window, inside, other=0).to(WORK), 0)
    tl.store(dX + at, to_type(total, dX.dtype.element_ty), there)
