"""The kernel's gradient with few channels in a group, without matrices: products of lines; and the bias' gradient."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from onnxgrad.cpu.core.conv.lines import copy_line, inside
from onnxgrad.cpu.core.halves import load, store, zero
from onnxgrad.cpu.core.jit import int64, machine_code, native
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.vectors import INT64, VECTOR_BYTES, Vectors, data_of
from onnxgrad.tensor_types import Array

LANES = 64  # sums that a bias is added up in
DEPTH = 1024  # numbers added up by themselves: sums of sums round less


@machine_code
def _add_products(
    typing_context: Any,
    taps: Any,
    a: Any,
    a_start: Any,
    b: Any,
    b_start: Any,
    offsets: Any,
    offset_start: Any,
    count: Any,
    sums: Any,
    sum_start: Any,
) -> Any:
    """For each of `taps`, adds a[i] · b[i + its offset], i below `count`, to a vector of sums, lane by lane."""
    height = taps.literal_value

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        _, a_array, a_at, b_array, b_at, o_array, o_at, total, s_array, s_at = values
        v = Vectors(builder, sums.dtype.bitwidth // 8)
        arrays = (a, a_array, a_at), (b, b_array, b_at), (offsets, o_array, o_at), (sums, s_array, s_at)
        a_base, b_base, offset_base, sum_base = (
            builder.gep(data_of(context, builder, kind, array), [start]) for kind, array, start in arrays
        )
        bases = [builder.gep(b_base, [builder.load(builder.gep(offset_base, [INT64(tap)]))]) for tap in range(height)]
        places = [v.at(sum_base, INT64(tap * v.lanes)) for tap in range(height)]
        old = [v.load(place) for place in places]
        whole = builder.and_(total, INT64(-v.lanes))
        before = builder.block
        loop, done = builder.append_basic_block("add"), builder.append_basic_block("added")
        builder.cbranch(builder.icmp_signed(">", whole, INT64(0)), loop, done)
        builder.position_at_end(loop)
        i = builder.phi(INT64)
        i.add_incoming(INT64(0), before)
        running = [builder.phi(v.type) for _ in range(height)]
        for value, start in zip(running, old, strict=True):
            value.add_incoming(start, before)
        left = v.load(v.at(a_base, i))
        new = [v.fma(left, v.load(v.at(base, i)), value) for base, value in zip(bases, running, strict=True)]
        following = builder.add(i, INT64(v.lanes))
        i.add_incoming(following, loop)
        for value, result in zip(running, new, strict=True):
            value.add_incoming(result, loop)
        builder.cbranch(builder.icmp_signed("<", following, whole), loop, done)
        builder.position_at_end(done)
        merged = []
        for start, result in zip(old, new, strict=True):
            value = builder.phi(v.type)
            value.add_incoming(start, before)
            value.add_incoming(result, loop)
            merged.append(value)
        # Of the last vector only what belongs to the line is read, so that nothing else, infinite perhaps, gets in.
        rest = v.compare("<", builder.sub(total, whole))
        left = v.masked_load(v.at(a_base, whole), rest)
        for base, value, place in zip(bases, merged, places, strict=True):
            v.store(v.fma(left, v.masked_load(v.at(base, whole), rest), value), place)
        return context.get_dummy_value()

    n = types.int64
    return types.void(taps, a, n, b, n, offsets, n, n, sums, n), generate


@native
def _spread_lines(
    X: Array, image: int, in_lines: int, in_width: int, pad: int, stride: int, length: int, target: Array
) -> None:
    """Lines amid the zeros of `target`; with a stride, every so many elements by themselves: [line, phase, length]."""
    for phase in range(stride):
        first, end = inside(in_width, pad, phase, stride, length)
        for line in range(in_lines):
            at = (line * stride + phase) * length
            copy_line(X, image + line * in_width + phase - pad, target, at, first, end, stride)


@native
def _channel_weights(
    number: int,
    dY: Array,
    X: Array,
    dW: Array,
    lines: Array,
    taps: Array,
    geometry: tuple[int, ...],
    sizes: tuple[int, ...],
    last_axis: tuple[int, int, int],
) -> None:
    """The gradient of all that one channel of X is multiplied with."""
    images, groups, inputs, outputs = sizes
    area, out_lines, width, kernel_lines, tap_count, stride = geometry
    in_width, pad, dilation = last_axis
    group, channel = number // inputs, number % inputs
    lanes = VECTOR_BYTES // X.itemsize
    kernel, windows, in_lines = kernel_lines * tap_count, out_lines * width, area // in_width
    length = (tap_count - 1) * dilation // stride + width
    spread = np.zeros(in_lines * stride * length, X.dtype)
    offsets = np.empty(tap_count, np.int64)
    for tap in range(tap_count):
        offsets[tap] = tap * dilation % stride * length + tap * dilation // stride
    begins = np.empty(lines.size, np.int64)  # of each line in `spread`, or negative
    for i in range(lines.size):
        begins[i] = -1 if lines[i] < 0 else lines[i] // in_width * stride * length
    sums = np.zeros(outputs * kernel * lanes, X.dtype)
    part = np.empty(outputs * kernel * lanes, X.dtype)
    for image in range(images):
        _spread_lines(
            X, ((image * groups + group) * inputs + channel) * area, in_lines, in_width, pad, stride, length, spread
        )
        zero(part, 0, part.size)  # sums of sums round less
        for m in range(outputs):
            source = ((image * groups + group) * outputs + m) * windows
            for line in range(kernel_lines):
                at = (m * kernel + line * tap_count) * lanes
                for out_line in range(out_lines):
                    here, there = source + out_line * width, load(begins, line * out_lines + out_line)
                    if there < 0:
                        continue
                    tap = int64(0)
                    while tap < tap_count:
                        left = tap_count - tap
                        if left == 3 or left == 4:
                            _add_products(3, dY, here, spread, there, offsets, tap, width, part, at + tap * lanes)
                            tap += 3
                        elif left >= 5:
                            _add_products(5, dY, here, spread, there, offsets, tap, width, part, at + tap * lanes)
                            tap += 5
                        else:
                            _add_products(1, dY, here, spread, there, offsets, tap, width, part, at + tap * lanes)
                            tap += 1
        for i in range(part.size):
            store(sums, i, load(sums, i) + load(part, i))
    for m in range(outputs):
        for k in range(kernel):
            total = load(sums, (m * kernel + k) * lanes)
            for j in range(1, lanes):
                total += load(sums, (m * kernel + k) * lanes + j)
            store(dW, ((group * outputs + m) * inputs + channel) * kernel + k, total)


@native
def direct_weight_gradient(
    dY: Array,
    X: Array,
    dW: Array,
    lines: Array,
    taps: Array,
    geometry: tuple[int, ...],
    sizes: tuple[int, ...],
    last_axis: tuple[int, int, int],
    scheduler: int,
) -> None:
    """dW [M, C / group, …]; `last_axis` is (elements in a line of X, pad before it, dilation)."""
    parallel(scheduler, sizes[1] * sizes[2], _channel_weights, (dY, X, dW, lines, taps, geometry, sizes, last_axis))


@native
def _channel_bias(number: int, dY: Array, dB: Array, images: int, channels: int, windows: int) -> None:
    number_type = type(load(dY, 0))
    lanes = np.empty(LANES, dY.dtype)
    total = number_type(0)
    for image in range(images):
        at = (image * channels + number) * windows
        for start in range(0, windows, DEPTH):
            end = min(windows, start + DEPTH)
            zero(lanes, 0, LANES)
            whole = start + (end - start) // LANES * LANES
            for i in range(start, whole, LANES):
                for k in range(LANES):
                    store(lanes, k, load(lanes, k) + load(dY, at + i + k))
            for i in range(whole, end):
                store(lanes, i - whole, load(lanes, i - whole) + load(dY, at + i))
            part = number_type(0)
            for k in range(LANES):
                part += lanes[k]
            total += part
    store(dB, number, total)


@native
def bias_gradient(dY: Array, dB: Array, images: int, windows: int, scheduler: int) -> None:
    """dB: the sum of all elements of each channel of dY."""
    parallel(scheduler, dB.size, _channel_bias, (dY, dB, images, dB.size, windows))


@native
def clear(array: Array, scheduler: int) -> None:
    """All zeros, where there is nothing to add up."""
    zero(array, 0, array.size)
