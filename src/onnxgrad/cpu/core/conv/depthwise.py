"""Depthwise convolutions: each channel is correlated with a kernel of its own, as is its gradient.

A channel is laid out with zeros around it, lines one after the other, so that what a tap of the kernel reads for all
windows is one run of memory: the sums of a block of windows stay in registers while the taps go by. With a stride every
so many elements are a plane of their own; what is computed past the end of a line is left out at the end.
"""

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from onnxgrad.cpu.core.conv.lines import copy_line, inside
from onnxgrad.cpu.core.halves import load, store
from onnxgrad.cpu.core.jit import int64, machine_code, native
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.vectors import INT64, VECTOR_BYTES, Vectors, data_of
from onnxgrad.ops.families.windows import Axis
from onnxgrad.tensor_types import Array

HEIGHT = 6  # vectors of sums in registers
TASK = 1 << 12  # elements of the result, at least


@machine_code
def _correlate(
    typing_context: Any,
    height: Any,
    source: Any,
    source_at: Any,
    offsets: Any,
    weights: Any,
    first: Any,
    end: Any,
    sums: Any,
    sums_at: Any,
) -> Any:
    """A block of windows: the sum over taps `first` to `end` of weights[tap] · source[window + offsets[tap]]."""
    count = height.literal_value

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        _, s_array, s_at, o_array, w_array, begin, stop, t_array, t_at = values
        v = Vectors(builder, sums.dtype.bitwidth // 8)
        base = builder.gep(data_of(context, builder, source, s_array), [s_at])
        offset_base, weight_base, target = (
            data_of(context, builder, kind, array)
            for kind, array in ((offsets, o_array), (weights, w_array), (sums, t_array))
        )
        before = builder.block
        loop, done = builder.append_basic_block("taps"), builder.append_basic_block("added")
        builder.cbranch(builder.icmp_signed("<", begin, stop), loop, done)
        builder.position_at_end(loop)
        tap = builder.phi(INT64)
        tap.add_incoming(begin, before)
        running = [builder.phi(v.type) for _ in range(count)]
        weight = v.splat(builder.load(builder.gep(weight_base, [tap])))
        start = builder.gep(base, [builder.load(builder.gep(offset_base, [tap]))])
        new = [v.fma(v.load(v.at(start, INT64(k * v.lanes))), weight, value) for k, value in enumerate(running)]
        following = builder.add(tap, INT64(1))
        tap.add_incoming(following, loop)
        for value, result in zip(running, new, strict=True):
            value.add_incoming(v.zeros, before)
            value.add_incoming(result, loop)
        builder.cbranch(builder.icmp_signed("<", following, stop), loop, done)
        builder.position_at_end(done)
        totals = [builder.phi(v.type) for _ in range(count)]
        for total, result in zip(totals, new, strict=True):
            total.add_incoming(v.zeros, before)
            total.add_incoming(result, loop)
        place = builder.gep(target, [t_at])
        for k, total in enumerate(totals):
            v.store(total, v.at(place, INT64(k * v.lanes)))
        return context.get_dummy_value()

    n = types.int64
    return types.void(height, source, n, offsets, weights, n, n, sums, n), generate


@native
def _some_channels(
    task: int,
    source: Array,
    W: Array,
    bias: Array,
    target: Array,
    taps: tuple[Array, Array],
    phases: Array,
    planes: tuple[int, ...],
    sizes: tuple[int, ...],
    count: int,
    per_task: int,
) -> None:
    """Channels of images, one after the other in memory that is laid out once: zeros around them stay."""
    lines, columns, line_pad, column_pad, line_stride, column_stride, rows, length = planes
    channels, kernel, out_lines, out_columns, line_step, column_step, room = sizes
    offsets, elements = taps
    lanes = VECTOR_BYTES // source.itemsize
    weights = np.empty(elements.size, source.dtype)
    image = np.zeros(line_stride * column_stride * rows * length + room, source.dtype)
    sums = np.empty(rows * length + room, source.dtype)
    for number in range(task * per_task, min(count, (task + 1) * per_task)):
        channel = number % channels
        for tap in range(elements.size):
            store(weights, tap, load(W, channel * kernel + load(elements, tap)))
        for plane in range(line_stride * column_stride):
            up, left = plane // column_stride, plane % column_stride
            begin, stop = inside(columns, column_pad, left, column_stride, length)
            for row in range(rows):
                line, start = row * line_stride + up - line_pad, (plane * rows + row) * length
                if 0 <= line < lines:
                    at = (number * lines + line) * columns + left - column_pad
                    copy_line(source, at, image, start, begin, stop, column_stride)
        added = load(bias, channel) if bias.size else type(load(source, 0))(0)
        for phase in range(phases.size // 6):
            at = phase * 6
            first, end, up, left = load(phases, at), load(phases, at + 1), load(phases, at + 2), load(phases, at + 3)
            height, width = load(phases, at + 4), load(phases, at + 5)
            windows = (height - 1) * length + width
            i = int64(0)
            while i < windows:
                if windows - i > lanes:  # several at once, of which some may be past the end
                    _correlate(HEIGHT, image, i, offsets, weights, first, end, sums, i)
                    i += HEIGHT * lanes
                else:
                    _correlate(1, image, i, offsets, weights, first, end, sums, i)
                    i += lanes
            for row in range(height):
                start = (number * out_lines + up + row * line_step) * out_columns + left
                if column_step == 1:
                    for j in range(width):
                        store(target, start + j, load(sums, row * length + j) + added)
                else:
                    for j in range(width):
                        store(target, start + j * column_step, load(sums, row * length + j) + added)


@native
def depthwise(
    source: Array,
    W: Array,
    bias: Array,
    target: Array,
    taps: tuple[Array, Array],
    phases: Array,
    planes: tuple[int, ...],
    sizes: tuple[int, ...],
    count: int,
    scheduler: int,
) -> None:
    """`target`, a channel of an image at a time, by the tables of the convolution or of the input's gradient."""
    per_task = max(1, TASK // (target.size // count))
    work = (source, W, bias, target, taps, phases, planes, sizes, count, per_task)
    parallel(scheduler, (count + per_task - 1) // per_task, _some_channels, work)


Tables = tuple[tuple[Array, Array], Array, tuple[int, ...], tuple[int, ...]]


@functools.lru_cache(256)
def forward_tables(axes: tuple[Axis, Axis], channels: int) -> Tables:
    """What `depthwise` needs for the convolution itself: one plane for each place in a stride."""
    h, w = axes
    rows, length = (a.windows + (a.kernel - 1) * a.dilation // a.stride for a in axes)
    offsets, elements = [], []
    for element in range(h.kernel * w.kernel):
        line, column = divmod(element, w.kernel)
        (i, up), (j, left) = divmod(line * h.dilation, h.stride), divmod(column * w.dilation, w.stride)
        offsets.append(((up * w.stride + left) * rows + i) * length + j)
        elements.append(element)
    phases = [[0, len(offsets), 0, 0, h.windows, w.windows]]
    planes = h.size, w.size, h.before, w.before, h.stride, w.stride, rows, length
    sizes = channels, h.kernel * w.kernel, h.windows, w.windows, 1, 1
    return _tables(offsets, elements, phases, planes, sizes)


@functools.lru_cache(256)
def input_gradient_tables(axes: tuple[Axis, Axis], channels: int) -> Tables:
    """What `depthwise` needs for the input's gradient: one phase for each place in a stride."""
    h, w = axes
    # What a tap reads for the first element of each place: a window, counted from the first; or nothing.
    reads = [
        [[divmod(place + a.before - k * a.dilation, a.stride) for k in range(a.kernel)] for place in range(a.stride)]
        for a in axes
    ]
    found = [[at for taps in axis for at, rest in taps if rest == 0] for axis in reads]
    before = [max(0, -min(windows)) for windows in found]
    rows, length = (b - (-a.size // a.stride) + max(windows) for a, b, windows in zip(axes, before, found, strict=True))
    offsets: list[int] = []
    elements: list[int] = []
    phases = []
    for up in range(min(h.stride, h.size)):
        for left in range(min(w.stride, w.size)):
            first = len(offsets)
            for k, (i, off) in enumerate(reads[0][up]):
                for m, (j, apart) in enumerate(reads[1][left]):
                    if off == apart == 0:
                        offsets.append((i + before[0]) * length + j + before[1])
                        elements.append(k * w.kernel + m)
            sizes = (-(-(a.size - place) // a.stride) for a, place in ((h, up), (w, left)))
            phases.append([first, len(offsets), up, left, *sizes])
    planes = h.windows, w.windows, before[0], before[1], 1, 1, rows, length
    whole = channels, h.kernel * w.kernel, h.size, w.size, h.stride, w.stride
    return _tables(offsets, elements, phases, planes, whole)


def _tables(
    offsets: list[int], elements: list[int], phases: list[list[int]], planes: tuple[int, ...], sizes: tuple[int, ...]
) -> Tables:
    """Room is left behind planes and sums for blocks that reach past their ends."""
    *_, line_stride, column_stride, rows, length = planes
    windows = max((height - 1) * length + width for *_, height, width in phases)
    past = max(offsets, default=0) + windows - line_stride * column_stride * rows * length
    taps = np.array(offsets, np.int64), np.array(elements, np.int64)
    return taps, np.array(phases, np.int64).reshape(-1), planes, (*sizes, max(0, past) + HEIGHT * VECTOR_BYTES)
