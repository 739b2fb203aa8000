"""RoiAlignGrad on the CPU: what each bin reads along rows and columns is found for a region, then channels are added.

A task has some channels of one image, laid out as rows as in GridSampleGrad, and goes through the regions of that
image in order; how many channels follows from the shapes alone.
"""

from typing import Any, NamedTuple

import numpy as np

from onnxgrad.cpu.core.convert import narrow, widen, working_copy
from onnxgrad.cpu.core.halves import flat, load, store
from onnxgrad.cpu.core.jit import inlined, int64, native
from onnxgrad.cpu.core.matmul.transpose import transpose
from onnxgrad.cpu.core.memory import workspace
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.rows import ROW, add_scaled, channel_chunks, dot
from onnxgrad.cpu.core.threads import launch
from onnxgrad.tensor_types import Array, accumulator

NUMBERS = 3  # of a read: its weight, and the derivatives of that, by where the region starts and ends


class Layout(NamedTuple):
    """Numbers of things, and the attributes."""

    images: int
    channels: int
    height: int
    width: int
    regions: int
    chunks: int  # of channels
    down: int  # bins
    across: int
    half_pixel: bool
    sampling_ratio: int


def roi_align_grad(
    dY: Array,
    X: Array,
    rois: Array,
    batch_indices: Array,
    dX: Array | None,
    drois: Array | None,
    coordinate_transformation_mode: str,
    output_height: int,
    output_width: int,
    sampling_ratio: int,
    spatial_scale: float,
) -> None:
    images, channels, height, width = X.shape
    chunks = channel_chunks(images, channels, height * width)
    layout = Layout(
        images if X.size else 0,  # of images without elements nothing is read
        channels,
        height,
        width,
        len(rois),
        chunks,
        output_height,
        output_width,
        coordinate_transformation_mode == "half_pixel",
        max(0, sampling_ratio),
    )
    work = accumulator(X.dtype)
    found_X, found_rois = (working_copy(a, X.dtype) for a in (dX, drois))
    partial = workspace((0 if drois is None else chunks * rois.size,), work)
    launch(
        _gradients,
        *(widen(a) for a in (dY, X, rois)),
        *(flat(batch_indices), found_X, found_rois, partial, work.type(spatial_scale), layout),
        bytes_touched=dY.nbytes + X.nbytes,
    )
    for result, found in ((dX, found_X), (drois, found_rois)):
        narrow(found, result)


@native
def _gradients(
    dY: Array,
    X: Array,
    rois: Array,
    images: Array,
    dX: Array,
    drois: Array,
    partial: Array,
    scale: float,
    layout: Layout,
    scheduler: int,
) -> None:
    nothing = type(scale)(0)
    for i in range(partial.size):
        store(partial, i, nothing)
    work = (dY, X, rois, images, dX, partial, scale, layout)
    parallel(scheduler, layout.images * layout.chunks, _some_channels, work)
    for i in range(drois.size):
        total = nothing
        for chunk in range(layout.chunks):
            total += load(partial, chunk * drois.size + i)
        store(drois, i, total * scale)


