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
    begins: Any,
    begin_start: Any,
    lines: Any,
    offsets: Any,
    offset_start: Any,
    count: Any,
    sums: Any,
    sum_start: Any,
) -> Any:
    """For each of `taps`, adds products to a vector of sums, lane by lane, which stays in a register for all lines.

    A line has a[i] · b[its begin + i + the tap's offset], i below `count`; in `a` they stand one after the other. One
    whose begin is negative is left out.
    """
    height = taps.literal_value

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        _, a_array, a_at, b_array, begin_array, begin_at, line_count, o_array, o_at, total, s_array, s_at = values
        v = Vectors(builder, sums.dtype.bitwidth // 8)
        arrays = (a, a_array, a_at), (begins, begin_array, begin_at), (offsets, o_array, o_at), (sums, s_array, s_at)
        a_base, begin_base, offset_base, sum_base = (
            builder.gep(data_of(context, builder, kind, array), [start]) for kind, array, start in arrays
        )
        b_base = data_of(context, builder, b, b_array)
        shifted = [builder.gep(b_base, [builder.load(builder.gep(offset_base, [INT64(tap)]))]) for tap in range(height)]
        places = [v.at(sum_base, INT64(tap * v.lanes)) for tap in range(height)]
        whole = builder.and_(total, INT64(-v.lanes))
        rest = v.compare("<", builder.sub(total, whole))
        some, many = builder.icmp_signed("<", whole, total), builder.icmp_signed(">", whole, INT64(0))
        start, entry = [v.load(place) for place in places], builder.block
        line, here, loop, done, ready, following = (
            builder.append_basic_block(name) for name in ("line", "here", "add", "added", "ready", "next")
        )

        def joined(*ways: tuple[list[Any], Any]) -> list[Any]:
            """Values that come from several blocks."""
            merged = [builder.phi(v.type) for _ in range(height)]
            for values_of, block in ways:
                for value, result in zip(merged, values_of, strict=True):
                    value.add_incoming(result, block)
            return merged

        builder.branch(line)
        builder.position_at_end(line)
        number, old = builder.phi(INT64), joined((start, entry))
        number.add_incoming(INT64(0), entry)
        begin = builder.load(builder.gep(begin_base, [number]))
        builder.cbranch(builder.icmp_signed("<", begin, INT64(0)), following, here)

        builder.position_at_end(here)
        left_base = builder.gep(a_base, [builder.mul(number, total)])
        bases = [builder.gep(base, [begin]) for base in shifted]
        builder.cbranch(many, loop, done)

        builder.position_at_end(loop)
        i, running = builder.phi(INT64), joined((old, here))
        left = v.load(v.at(left_base, i))
        new = [v.fma(left, v.load(v.at(base, i)), value) for base, value in zip(bases, running, strict=True)]
        after = builder.add(i, INT64(v.lanes))
        i.add_incoming(INT64(0), here)
        i.add_incoming(after, loop)
        for value, result in zip(running, new, strict=True):
            value.add_incoming(result, loop)
        builder.cbranch(builder.icmp_signed("<", after, whole), loop, done)

        builder.position_at_end(done)
        added = joined((old, here), (new, loop))
        builder.cbranch(some, ready, following)

        # Of the last vector only what belongs to the line is read, so that nothing else, infinite perhaps, gets in.
        builder.position_at_end(ready)
        left = v.masked_load(v.at(left_base, whole), rest)
        last = [
            v.fma(left, v.masked_load(v.at(base, whole), rest), value) for base, value in zip(bases, added, strict=True)
        ]
        builder.branch(following)

        builder.position_at_end(following)
        results = joined((old, line), (added, done), (last, ready))
        next_number = builder.add(number, INT64(1))
        number.add_incoming(next_number, following)
        for value, result in zip(old, results, strict=True):
            value.add_incoming(result, following)
        end = builder.append_basic_block("end")
        builder.cbranch(builder.icmp_signed("<", next_number, line_count), line, end)
        builder.position_at_end(end)
        for result, place in zip(results, places, strict=True):
            v.store(result, place)
        return context.get_dummy_value()

    n = types.int64
    return types.void(taps, a, n, b, begins, n, n, offsets, n, n, sums, n), generate


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
                at, first = (m * kernel + line * tap_count) * lanes, line * out_lines
                tap = int64(0)
                while tap < tap_count:
                    left, to = tap_count - tap, at + tap * lanes
                    if left == 3 or left == 4:
                        _add_products(3, dY, source, spread, begins, first, out_lines, offsets, tap, width, part, to)
                        tap += 3
                    elif left >= 5:
                        _add_products(5, dY, source, spread, begins, first, out_lines, offsets, tap, width, part, to)
                        tap += 5
                    else:
                        _add_products(1, dY, source, spread, begins, first, out_lines, offsets, tap, width, part, to)
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
