"""The kernel's gradient, several images at a time: with the images last, windows of a line are one run of memory.

Images are taken in blocks. What a tap sees of a line of all images in a block, [element, image], is contiguous, and
so does dY, [window, image, channel], so channels of the image times channels of dY need nothing unfolded. If the image
has few channels, what all elements of the kernel see is copied side by side instead, whole runs at a time.

Tables, flat, are made by core/conv/tables.py: `lines` has for [kernel line, output line] where the image's line begins,
or -1 in the padding; `taps` has for each tap its first window, the end of its windows, and what window 0 would see;
`places` has for each element of a line where it is put, so that with a stride a tap's elements are neighbours.
"""

import numpy as np

from onnxgrad.cpu.core.conv.weight_grad import COLUMNS, add_chunks, panels_of
from onnxgrad.cpu.core.halves import load, store, zero
from onnxgrad.cpu.core.jit import inlined, native
from onnxgrad.cpu.core.matmul.microkernel import (
    CACHE_LINE,
    Matrix,
    Panels,
    aligned,
    multiply,
    panel_width,
)
from onnxgrad.cpu.core.matmul.transpose import transpose
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.vectors import VECTOR_BYTES
from onnxgrad.tensor_types import Array

IMAGES = 16  # in a block, or a multiple of it if lines are short
# Products added up in one chain, about; fixed, since they order the additions. What is copied stays in the first cache.
DEPTH = 512
COPIED_DEPTH = 256
TRANSPOSED = 1024  # elements of a channel that are transposed at a time, about


