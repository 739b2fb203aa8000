"""GridSampleGrad on the CPU: what each place reads is found for a block of places, then its channels are added up.

A task has some channels of one image, so no two add to the same element; how many follows from the shape alone. It
lays them out as rows, the channels of each element side by side, so that the machine's vectors go along the channels.
Half types are widened to float32 on the way in and rounded on the way out.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from onnxgrad.cpu.core.convert import narrow, widen, working_copy
from onnxgrad.cpu.core.halves import load, store
from onnxgrad.cpu.core.jit import inlined, int64, native
from onnxgrad.cpu.core.matmul.transpose import transpose
from onnxgrad.cpu.core.memory import workspace
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.rows import ROW, add_scaled, channel_chunks, dot
from onnxgrad.cpu.core.threads import launch
from onnxgrad.ops.grid_sample import MOST_AXES, PADDINGS, weight_tables
from onnxgrad.tensor_types import Array, accumulator

BLOCK = 256  # places
ELEMENTS = 1 << 14  # of dgrid, in a task that adds up what others found
ZEROS, REFLECTION = PADDINGS.index("zeros"), PADDINGS.index("reflection")
NEAREST, LINEAR, CUBIC = 1, 2, 4  # reads along each axis


class Layout(NamedTuple):
    """Numbers of things, and the attributes."""

    images: int
    channels: int
    places: int  # of one image
    chunks: int  # of channels
    axes: int
    sizes: tuple[int, int, int]  # of the axes, 1 where there is none
    size: int  # of a plane
    reads: int  # along each axis
    padding: int
    align_corners: bool
    normalized: bool


def grid_sample_grad(
    dY: Array,
    X: Array,
    grid: Array,
    dX: Array | None,
    dgrid: Array | None,
    align_corners: int,
    mode: str,
    normalized: int,
    padding_mode: str,
) -> None:
    images, channels, *sizes = X.shape
    work, axes, size = accumulator(X.dtype), len(sizes), math.prod(sizes)
    table, slope_table = (a.astype(work) for a in weight_tables(mode))
    chunks = channel_chunks(images, channels, size)
    layout = Layout(
        images if X.size or grid.size else 0,
        channels if size else 0,  # of an image without elements nothing is read
        math.prod(grid.shape[1:-1]),
        chunks,
        axes,
        (*sizes, *[1] * (MOST_AXES - axes)),
        size,
        table.shape[1],
        PADDINGS.index(padding_mode),
        bool(align_corners),
        bool(normalized),
    )
    found_X, found_grid = (working_copy(a, X.dtype) for a in (dX, dgrid))
    partial = workspace((0 if dgrid is None else chunks * grid.size,), work)
    launch(
        _gradients,
        *(widen(a) for a in (dY, X, grid)),
        *(found_X, found_grid, partial, table.reshape(-1), slope_table.reshape(-1), layout),
        bytes_touched=dY.nbytes + X.nbytes + grid.nbytes,
    )
    for result, found in ((dX, found_X), (dgrid, found_grid)):
        narrow(found, result)


@native
def _gradients(
    dY: Array,
    X: Array,
    grid: Array,
    dX: Array,
    dgrid: Array,
    partial: Array,
    table: Array,
    slope_table: Array,
    layout: Layout,
    scheduler: int,
) -> None:
    work = (dY, X, grid, dX, partial, table, slope_table, layout)
    parallel(scheduler, layout.images * layout.chunks, _some_channels, work)
    parallel(scheduler, (dgrid.size + ELEMENTS - 1) // ELEMENTS, _add_up, (partial, dgrid, layout))


@native
def _add_up(task: int, partial: Array, dgrid: Array, layout: Layout) -> None:
    """dgrid of what each chunk of channels added to it."""
    of_image = layout.places * layout.axes
    for i in range(task * ELEMENTS, min(dgrid.size, (task + 1) * ELEMENTS)):
        at = i // of_image * layout.chunks * of_image + i % of_image
        total = load(partial, at)
        for chunk in range(1, layout.chunks):
            total += load(partial, at + chunk * of_image)
        store(dgrid, i, total)


@inlined
def _padded(x: Any, size: int, layout: Layout) -> tuple[Any, Any]:
    """A coordinate brought into the image, and how it changes with the one given: at the border not at all."""
    kind = type(x)
    last, slope = kind(size - 1), kind(1)
    if layout.padding == REFLECTION:
        low = kind(0) if layout.align_corners else kind(-0.5)
        span = kind(max(size - 1, 1)) if layout.align_corners else kind(size)
        far = abs(x - low)
        turns = np.floor(far / span)
        rest = far - turns * span
        is_odd = turns - kind(2) * np.floor(turns / kind(2)) > kind(0)
        if is_odd != (x < low):
            slope = kind(-1)
        x = (span - rest if is_odd else rest) + low
    if x > kind(0) and x < last:
        return x, slope
    return kind(0) if x < last else last, kind(0)


@inlined
def _polynomial(table: Array, rows: int, reads: int, read: int, x: Any) -> Any:
    """By Horner's rule, of a column of coefficients."""
    total = load(table, (rows - 1) * reads + read)
    for row in range(rows - 2, -1, -1):
        total = total * x + load(table, row * reads + read)
    return total


