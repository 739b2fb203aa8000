"""RoiAlignGrad on CUDA: each bin's weight of each row and of each column goes into tables, by which all sums are made.

An element of dX goes through the regions of its image in order, so every sum has a fixed order. How many places a bin
has may depend on the regions, which are on the GPU: the tables have the same size whatever they are.
"""

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.cuda.core.launch import bits_of, ceil_div, counting_type, divide, float_of, launch, sums_dtype, to_type
from onnxgrad.ops.roi_align import AXES

BLOCK = 128  # elements of one program
CHANNELS = 16  # at most, side by side in a program that adds up
NUMBERS = 3  # of each element: its weight, and the derivatives of that, by where the region starts and ends


def roi_align_grad(
    dY: torch.Tensor,
    X: torch.Tensor,
    rois: torch.Tensor,
    batch_indices: torch.Tensor,
    dX: torch.Tensor | None,
    drois: torch.Tensor | None,
    coordinate_transformation_mode: str,
    output_height: int,
    output_width: int,
    sampling_ratio: int,
    spatial_scale: float,
    bad: BadIndex,
) -> None:
    """A region of an image that does not exist is left out, and is no bad index."""
    images, channels, height, width = X.shape
    regions = rois.shape[0]
    if 0 in (*X.shape, regions):
        for result in (dX, drois):
            if result is not None:
                result.zero_()
        return
    sums = sums_dtype(X.dtype)
    work = tl.float64 if sums == torch.float64 else tl.float32
    kind = counting_type(X.numel(), dY.numel(), NUMBERS * regions * (output_height * height + output_width * width))
    tables = []
    for (start, end), bins, size in zip(AXES, (output_height, output_width), (height, width), strict=True):
        table = torch.empty((NUMBERS, regions, bins, size), dtype=sums, device=X.device)
        launch(
            _fill_table, regions * bins, rois.view(-1), table.view(-1), table[0].numel(), bins, size, start, end,
            max(0, sampling_ratio), bits_of(spatial_scale), coordinate_transformation_mode == "half_pixel", BLOCK, kind,
            work,
        )  # fmt: skip
        tables.append(table.view(-1))
    shared = (batch_indices, *tables, regions, channels, height, width, output_height, output_width)
    if dX is not None:
        blocks = ceil_div(height * width, BLOCK)
        programs = images * blocks * ceil_div(channels, CHANNELS)
        launch(_add_up, programs, dY.view(-1), dX.view(-1), *shared, blocks, BLOCK, CHANNELS, kind, work)
    if drois is not None:
        bins = output_height * output_width
        parts = torch.empty((regions, bins, 4), dtype=sums, device=X.device)
        launch(_of_bins, regions * bins, dY.view(-1), X.view(-1), parts.view(-1), *shared, images, BLOCK, kind, work)
        drois.copy_(parts.sum(1) * spatial_scale)


