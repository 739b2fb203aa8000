"""GridSampleGrad on CUDA: the reads of all places are listed and sorted, then each element of dX adds up its own.

So every sum has a fixed order, without atomic additions. dgrid is summed place by place.
"""

import math

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.indices import BadIndex, sorted_runs
from onnxgrad.cuda.core.launch import ceil_div, counting_type, divide, launch, power_of_two, sums_dtype, to_type
from onnxgrad.ops.grid_sample import PADDINGS, WEIGHTS
from onnxgrad.ops.grid_sample import A as KEYS

BLOCK = 128  # places or elements of one program
CHANNELS = 8  # at most, side by side in a program that adds up
ZEROS, REFLECTION = (tl.constexpr(PADDINGS.index(name)) for name in ("zeros", "reflection"))
NEAREST, LINEAR = tl.constexpr(1), tl.constexpr(2)  # reads along each axis
A = tl.constexpr(KEYS)


def grid_sample_grad(
    dY: torch.Tensor,
    X: torch.Tensor,
    grid: torch.Tensor,
    dX: torch.Tensor | None,
    dgrid: torch.Tensor | None,
    align_corners: int,
    mode: str,
    normalized: int,
    padding_mode: str,
    bad: BadIndex,
) -> None:
    """No index can be bad."""
    images, channels, *sizes = X.shape
    axes, size, places = len(sizes), math.prod(sizes), math.prod(grid.shape[1:-1])
    if 0 in (*X.shape, *dY.shape):
        for result in (dX, dgrid):
            if result is not None:
                result.zero_()
        return
    taps, device, sums = len(WEIGHTS[mode][0]) ** axes, X.device, sums_dtype(X.dtype)
    count = images * places * taps
    numbers = torch.empty(count, dtype=torch.int64, device=device)  # of elements of all images
    products = torch.empty((1 + axes, count), dtype=sums, device=device)  # weights, and their derivatives
    kind = counting_type(X.numel(), dY.numel(), products.numel())
    work = tl.float64 if sums == torch.float64 else tl.float32
    launch(
        _find_reads, ceil_div(images * places, BLOCK), grid.view(-1), numbers, products, images * places, places, count,
        images * size, size, tuple(sizes), axes, len(WEIGHTS[mode][0]), taps, PADDINGS.index(padding_mode),
        bool(align_corners), bool(normalized), BLOCK, kind, work,
    )  # fmt: skip
    if dX is not None:
        _, order, bounds = sorted_runs(numbers, images * size, BadIndex(device, wanted=False))
        wide = min(CHANNELS, power_of_two(channels))
        programs = ceil_div(images * size, BLOCK) * ceil_div(channels, wide)
        launch(
            _add_up_reads, programs, dY.view(-1), order, bounds, products, dX.view(-1), images * size, size, channels,
            places, taps, BLOCK, wide, kind, work,
        )  # fmt: skip
    if dgrid is not None:
        launch(
            _of_places, ceil_div(images * places, BLOCK), dY.view(-1), X.view(-1), numbers, products, dgrid.view(-1),
            images * places, places, count, images * size, size, channels, axes, taps, BLOCK, kind, work,
        )  # fmt: skip


@triton.jit
def _padded(x, size, PADDING: tl.constexpr, ALIGNED: tl.constexpr):
    """Coordinates brought into the image, and how they change with those given: at the border not at all."""
    last = (size - 1).to(x.dtype)
    slope = tl.full(x.shape, 1, x.dtype)
    if PADDING == REFLECTION:
        low = 0.0 if ALIGNED else -0.5
        span = tl.maximum(size - 1, 1).to(x.dtype) if ALIGNED else size.to(x.dtype)
        far = tl.abs(x - low)
        turns = tl.floor(divide(far, span + far * 0))
        rest = far - turns * span
        is_odd = turns - 2 * tl.floor(turns * 0.5) > 0
        slope = tl.where(is_odd != (x < low), -slope, slope)
        x = tl.where(is_odd, span - rest, rest) + low
    inside = (x > 0) & (x < last)
    return tl.where(inside, x, tl.where(x < last, 0, last)), tl.where(inside, slope, 0)


@triton.jit
def _weight(x, read, READS: tl.constexpr):
    """The weight of a read, the first having number 0, and its derivative."""
    if READS == NEAREST:
        weight, derivative = x * 0 + 1, x * 0
    elif READS == LINEAR:
        weight, derivative = tl.where(read == 0, 1 - x, x), tl.where(read == 0, x * 0 - 1, x * 0 + 1)
    else:  # Keys' cubic, by the distance from the element that is read
        u = tl.where(read < 2, tl.where(read == 0, 1 + x, x), tl.where(read == 2, 1 - x, 2 - x))
        near = (read == 1) | (read == 2)
        weight = tl.where(near, ((A + 2) * u - (A + 3)) * u * u + 1, ((A * u - 5 * A) * u + 8 * A) * u - 4 * A)
        derivative = tl.where(near, (3 * (A + 2) * u - 2 * (A + 3)) * u, (3 * A * u - 10 * A) * u + 8 * A)
        derivative = tl.where(read < 2, derivative, -derivative)
    return weight, derivative


