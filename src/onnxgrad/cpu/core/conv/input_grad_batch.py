"""The input's gradient, several images at a time: their dY with the channels last, times the kernel, nothing unfolded.

With its channels last, what the taps of one kernel line see of a line of dY is one run of memory, so an element of the
image takes one product for each kernel line: a row for each image, a column for each of its channels. Windows that lie
outside are left out, not multiplied with zeros.

An image is made in bands of lines; dY of the lines that a band sees is transposed for it alone and stays in the
second-level cache. Tables, flat, are made by core/conv/tables.py:
`bands`: for each band its first line, the line after its last, and the first and the end of its `stretches`;
`stretches`: (first line of dY, lines, the slot of the first): what a band sees;
`slots`: [kernel line, line of the image], the slot of the line of dY that this kernel line sees it from, or -1;
`spots`: for each element of a line of the image the end of its `runs`, after a zero;
`runs`: (place of the first tap, first window, windows), places being those of `order`;
`order`: [tap], its place among the packed ones, where taps that see neighbours in dY are neighbours.
"""

import numpy as np

from onnxgrad.cpu.core.conv.weight_grad_batch import row_step
from onnxgrad.cpu.core.halves import load, store, zero
from onnxgrad.cpu.core.jit import native
from onnxgrad.cpu.core.matmul.microkernel import Matrix, Panels, aligned, multiply, panel_width
from onnxgrad.cpu.core.matmul.transpose import transpose
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.vectors import VECTOR_BYTES
from onnxgrad.tensor_types import Array

IMAGES = 8  # at a time: the rows of a product
DEPTH = 512  # products added up in one chain, at most; fixed, since it orders the additions
CHANNELS = 16  # of dY that one task packs the kernel of


@native
def _pack_kernel(
    number: int,
    W: Array,
    packed: Array,
    order: Array,
    inputs: int,
    outputs: int,
    kernel_lines: int,
) -> None:
    """Some channels of a group's kernel, of its [panel, kernel line, tap, channel of dY, channel of the image]."""
    taps, panel = order.size, panel_width(packed)
    blocks = (outputs + CHANNELS - 1) // CHANNELS
    group, first = number // blocks, number % blocks * CHANNELS
    kernel, panels = kernel_lines * taps, (inputs + panel - 1) // panel
    base = aligned(packed) + group * panels * kernel * outputs * panel
    for m in range(first, min(outputs, first + CHANNELS)):
        for left in range(0, inputs, panel):
            source = ((group * outputs + m) * inputs + left) * kernel
            taken = min(panel, inputs - left)
            for element in range(kernel):
                place = element // taps * taps + load(order, element % taps)
                at = base + ((left // panel * kernel + place) * outputs + m) * panel
                for j in range(taken):
                    store(packed, at + j, load(W, source + j * kernel + element))
                zero(packed, at + taken, at + panel)


@native
def _make_band(
    number: int,
    dY: Array,
    packed_kernel: Array,
    dX: Array,
    tables: tuple[Array, ...],
    sizes: tuple[int, ...],
    geometry: tuple[int, ...],
    cuts: tuple[int, int, int],
    gemm: int,
) -> None:
    """A band of some images, some of its channels."""
    bands, stretches, slots, spots, runs = tables
    images, groups, inputs, outputs = sizes
    area, out_lines, width, kernel_lines, tap_count, _ = geometry
    band_count, column_blocks, most_slots = cuts
    line_size, windows = spots.size - 1, out_lines * width
    in_lines, panel = area // line_size, panel_width(dX)
    band, rest = number % band_count, number // band_count
    block, rest = rest % column_blocks, rest // column_blocks
    group, image = rest % groups, rest // groups * IMAGES
    together = min(IMAGES, images - image)
    begin, end = load(bands, band * 4), load(bands, band * 4 + 1)

    transposed_step = row_step(most_slots * width * outputs, dX)
    transposed = np.empty(together * transposed_step + VECTOR_BYTES, dX.dtype)
    first = aligned(transposed)
    for stretch in range(load(bands, band * 4 + 2), load(bands, band * 4 + 3)):
        line, count, slot = (
            load(stretches, stretch * 3),
            load(stretches, stretch * 3 + 1),
            load(stretches, stretch * 3 + 2),
        )
        for i in range(together):
            source = (((image + i) * groups + group) * outputs) * windows + line * width
            at = first + i * transposed_step + slot * width * outputs
            transpose(dY, source, windows, outputs, count * width, transposed, at, outputs)

    elements = (end - begin) * line_size
    made_step = row_step(elements * panel, dX)
    made = np.empty(together * made_step + VECTOR_BYTES, dX.dtype)
    target, line_depth = aligned(made), tap_count * outputs
    panels = (inputs + panel - 1) // panel
    for part in range(panels * block // column_blocks, panels * (block + 1) // column_blocks):
        columns = min(panel, inputs - part * panel)
        zero(made, target, target + together * made_step)
        for kernel_line in range(kernel_lines):
            right = aligned(packed_kernel) + ((group * panels + part) * kernel_lines + kernel_line) * line_depth * panel
            for line in range(begin, end):
                slot = load(slots, kernel_line * in_lines + line)
                if slot < 0:
                    continue
                for x in range(line_size):
                    c = target + ((line - begin) * line_size + x) * panel
                    for run in range(load(spots, x), load(spots, x + 1)):
                        b = right + load(runs, run * 3) * outputs * panel
                        a = first + (slot * width + load(runs, run * 3 + 1)) * outputs
                        depth = load(runs, run * 3 + 2) * outputs
                        for k in range(0, depth, DEPTH):
                            some = min(DEPTH, depth - k)
                            multiply(
                                gemm,
                                Matrix(transposed, a + k, transposed_step),
                                Panels(packed_kernel, b + k * panel, line_depth),
                                Matrix(made, c, made_step),
                                (together, some, columns),
                                True,
                            )
        for i in range(together):
            at = (((image + i) * groups + group) * inputs + part * panel) * area + begin * line_size
            transpose(made, target + i * made_step, panel, elements, columns, dX, at, area)


@native
def batch_input_gradient(
    dY: Array,
    W: Array,
    dX: Array,
    packed_kernel: Array,
    order: Array,
    tables: tuple[Array, ...],
    sizes: tuple[int, ...],
    geometry: tuple[int, ...],
    cuts: tuple[int, int, int],
    gemm: int,
    scheduler: int,
) -> None:
    """dX; `packed_kernel` is room for W, `cuts` the bands, the blocks of channels, and how many slots a band has."""
    images, groups, inputs, outputs = sizes
    packing = (W, packed_kernel, order, inputs, outputs, geometry[3])
    parallel(scheduler, groups * ((outputs + CHANNELS - 1) // CHANNELS), _pack_kernel, packing)
    tasks = (images + IMAGES - 1) // IMAGES * groups * cuts[0] * cuts[1]
    parallel(scheduler, tasks, _make_band, (dY, packed_kernel, dX, tables, sizes, geometry, cuts, gemm))
