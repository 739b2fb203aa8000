"""The kernel's gradient as a product: unfolded images times dY, whose channels are columns.

The windows of all images are taken DEPTH at a time. A task makes a block of the result out of a fixed chunk of them;
chunks are added up in their order, so that the number of threads does not show.
"""

import numpy as np

from onnxgrad.cpu.core.conv.im2col import unfold
from onnxgrad.cpu.core.halves import load, store, zero
from onnxgrad.cpu.core.jit import native
from onnxgrad.cpu.core.matmul.microkernel import (
    CACHE_LINE,
    VECTORS,
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

DEPTH = 256  # windows at a time; fixed, since it orders the additions
ROWS = 192  # elements of the kernel in a block: with as many windows they stay in the second-level cache
COLUMNS = 6 * VECTORS * VECTOR_BYTES // 4  # channels of dY in a block
TASKS = 16  # wanted; if there are fewer blocks, the windows are shared out
CHANNELS = 16  # that the last step transposes at a time: a cache line


@native
def block_of(number: int, images: int, windows: int) -> tuple[int, int, int, int]:
    """A block of windows: its first image, how many images, and from which window of each to which."""
    if windows > DEPTH:
        per_image = (windows + DEPTH - 1) // DEPTH
        image, part = number // per_image, number % per_image
        return image, 1, windows * part // per_image, windows * (part + 1) // per_image
    together = DEPTH // windows
    return number * together, min(together, images - number * together), 0, windows


@native
def block_count(images: int, windows: int) -> int:
    """How many blocks of windows there are."""
    if windows > DEPTH:
        return images * ((windows + DEPTH - 1) // DEPTH)
    together = DEPTH // windows
    return (images + together - 1) // together


@native
def _pack_group(
    dY: Array,
    block: tuple[int, int, int, int],
    group: int,
    sizes: tuple[int, ...],
    windows: int,
    packed: Array,
    base: int,
) -> None:
    """A group of a block of windows of dY as the right side of products: [panel, window, channel]."""
    image, together, first, last = block
    _, groups, _, outputs = sizes
    panel, count = panel_width(packed), last - first
    depth = together * count
    for left in range(0, outputs, panel):
        taken, at = min(panel, outputs - left), base + left * depth
        for i in range(together):
            start = (((image + i) * groups + group) * outputs + left) * windows + first
            transpose(dY, start, windows, taken, count, packed, at + i * count * panel, panel)
        if taken < panel:
            for k in range(depth):
                zero(packed, at + k * panel + taken, at + (k + 1) * panel)


@native
def _pack_transposed(number: int, dY: Array, packed: Array, sizes: tuple[int, ...], windows: int) -> None:
    """A block of windows of dY, each group."""
    images, groups, _, outputs = sizes
    image, together, first, last = block_of(number, images, windows)
    room = panels_of(packed, outputs)
    for group in range(groups):
        base = aligned(packed) + (image * windows + first) * groups * room + group * room * together * (last - first)
        _pack_group(dY, (image, together, first, last), group, sizes, windows, packed, base)


@native
def panels_of(array: Array, columns: int) -> int:
    """Columns in whole panels."""
    panel = panel_width(array)
    return (columns + panel - 1) // panel * panel


@native
def _make_block(
    number: int,
    dY: Array,
    packed: Array,
    X: Array,
    lines: Array,
    taps: Array,
    geometry: tuple[int, ...],
    sizes: tuple[int, ...],
    cuts: tuple[int, int, int],
    chunks: int,
    is_plain: bool,
    partial_sums: Array,
    gemm: int,
) -> None:
    """Some elements of the kernel times some channels of dY, over one chunk of the windows."""
    images, groups, inputs, outputs = sizes
    area, out_lines, width, kernel_lines, tap_count, _ = geometry
    height, row_blocks, column_blocks = cuts
    windows, kernel = out_lines * width, kernel_lines * tap_count
    rows = inputs * kernel
    chunk, rest = number % chunks, number // chunks
    group, rest = rest % groups, rest // groups
    top, left = rest % row_blocks * height, rest // row_blocks * COLUMNS
    taken, columns = min(height, rows - top), min(COLUMNS, outputs - left)

    unfolded = np.empty(0 if is_plain else taken * DEPTH, X.dtype)
    room = panels_of(packed, outputs)
    # Where one task has all of a block of windows, it packs them itself, and they need not leave the cache.
    is_packed = row_blocks * column_blocks > 1
    right = packed if is_packed else np.empty(DEPTH * room + CACHE_LINE, X.dtype)
    blocks = block_count(images, windows)
    begin, end = blocks * chunk // chunks, blocks * (chunk + 1) // chunks
    target = ((chunk * groups + group) * rows + top) * outputs + left
    for block in range(begin, end):
        image, together, first, last = block_of(block, images, windows)
        count = last - first
        depth = together * count
        at = aligned(right)
        if is_packed:
            at += (image * windows + first) * groups * room + (group * room + left) * depth
        else:
            _pack_group(dY, (image, together, first, last), group, sizes, windows, right, at)
        if is_plain:
            here = ((image * groups + group) * inputs + top) * area + first
            multiply(
                gemm,
                Matrix(X, here, area),
                Panels(right, at, depth),
                Matrix(partial_sums, target, outputs),
                (taken, depth, columns),
                block > begin,
            )
            continue
        for i in range(together):
            for row in range(top, top + taken):
                channel = ((image + i) * groups + group) * inputs + row // kernel
                place = (row - top) * DEPTH + i * count
                unfold(X, channel * area, lines, taps, geometry, row % kernel, first, last, unfolded, place)
        multiply(
            gemm,
            Matrix(unfolded, 0, DEPTH),
            Panels(right, at, depth),
            Matrix(partial_sums, target, outputs),
            (taken, depth, columns),
            block > begin,
        )


@native
def _add_chunks(
    number: int,
    partial_sums: Array,
    dW: Array,
    groups: int,
    rows: int,
    outputs: int,
    blocks: int,
    chunks: int,
    is_swapped: bool,
) -> None:
    """The chunks added up and, unless it is so already, the channels of dY in front."""
    group, first = number // blocks, number % blocks * CHANNELS
    taken, size = min(CHANNELS, outputs - first), groups * rows * outputs
    for row in range(rows):
        here = (group * rows + row) * outputs + first
        for j in range(taken):
            total = load(partial_sums, here + j)
            for chunk in range(1, chunks):
                total += load(partial_sums, here + j + chunk * size)
            store(dW, here + j if is_swapped else (group * outputs + first + j) * rows + row, total)


@native
def add_chunks(
    partial_sums: Array, dW: Array, groups: int, rows: int, outputs: int, chunks: int, is_swapped: bool, scheduler: int
) -> None:
    """dW, out of the chunks of [group, row, channel of dY]."""
    blocks = (outputs + CHANNELS - 1) // CHANNELS
    parallel(
        scheduler, groups * blocks, _add_chunks, (partial_sums, dW, groups, rows, outputs, blocks, chunks, is_swapped)
    )


@native
def chunk_count(images: int, windows: int, blocks: int) -> int:
    """How many chunks the windows are divided into, by sizes alone."""
    return max(1, min(block_count(images, windows), (TASKS + blocks - 1) // blocks))


@native
def weight_gradient(
    dY: Array,
    X: Array,
    dW: Array,
    packed: Array,
    partial_sums: Array,
    lines: Array,
    taps: Array,
    geometry: tuple[int, ...],
    sizes: tuple[int, ...],
    cuts: tuple[int, int, int],
    chunks: int,
    is_plain: bool,
    is_swapped: bool,
    gemm: int,
    scheduler: int,
) -> None:
    """dW [M, C / group, …]; `packed` is room for dY, if there are several blocks, `partial_sums` for the chunks.

    `is_plain` says that windows are elements of the image, one for one, and that blocks have one image each. Then X and
    dY, and with them the sizes, may change places, `is_swapped`, so that X is packed.
    """
    images, groups, inputs, outputs = sizes
    _, row_blocks, column_blocks = cuts
    windows = geometry[1] * geometry[2]
    if row_blocks * column_blocks > 1:
        parallel(scheduler, block_count(images, windows), _pack_transposed, (dY, packed, sizes, windows))
    tasks = chunks * groups * row_blocks * column_blocks
    work = (dY, packed, X, lines, taps, geometry, sizes, cuts, chunks, is_plain, partial_sums, gemm)
    parallel(scheduler, tasks, _make_block, work)
    add_chunks(partial_sums, dW, groups, inputs * geometry[3] * geometry[4], outputs, chunks, is_swapped, scheduler)
