"""The input's gradient: products of the kernel with dY, folded back into the image block by block, while in cache."""

import numpy as np

from onnxgrad.cpu.core.conv.im2col import fold
from onnxgrad.cpu.core.halves import load, store, zero
from onnxgrad.cpu.core.jit import native
from onnxgrad.cpu.core.matmul.microkernel import (
    PACKED,
    ROWS,
    VECTORS,
    Matrix,
    Panels,
    aligned,
    multiply,
    pack,
    packed_size,
    panel_width,
)
from onnxgrad.cpu.core.matmul.outer import pack_left
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.vectors import VECTOR_BYTES
from onnxgrad.tensor_types import Array

CHANNELS = 256  # of dY at a time; fixed, since it orders the additions
ELEMENTS = 192  # of the kernel at a time, about
WINDOWS = 5 * VECTORS * VECTOR_BYTES // 4  # at a time: whole panels


@native
def _pack_kernel(
    number: int, W: Array, packed: Array, rows: int, outputs: int, block_rows: int, row_blocks: int
) -> None:
    """A block of elements of a group's kernel as the left side of products, CHANNELS after CHANNELS."""
    group, top = number // row_blocks, number % row_blocks * block_rows
    taken = min(block_rows, rows - top)
    room = (block_rows + ROWS - 1) // ROWS * ROWS
    for first in range(0, outputs, CHANNELS):
        depth = min(CHANNELS, outputs - first)
        at = number * room * outputs + room * first
        pack_left(W, (group * outputs + first) * rows + top, rows, depth, taken, packed[at : at + room * depth])


@native
def _pack_images(
    dY: Array,
    start: int,
    channel_step: int,
    image_step: int,
    depth: int,
    count: int,
    together: int,
    packed: Array,
    at: int,
) -> None:
    """Lays all windows of some images out side by side as the right side of a product."""
    panel = panel_width(packed)
    columns = together * count
    for k in range(depth):
        for i in range(together):
            source = start + i * image_step + k * channel_step
            column = i * count
            while column < (i + 1) * count:
                within = column % panel
                taken = min(panel - within, (i + 1) * count - column)
                place = at + (column - within) * depth + k * panel + within
                here = source + column - i * count
                for j in range(taken):
                    store(packed, place + j, load(dY, here + j))
                column += taken
        within = columns % panel
        if within > 0:
            place = at + (columns - within) * depth + k * panel
            zero(packed, place + within, place + panel)


@native
def _fold_images(
    number: int,
    dY: Array,
    packed_kernel: Array,
    dX: Array,
    lines: Array,
    taps: Array,
    geometry: tuple[int, ...],
    sizes: tuple[int, ...],
    block_channels: int,
    row_blocks: int,
    is_plain: bool,
    gemm: int,
) -> None:
    """Some channels of the gradient of an image, or of several small ones."""
    images, groups, inputs, outputs = sizes
    area, out_lines, width, kernel_lines, tap_count, _ = geometry
    windows, kernel = out_lines * width, kernel_lines * tap_count
    row_block, rest = number % row_blocks, number // row_blocks
    group, part = rest % groups, rest // groups
    channel = row_block * block_channels
    channels = min(block_channels, inputs - channel)
    rows, room = channels * kernel, (block_channels * kernel + ROWS - 1) // ROWS * ROWS
    left = (group * row_blocks + row_block) * room * outputs

    together = max(1, WINDOWS // windows)
    image = part * together
    together = min(together, images - image)
    folded = np.empty(0 if is_plain else rows * WINDOWS, dX.dtype)
    packed = np.empty(packed_size(dX, min(CHANNELS, outputs), WINDOWS), dX.dtype)
    at, panel = aligned(packed), panel_width(packed)
    one = type(load(dX, 0))(1)
    if not is_plain:
        for i in range(image, image + together):
            here = ((i * groups + group) * inputs + channel) * area
            zero(dX, here, here + channels * area)
    step = (windows + WINDOWS - 1) // WINDOWS
    step = ((windows + step - 1) // step + panel - 1) // panel * panel
    for start in range(0, windows, step):
        count = min(step, windows - start)
        columns = together * count
        for first in range(0, outputs, CHANNELS):
            depth = min(CHANNELS, outputs - first)
            source = ((image * groups + group) * outputs + first) * windows + start
            if together == 1:
                pack(dY, source, windows, 1, depth, columns, panel, packed, at)
            else:
                _pack_images(dY, source, windows, groups * outputs * windows, depth, count, together, packed, at)
            here = left + room * first
            if is_plain:
                target = ((image * groups + group) * inputs + channel) * area + start
                multiply(
                    gemm,
                    Matrix(packed_kernel, here, PACKED),
                    Panels(packed, at, depth),
                    Matrix(dX, target, area),
                    (rows, depth, columns),
                    first > 0,
                )
            else:
                multiply(
                    gemm,
                    Matrix(packed_kernel, here, PACKED),
                    Panels(packed, at, depth),
                    Matrix(folded, 0, WINDOWS),
                    (rows, depth, columns),
                    first > 0,
                )
        if not is_plain:
            for i in range(together):
                for row in range(rows):
                    target = (((image + i) * groups + group) * inputs + channel + row // kernel) * area
                    place = row * WINDOWS + i * count
                    fold(
                        folded, place, lines, taps, geometry, row % kernel, start, start + count, one, dX, target,
                    )  # fmt: skip


@native
def input_gradient(
    dY: Array,
    W: Array,
    dX: Array,
    packed_kernel: Array,
    lines: Array,
    taps: Array,
    geometry: tuple[int, ...],
    sizes: tuple[int, ...],
    block_channels: int,
    is_plain: bool,
    gemm: int,
    scheduler: int,
) -> None:
    """dX; `packed_kernel` is room for W. `is_plain` says that windows are elements of the image, one for one."""
    images, groups, inputs, outputs = sizes
    kernel = geometry[3] * geometry[4]
    row_blocks = (inputs + block_channels - 1) // block_channels
    parallel(
        scheduler, groups * row_blocks, _pack_kernel,
        (W, packed_kernel, inputs * kernel, outputs, block_channels * kernel, row_blocks),
    )  # fmt: skip
    together = max(1, WINDOWS // (geometry[1] * geometry[2]))
    parallel(
        scheduler, (images + together - 1) // together * groups * row_blocks, _fold_images,
        (dY, packed_kernel, dX, lines, taps, geometry, sizes, block_channels, row_blocks, is_plain, gemm),
    )  # fmt: skip