@inlined
def _reads_along(start: Any, end: Any, bins: int, size: int, layout: Layout) -> tuple[Array, Array, Array]:
    """What the bins of a region read along an axis: where their reads begin, the elements, and NUMBERS for each."""
    kind = type(start)
    extent, moves, last = end - start, kind(1), kind(size - 1)
    if not layout.half_pixel and not extent > kind(1):  # a smaller region counts as one element
        extent, moves = kind(1), kind(0)
    places = kind(layout.sampling_ratio) if layout.sampling_ratio else np.ceil(extent / kind(bins))
    step = extent / (max(places, kind(1)) * kind(bins))
    good = places >= kind(1) and abs(step) < kind(np.inf)
    # Places in the image and one element around it; they are at least half an element apart, or one for a bin.
    most = layout.sampling_ratio if layout.sampling_ratio else 2 * (size + 6)
    begins, elements = np.zeros(bins + 1, np.int64), np.empty(2 * most * bins, np.int64)
    numbers = np.empty(NUMBERS * elements.size, type(start))
    count = 0
    for b in range(bins):
        begin = start + extent * kind(b) / kind(bins)
        first, beyond = kind(0), places
        if not layout.sampling_ratio and good:  # places far outside of the image, which may be many, have no weight
            first = max(kind(0), np.floor((kind(-1) - begin) / step) - kind(1))
            beyond = min(places, max(kind(0), np.ceil((kind(size) - begin) / step) + kind(1)))
        for k in range(most if good else 0):
            i = first + kind(k)
            part = ((i + kind(0.5)) / places + kind(b)) / kind(bins)
            at = start + part * extent
            if not (i < beyond and at >= kind(-1) and at <= kind(size)):
                continue
            inside = at > kind(0) and at < last
            if not inside:
                at = kind(0) if at < last else last
            low = np.floor(at)
            distance, share = at - low, kind(1) / places
            change = share if inside else kind(0)
            for side in range(2):
                weight = distance if side else kind(1) - distance
                sign = change if side else -change
                store(elements, count, min(int64(low) + side, size - 1))
                store(numbers, NUMBERS * count, weight * share)
                store(numbers, NUMBERS * count + 1, sign * (kind(1) - part * moves))
                store(numbers, NUMBERS * count + 2, sign * part * moves)
                count += 1
        store(begins, b + 1, count)
    return begins, elements, numbers


@native
def _some_channels(
    task: int, dY: Array, X: Array, rois: Array, images: Array, dX: Array, partial: Array, scale: float, layout: Layout
) -> None:
    image, chunk = task // layout.chunks, task % layout.chunks
    first, end = layout.channels * chunk // layout.chunks, layout.channels * (chunk + 1) // layout.chunks
    size, row, kind = layout.height * layout.width, (end - first + ROW - 1) // ROW * ROW, type(scale)
    bins, shift = layout.down * layout.across, kind(0.5) if layout.half_pixel else kind(0)
    start = (image * layout.channels + first) * size
    # Zeros, of which some stay at the end of each row.
    g = np.zeros(bins * row, dX.dtype)
    sums = np.zeros(size * row if dX.size else 0, dX.dtype)
    elements = np.zeros(size * row if partial.size else 0, dX.dtype)
    if partial.size:
        transpose(X, start, size, end - first, size, elements, 0, row)
    for region in range(layout.regions if end > first else 0):
        if load(images, region) != image:
            continue
        left, top = load(rois, 4 * region) * scale - shift, load(rois, 4 * region + 1) * scale - shift
        right, bottom = load(rois, 4 * region + 2) * scale - shift, load(rois, 4 * region + 3) * scale - shift
        down, rows, of_rows = _reads_along(top, bottom, layout.down, layout.height, layout)
        across, columns, of_columns = _reads_along(left, right, layout.across, layout.width, layout)
        transpose(dY, (region * layout.channels + first) * bins, bins, end - first, bins, g, 0, row)
        of_left, of_top, of_right, of_bottom = kind(0), kind(0), kind(0), kind(0)
        for b in range(bins):
            for i in range(load(down, b // layout.across), load(down, b // layout.across + 1)):
                line, by_row = load(rows, i) * layout.width, load(of_rows, NUMBERS * i)
                for j in range(load(across, b % layout.across), load(across, b % layout.across + 1)):
                    at, by_column = (line + load(columns, j)) * row, load(of_columns, NUMBERS * j)
                    if dX.size:
                        add_scaled(sums, at, g, b * row, row, by_row * by_column)
                    if partial.size:
                        found = dot(elements, at, g, b * row, row)
                        of_left += found * by_row * load(of_columns, NUMBERS * j + 1)
                        of_top += found * by_column * load(of_rows, NUMBERS * i + 1)
                        of_right += found * by_row * load(of_columns, NUMBERS * j + 2)
                        of_bottom += found * by_column * load(of_rows, NUMBERS * i + 2)
        if partial.size:
            to = (chunk * layout.regions + region) * 4
            store(partial, to, of_left)
            store(partial, to + 1, of_top)
            store(partial, to + 2, of_right)
            store(partial, to + 3, of_bottom)
    if dX.size:
        transpose(sums, 0, row, size, end - first, dX, start, size)