@triton.jit
def _read_along(
    coordinate, size, read,
    READS: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr, NORMALIZED: tl.constexpr,
):  # fmt: skip
    """One of the elements that places read along an axis: its position, weight and the weight's derivative."""
    place, slope = coordinate, coordinate * 0 + 1
    if NORMALIZED:
        half = ((size - 1) if ALIGNED else size).to(coordinate.dtype) * 0.5
        place = (coordinate + 1) * half - (0.0 if ALIGNED else 0.5)
        slope = tl.full(coordinate.shape, 1, coordinate.dtype) * half
    if READS == LINEAR and PADDING != ZEROS:
        place, sign = _padded(place, size, PADDING, ALIGNED)
        slope *= sign
    first = tl.floor(place)
    if READS == NEAREST:  # of two as near the even one
        above = place - first
        is_odd = first - 2 * tl.floor(first * 0.5) > 0
        first = tl.where((above > 0.5) | ((above == 0.5) & is_odd), first + 1, first)
    at = first + (read - (READS - 1) // 2)
    weight, derivative = _weight(place - first, read, READS)
    derivative *= slope
    if PADDING == ZEROS:
        inside = (at >= 0) & (at <= (size - 1).to(at.dtype))  # which what is no number is not
        weight, derivative = tl.where(inside, weight, 0), tl.where(inside, derivative, 0)
        at = tl.where(inside, at, 0)
    elif READS != LINEAR:
        at, _ = _padded(at, size, PADDING, ALIGNED)
    return tl.minimum(at.to(tl.int64), size - 1), weight, derivative  # one behind the last has no weight


@triton.jit
def _find_reads(
    grid, numbers, products, places, of_image, count, elements, size, sizes,
    AXES: tl.constexpr, READS: tl.constexpr, TAPS: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
    NORMALIZED: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """What every place reads; an element without weight and derivative has the number `elements`, which none has."""
    place = tl.program_id(0).to(KIND) * BLOCK + tl.arange(0, BLOCK)
    exists = place < places
    for tap in range(TAPS):
        number = place.to(tl.int64) // of_image * 0
        weight = tl.full([BLOCK], 1, WORK)
        step = TAPS
        for axis in tl.static_range(AXES):
            step = step // READS
            coordinate = tl.load(grid + place * AXES + AXES - 1 - axis, exists, other=0).to(WORK)
            at, w, _ = _read_along(
                coordinate, sizes[axis] + tap * 0, tap // step % READS, READS, PADDING, ALIGNED, NORMALIZED
            )
            number = number * sizes[axis] + at
            weight *= w
        to = place * TAPS + tap
        used = weight != 0
        tl.store(products + to, weight, exists)
        for by in tl.static_range(AXES):
            change = tl.full([BLOCK], 1, WORK)
            step = TAPS
            for axis in tl.static_range(AXES):
                step = step // READS
                coordinate = tl.load(grid + place * AXES + AXES - 1 - axis, exists, other=0).to(WORK)
                _, w, d = _read_along(
                    coordinate, sizes[axis] + tap * 0, tap // step % READS, READS, PADDING, ALIGNED, NORMALIZED
                )
                change *= d if axis == by else w
            used = used | (change != 0)
            tl.store(products + count * (1 + by) + to, change, exists)
        number += place.to(tl.int64) // of_image * size
        tl.store(numbers + to, tl.where(used, number, elements), exists)


@triton.jit
def _add_up_reads(
    dY, order, bounds, weights, dX, elements, size, channels, places, taps,
    BLOCK: tl.constexpr, CHANNELS: tl.constexpr, KIND: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """Each element of some channels of dX, from the reads of it, in the order of the places."""
    blocks = tl.cdiv(elements, BLOCK)
    program = tl.program_id(0).to(KIND)
    element = program % blocks * BLOCK + tl.arange(0, BLOCK)
    channel = program // blocks * CHANNELS + tl.arange(0, CHANNELS)
    exists = element < elements
    start = tl.load(bounds + element, exists, other=0).to(KIND)
    end = tl.load(bounds + elements + 1 + element, exists, other=0).to(KIND)
    plane = (element // size * channels)[:, None] + channel[None, :]
    both = exists[:, None] & (channel < channels)[None, :]
    total = tl.zeros([BLOCK, CHANNELS], WORK)
    for i in range(tl.max(end - start, 0)):
        here = start + i < end
        read = tl.load(order + start + i, here, other=0).to(KIND)
        weight = tl.load(weights + read, here, other=0)
        place = read // taps % places
        g = tl.load(dY + plane * places + place[:, None], both & here[:, None], other=0).to(WORK)
        total += tl.where((here & (weight != 0))[:, None], g * weight[:, None], 0)
    to = plane * size + (element % size)[:, None]
    tl.store(dX + to, to_type(total, dX.dtype.element_ty), both)


@triton.jit
def _of_places(
    dY, X, numbers, products, dgrid, places, of_image, count, elements, size, channels,
    AXES: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(KIND) * BLOCK + tl.arange(0, BLOCK)
    exists = place < places
    image = place // of_image
    for by in tl.static_range(AXES):
        total = tl.zeros([BLOCK], WORK)
        for tap in range(TAPS):
            number = tl.load(numbers + place * TAPS + tap, exists, other=elements)
            used = exists & (number < elements)
            change = tl.load(products + count * (1 + by) + place * TAPS + tap, used, other=0)
            at = number.to(KIND) - image * size
            found = tl.zeros([BLOCK], WORK)
            for channel in range(channels):
                plane = image * channels + channel
                g = tl.load(dY + plane * of_image + place - image * of_image, used, other=0).to(WORK)
                found += g * tl.load(X + plane * size + at, used, other=0).to(WORK)
            total += tl.where(used & (change != 0), found * change, 0)
        to = dgrid + place * AXES + AXES - 1 - by
        tl.store(to, to_type(total, dgrid.dtype.element_ty), exists)