@triton.jit
def _fill_table(
    rois, table, apart, bins, size, START, END, ratio, scale,
    HALF_PIXEL: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """For one bin of one region: every element's weight along an axis, and the derivatives of that."""
    program = tl.program_id(0).to(KIND)
    region, b = program // bins, program % bins
    start = tl.load(rois + region * 4 + START).to(WORK) * float_of(scale, WORK)
    end = tl.load(rois + region * 4 + END).to(WORK) * float_of(scale, WORK)
    if HALF_PIXEL:
        start, end = start - 0.5, end - 0.5
    extent = end - start
    moves = extent * 0 + 1
    if not HALF_PIXEL:  # a smaller region counts as one element
        moves = tl.where(extent > 1, 1.0, 0.0).to(WORK)
        extent = tl.where(extent > 1, extent, 1.0).to(WORK)
    parts = (bins + program * 0).to(WORK)
    last = (size - 1 + program * 0).to(WORK)
    places = -tl.floor(-divide(extent, parts))
    places = tl.where(ratio > 0, (ratio + program * 0).to(WORK), places)
    count = tl.maximum(places, 1.0)
    step = divide(extent, count * parts)
    begin = start + divide(extent * b.to(WORK), parts)
    first, beyond = places * 0, places
    if ratio == 0:  # places far outside of the image, which may be many, have no weight
        first = tl.maximum(tl.floor(divide(-1 - begin, step)) - 1, 0.0)
        beyond = tl.minimum(tl.maximum(-tl.floor(-divide(last + 1 - begin, step)) + 1, 0.0), places)
    good = (places >= 1) & (tl.abs(step) < float("inf")) & (beyond > first)
    steps = tl.where(good, tl.minimum(beyond - first, tl.maximum(2 * last + 14, (ratio + program * 0).to(WORK))), 0.0)
    for origin in range(0, size, BLOCK):
        element = origin + tl.arange(0, BLOCK)
        weight, of_start, of_end = tl.zeros([BLOCK], WORK), tl.zeros([BLOCK], WORK), tl.zeros([BLOCK], WORK)
        for k in range(steps.to(tl.int32)):
            i = first + k
            part = divide(divide(i + 0.5, count) + b, parts)
            at = start + part * extent
            counted = (i < beyond) & (at >= -1) & (at <= last + 1)
            inside = (at > 0) & (at < last)
            at = tl.where(inside, at, tl.where(at < last, 0.0, last)).to(WORK)
            low = tl.floor(at)
            distance = at - low
            lower, upper = element == low.to(tl.int32), element == low.to(tl.int32) + 1
            share = tl.where(counted, divide(count * 0 + 1, count), 0.0)
            weight += tl.where(lower, 1 - distance, tl.where(upper, distance, 0.0)) * share
            change = tl.where(upper, 1.0, tl.where(lower, -1.0, 0.0)) * tl.where(inside, share, 0.0)
            of_start += change * (1 - part * moves)
            of_end += change * part * moves
        to = table + program * size + element
        tl.store(to, weight, element < size)
        tl.store(to + apart, of_start, element < size)
        tl.store(to + 2 * apart, of_end, element < size)


@triton.jit
def _add_up(
    dY, dX, images, down, across, regions, channels, height, width, rows, columns, blocks,
    BLOCK: tl.constexpr, CHANNELS: tl.constexpr, KIND: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """Some elements of some channels of one image."""
    program = tl.program_id(0).to(KIND)
    element = program % blocks * BLOCK + tl.arange(0, BLOCK)
    groups = tl.cdiv(channels, CHANNELS)
    channel = program // blocks % groups * CHANNELS + tl.arange(0, CHANNELS)
    image = program // blocks // groups
    exists = element < height * width
    y, x = element // width, element % width
    total = tl.zeros([BLOCK, CHANNELS], WORK)
    for region in range(regions):
        if tl.load(images + region) == image:
            for i in range(rows):
                by_row = tl.load(down + (program * 0 + region * rows + i) * height + y, exists, other=0)
                if tl.max(by_row, 0) > 0:
                    for j in range(columns):
                        by_column = tl.load(across + (program * 0 + region * columns + j) * width + x, exists, other=0)
                        plane = program * 0 + region * channels + channel
                        g = tl.load(dY + (plane * rows + i) * columns + j, channel < channels, other=0).to(WORK)
                        weight = (by_row * by_column)[:, None]
                        total += tl.where(weight > 0, weight * g[None, :], 0)
    to = dX + ((image * channels + channel) * height * width)[None, :] + element[:, None]
    tl.store(to, to_type(total, dX.dtype.element_ty), exists[:, None] & (channel < channels)[None, :])


@triton.jit
def _of_bins(
    dY, X, parts, images, down, across, regions, channels, height, width, rows, columns, count,
    BLOCK: tl.constexpr, KIND: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """What one bin of one region adds to the gradients of the region's corners: left, top, right, bottom."""
    program = tl.program_id(0).to(KIND)
    region, b = program // (rows * columns), program % (rows * columns)
    image = tl.load(images + region).to(KIND)
    of_down, of_across = regions * rows * height, regions * columns * width
    down += (region * rows + b // columns) * height
    across += (region * columns + b % columns) * width
    left, top = tl.zeros([BLOCK], WORK), tl.zeros([BLOCK], WORK)
    right, bottom = tl.zeros([BLOCK], WORK), tl.zeros([BLOCK], WORK)
    if (image >= 0) & (image < count):
        for origin in range(0, height * width, BLOCK):
            element = origin + tl.arange(0, BLOCK)
            exists = element < height * width
            y, x = element // width, element % width
            by_row, by_column = tl.load(down + y, exists, other=0), tl.load(across + x, exists, other=0)
            row_start = tl.load(down + of_down + y, exists, other=0)
            row_end = tl.load(down + 2 * of_down + y, exists, other=0)
            column_start = tl.load(across + of_across + x, exists, other=0)
            column_end = tl.load(across + 2 * of_across + x, exists, other=0)
            near = ((by_row != 0) | (row_start != 0) | (row_end != 0)) & (
                (by_column != 0) | (column_start != 0) | (column_end != 0)
            )
            if tl.max(near.to(tl.int32), 0) > 0:
                found = tl.zeros([BLOCK], WORK)
                for channel in range(channels):
                    g = tl.load(dY + (region * channels + channel) * rows * columns + b).to(WORK)
                    at = (image * channels + channel) * height * width + element
                    found += tl.load(X + at, near, other=0).to(WORK) * g
                found = tl.where(near, found, 0)
                left += found * by_row * column_start
                top += found * row_start * by_column
                right += found * by_row * column_end
                bottom += found * row_end * by_column
    tl.store(parts + program * 4, tl.sum(left, 0))
    tl.store(parts + program * 4 + 1, tl.sum(top, 0))
    tl.store(parts + program * 4 + 2, tl.sum(right, 0))
    tl.store(parts + program * 4 + 3, tl.sum(bottom, 0))