@inlined
def row_step(size: int, array: Array) -> int:
    """At least `size`, so that the same element of several rows falls into different sets of the cache."""
    line = CACHE_LINE // array.itemsize
    return ((size + line - 1) // line | 1) * line


@native
def _transpose_image(
    number: int,
    X: Array,
    transposed: Array,
    places: Array,
    begin: int,
    end: int,
    together: int,
    channels: int,
    area: int,
) -> None:
    """One channel of a block of images: [line, element, image]."""
    block, channel = number // channels, number % channels
    image = begin + block * together
    count = min(together, end - image)
    step = row_step(area * count, transposed)
    at = aligned(transposed) + block * channels * row_step(area * together, transposed) + channel * step
    source = (image * channels + channel) * area
    size = places.size
    if size == 0:
        for first in range(0, area, TRANSPOSED):
            some = min(TRANSPOSED, area - first)
            transpose(X, source + first, channels * area, count, some, transposed, at + first * count, count)
        return
    lines = max(1, TRANSPOSED // size)
    buffer = np.empty(lines * size * count, transposed.dtype)
    for line in range(0, area // size, lines):
        some = min(lines, area // size - line)
        transpose(X, source + line * size, channels * area, count, some * size, buffer, 0, count)
        for k in range(some * size):
            place = at + ((line + k // size) * size + load(places, k % size)) * count
            for i in range(count):
                store(transposed, place + i, load(buffer, k * count + i))


@native
def _pack_windows(
    dY: Array,
    start: int,
    windows: int,
    image_step: int,
    count: int,
    channels: int,
    some: int,
    packed: Array,
    at: int,
) -> None:
    """`some` windows of `count` images as one panel of the right side of products: [window, image, channel]."""
    panel, lanes = panel_width(packed), VECTOR_BYTES // packed.itemsize
    filled = (channels + lanes - 1) // lanes * lanes  # vectors without any channel are not read
    for first in range(0, some, 2 * lanes):
        taken = min(2 * lanes, some - first)
        for i in range(count):
            source, place = start + i * image_step + first, at + (first * count + i) * panel
            transpose(dY, source, windows, channels, taken, packed, place, count * panel)
        if channels < filled:
            for k in range(first * count, (first + taken) * count):
                zero(packed, at + k * panel + channels, at + k * panel + filled)


@native
def _pack_panel(
    number: int,
    dY: Array,
    packed: Array,
    begin: int,
    end: int,
    together: int,
    groups: int,
    outputs: int,
    windows: int,
) -> None:
    """Some channels of dY of a block of images: all windows."""
    panel, room = panel_width(packed), panels_of(packed, outputs)
    part, rest = number % (room // panel), number // (room // panel)
    group, image = rest % groups, begin + rest // groups * together
    count = min(together, end - image)
    at = aligned(packed) + ((image - begin) * groups + group * count) * room * windows + part * panel * windows * count
    start, taken = ((image * groups + group) * outputs + part * panel) * windows, min(panel, outputs - part * panel)
    _pack_windows(dY, start, windows, groups * outputs * windows, count, taken, windows, packed, at)


@native
def _gather(
    transposed: Array,
    start: int,
    step: int,
    lines: Array,
    taps: Array,
    geometry: tuple[int, ...],
    out_line: int,
    first: int,
    last: int,
    rows: int,
    count: int,
    gathered: Array,
    gathered_step: int,
) -> None:
    """What all elements of the kernel, a row each, see of some windows of a line."""
    _, out_lines, _, kernel_lines, tap_count, _ = geometry
    kernel = kernel_lines * tap_count
    for row in range(rows):
        channel, element = row // kernel, row % kernel
        tap, at = element % tap_count * 3, row * gathered_step - first * count
        line = load(lines, element // tap_count * out_lines + out_line)
        low, high = min(last, max(first, load(taps, tap))), max(first, min(last, load(taps, tap + 1)))
        if line < 0 or high <= low:
            low, high = last, last
        source = start + channel * step + (line + load(taps, tap + 2)) * count
        zero(gathered, at + first * count, at + low * count)
        for k in range(low * count, high * count):
            store(gathered, at + k, load(transposed, source + k))
        zero(gathered, at + high * count, at + last * count)


@native
def _make_block(
    number: int,
    dY: Array,
    packed: Array,
    transposed: Array,
    lines: Array,
    taps: Array,
    geometry: tuple[int, ...],
    sizes: tuple[int, ...],
    cuts: tuple[int, ...],
    begin: int,
    end: int,
    partial_sums: Array,
    gemm: int,
) -> None:
    """Some channels of the image times some channels of dY, over one chunk of the lines of some blocks."""
    _, groups, inputs, outputs = sizes
    area, out_lines, width, kernel_lines, tap_count, _ = geometry
    together, _, height, row_blocks, column_blocks, chunks, is_gathered = cuts
    windows, kernel = out_lines * width, kernel_lines * tap_count
    chunk, rest = number % chunks, number // chunks
    group, rest = rest % groups, rest // groups
    top, left = rest % row_blocks * height, rest // row_blocks * COLUMNS
    rows, columns = min(height, inputs - top), min(COLUMNS, outputs - left)

    panel, room = panel_width(packed), panels_of(packed, outputs)
    target = ((chunk * groups + group) * inputs + top) * kernel * outputs + left
    for row in range(rows * kernel if begin == 0 else 0):
        zero(partial_sums, target + row * outputs, target + row * outputs + columns)
    depth = COPIED_DEPTH if is_gathered else DEPTH
    stretches = (width * together + depth - 1) // depth
    at_a_time = (width + stretches - 1) // stretches
    gathered_step = row_step(at_a_time * together, transposed)
    gathered = np.empty(rows * kernel * gathered_step if is_gathered else 0, transposed.dtype)
    # Where one task has all of a line, it packs what it needs itself, which then need not leave the cache.
    is_packed = row_blocks * column_blocks > 1
    right = packed if is_packed else np.empty(at_a_time * together * room + CACHE_LINE, transposed.dtype)
    units = (end - begin + together - 1) // together * out_lines
    for unit in range(units * chunk // chunks, units * (chunk + 1) // chunks):
        block, out_line = unit // out_lines, unit % out_lines
        image = begin + block * together
        count = min(together, end - image)
        step, whole_step = row_step(area * count, transposed), row_step(area * together, transposed)
        a = aligned(transposed) + block * groups * inputs * whole_step + (group * inputs + top) * step
        for start in range(0, width, at_a_time):
            stop = min(width, start + at_a_time)
            if is_packed:
                b_depth = windows * count
                b = aligned(right) + (block * together * groups + group * count) * room * windows
                b += (left * windows + (out_line * width + start) * panel) * count
            else:
                b_depth, b = (stop - start) * count, aligned(right)
                for first in range(0, outputs, panel):
                    source = ((image * groups + group) * outputs + first) * windows + out_line * width + start
                    _pack_windows(
                        dY, source, windows, groups * outputs * windows, count, min(panel, outputs - first),
                        stop - start, right, b + first * b_depth,
                    )  # fmt: skip
            if is_gathered:
                _gather(
                    transposed, a, step, lines, taps, geometry, out_line, start, stop, rows * kernel, count, gathered,
                    gathered_step,
                )  # fmt: skip
                multiply(
                    gemm,
                    Matrix(gathered, 0, gathered_step),
                    Panels(right, b, b_depth),
                    Matrix(partial_sums, target, outputs),
                    (rows * kernel, (stop - start) * count, columns),
                    True,
                )
                continue
            for element in range(kernel):
                line = load(lines, element // tap_count * out_lines + out_line)
                tap = element % tap_count * 3
                first, last = max(start, load(taps, tap)), min(stop, load(taps, tap + 1))
                if line >= 0 and first < last:
                    multiply(
                        gemm,
                        Matrix(transposed, a + (line + load(taps, tap + 2) + first) * count, step),
                        Panels(right, b + (first - start) * count * panel, b_depth),
                        Matrix(partial_sums, target + element * outputs, kernel * outputs),
                        (rows, (last - first) * count, columns),
                        True,
                    )


@native
def batch_weight_gradient(
    dY: Array,
    X: Array,
    dW: Array,
    packed: Array,
    transposed: Array,
    partial_sums: Array,
    lines: Array,
    taps: Array,
    places: Array,
    geometry: tuple[int, ...],
    sizes: tuple[int, ...],
    cuts: tuple[int, ...],
    gemm: int,
    scheduler: int,
) -> None:
    """dW [M, C / group, …]; `packed`, `transposed` and `partial_sums` are room for dY, X and the chunks of the result.

    `cuts`: images in a block, images for which there is room, channels of the image in a task, blocks of them, blocks
    of channels of dY, chunks, and whether what elements of the kernel see is copied. `places` is empty if the stride
    is one, `packed` if there is one block.
    """
    images, groups, inputs, outputs = sizes
    together, at_once, _, row_blocks, column_blocks, chunks, _ = cuts
    windows, panel = geometry[1] * geometry[2], panel_width(packed)
    for begin in range(0, images, at_once):
        end = min(images, begin + at_once)
        blocks = (end - begin + together - 1) // together
        transposing = (X, transposed, places, begin, end, together, groups * inputs, geometry[0])
        parallel(scheduler, blocks * groups * inputs, _transpose_image, transposing)
        if row_blocks * column_blocks > 1:
            packing = (dY, packed, begin, end, together, groups, outputs, windows)
            parallel(scheduler, blocks * groups * (panels_of(packed, outputs) // panel), _pack_panel, packing)
        work = (dY, packed, transposed, lines, taps, geometry, sizes, cuts, begin, end, partial_sums, gemm)
        parallel(scheduler, chunks * groups * row_blocks * column_blocks, _make_block, work)
    add_chunks(partial_sums, dW, groups, inputs * geometry[3] * geometry[4], outputs, chunks, False, scheduler)