@inlined
def _reads_along(
    coordinate: Any, size: int, index: Array, weights: Array, derivatives: Array, table: Array, slope_table: Array,
    layout: Layout, reads: int,
) -> None:  # fmt: skip
    """What a place reads along an axis."""
    kind = type(coordinate)
    place, slope = coordinate, kind(1)
    if layout.normalized:
        slope = kind(size - 1 if layout.align_corners else size) / kind(2)
        place = (coordinate + kind(1)) * slope - (kind(0) if layout.align_corners else kind(0.5))
    if reads == LINEAR and layout.padding != ZEROS:
        place, sign = _padded(place, size, layout)
        slope *= sign
    first = np.rint(place) if reads == NEAREST else np.floor(place)
    distance = place - first
    for k in range(reads):
        read = first + kind(k - (reads - 1) // 2)
        if reads == LINEAR:
            weight = distance if k else kind(1) - distance
            derivative = slope if k else -slope
        else:
            weight = _polynomial(table, table.size // reads, reads, k, distance)
            derivative = _polynomial(slope_table, slope_table.size // reads, reads, k, distance) * slope
        if layout.padding == ZEROS:
            if not (read >= kind(0) and read <= kind(size - 1)):  # which what is no number is not
                weight, derivative, read = kind(0), kind(0), kind(0)
        elif reads != LINEAR:
            read, _ = _padded(read, size, layout)
        store(index, k, min(int64(read), size - 1))  # the one behind the last has no weight
        store(weights, k, weight)
        store(derivatives, k, derivative)


@native
def _some_channels(
    task: int, dY: Array, X: Array, grid: Array, dX: Array, partial: Array, table: Array, slope_table: Array,
    layout: Layout,
) -> None:  # fmt: skip
    """Numbers known when compiling go faster: each mode has code of its own, and linear reads of images."""
    work = (dY, X, grid, dX, partial, table, slope_table, layout)
    if layout.reads == NEAREST:
        _channels(task, work, NEAREST, layout.axes, 1)
    elif layout.reads == LINEAR and layout.axes == 2:
        _channels(task, work, LINEAR, 2, 4)
    elif layout.reads == LINEAR:
        _channels(task, work, LINEAR, layout.axes, 2**layout.axes)
    else:
        _channels(task, work, CUBIC, layout.axes, 4**layout.axes)


@inlined
def _channels(task: int, work: Any, reads: int, axes: int, taps: int) -> None:
    dY, X, grid, dX, partial, table, slope_table, layout = work
    image, chunk = task // layout.chunks, task % layout.chunks
    first, end = layout.channels * chunk // layout.chunks, layout.channels * (chunk + 1) // layout.chunks
    size, row, nothing = layout.size, (end - first + ROW - 1) // ROW * ROW, type(load(table, 0))(0)
    index, numbers = np.empty(reads, np.int64), np.empty(BLOCK * taps, np.int64)
    weights, derivatives = np.empty(reads, table.dtype), np.empty(reads, table.dtype)
    products = np.empty((1 + axes) * BLOCK * taps, table.dtype)  # and their derivatives, by each coordinate
    found = np.zeros(taps, table.dtype)
    # Zeros, of which some stay at the end of each row.
    g = np.zeros(BLOCK * row, table.dtype)
    sums = np.zeros(size * row if dX.size else 0, table.dtype)
    elements = np.zeros(size * row if partial.size else 0, table.dtype)
    start = (image * layout.channels + first) * size
    if partial.size:
        transpose(X, start, size, end - first, size, elements, 0, row)
    for block in range(0, layout.places, BLOCK):
        count = min(BLOCK, layout.places - block)
        if end > first:
            arrays = (grid, index, weights, derivatives, numbers, products, table, slope_table)
            for p in range(count):
                _combine(p, image * layout.places + block + p, arrays, layout, reads, axes, taps)
            y = (image * layout.channels + first) * layout.places + block
            transpose(dY, y, layout.places, end - first, count, g, 0, row)
        for p in range(count if dX.size and end > first else 0):
            for k in range(p * taps, p * taps + taps):
                if load(products, k) != nothing:  # what is outside of the image, infinite perhaps, has no weight
                    add_scaled(sums, load(numbers, k) * row, g, p * row, row, load(products, k))
        to = (task * layout.places + block) * axes
        for p in range(count if partial.size else 0):
            for k in range(taps if end > first else 0):
                store(found, k, dot(elements, load(numbers, p * taps + k) * row, g, p * row, row))
            for axis in range(axes):
                total, by = nothing, (1 + axis) * BLOCK * taps + p * taps
                for k in range(taps if end > first else 0):
                    if load(products, by + k) != nothing:
                        total += load(found, k) * load(products, by + k)
                store(partial, to + p * axes + axes - 1 - axis, total)
    if dX.size:
        transpose(sums, 0, row, size, end - first, dX, start, size)


@inlined
def _combine(p: int, place: int, arrays: Any, layout: Layout, reads: int, axes: int, taps: int) -> None:
    """The p-th place of a block: the elements that it reads, their weights, and the weights' derivatives."""
    grid, index, weights, derivatives, numbers, products, table, slope_table = arrays
    apart, begin, count = BLOCK * taps, p * taps, 1
    store(numbers, begin, 0)
    store(products, begin, type(load(table, 0))(1))
    for axis in range(axes):
        size, coordinate = layout.sizes[axis], load(grid, place * axes + axes - 1 - axis)
        _reads_along(coordinate, size, index, weights, derivatives, table, slope_table, layout, reads)
        for j in range(count - 1, -1, -1):  # from the last one on, since each makes room for several
            number, product = load(numbers, begin + j), load(products, begin + j)
            for k in range(reads - 1, -1, -1):
                to = begin + j * reads + k
                store(numbers, to, number * size + load(index, k))
                store(products, to, product * load(weights, k))
                store(products, to + (1 + axis) * apart, product * load(derivatives, k))
            for other in range(1, 1 + axis):
                product = load(products, begin + j + other * apart)
                for k in range(reads - 1, -1, -1):
                    store(products, begin + j * reads + k + other * apart, product * load(weights, k))
        count *= reads
