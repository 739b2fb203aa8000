"""Sums over rows of numbers, whose length is a multiple of ROW: the channels of one element of an image, say."""

from typing import Any

from llvmlite import ir
from numba import types

from onnxgrad.cpu.core.jit import machine_code
from onnxgrad.cpu.core.vectors import INT32, INT64, Vectors, data_of

ROW = 8  # numbers
TASKS = 16  # wanted
CHANNELS, MOST_CHANNELS = 16, 64  # of a task, where there are as many: each task finds anew what is read
ELEMENTS = 1 << 24  # of a task, at most, where that leaves a row


def channel_chunks(images: int, channels: int, size: int) -> int:
    """In how many chunks the channels of each image are summed: it follows from the shape alone, as the bits do.

    A task has its channels in memory of its own, planes of `size` elements.
    """
    most = min(MOST_CHANNELS, max(ROW, ELEMENTS // max(1, size)))
    return max(1, -(-channels // most), min(channels // CHANNELS, -(-TASKS // max(1, images))))


def _over(builder: ir.IRBuilder, count: Any, start: Any, body: Any) -> Any:
    """A loop over 0, ROW, 2 · ROW … below `count`, which is not 0: body(i, value) gives the value of the next turn."""
    before, loop, done = builder.block, builder.append_basic_block("vectors"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    i, value = builder.phi(INT64), builder.phi(start.type)
    i.add_incoming(INT64(0), before)
    value.add_incoming(start, before)
    result, following = body(i, value), builder.add(i, INT64(ROW))
    i.add_incoming(following, loop)
    value.add_incoming(result, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
    builder.position_at_end(done)
    return result


@machine_code
def add_scaled(typing_context: Any, target: Any, at: Any, source: Any, start: Any, count: Any, weight: Any) -> Any:
    """target[at + i] += source[start + i] · weight, for i below `count`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        to, to_at, source_array, first, length, factor = values
        v = Vectors(builder, target.dtype.bitwidth // 8, ROW)
        there = builder.gep(data_of(context, builder, target, to), [to_at])
        here = builder.gep(data_of(context, builder, source, source_array), [first])
        factors = v.splat(factor)

        def step(i: Any, value: Any) -> Any:
            v.store(v.fma(v.load(v.at(here, i)), factors, v.load(v.at(there, i))), v.at(there, i))
            return value

        _over(builder, length, INT64(0), step)
        return context.get_dummy_value()

    n = types.int64
    return types.void(target, n, source, n, n, target.dtype), generate


@machine_code
def dot(typing_context: Any, a: Any, a_at: Any, b: Any, b_at: Any, count: Any) -> Any:
    """The sum of a[a_at + i] · b[b_at + i], for i below `count`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        first, first_at, second, second_at, length = values
        v = Vectors(builder, a.dtype.bitwidth // 8, ROW)
        one = builder.gep(data_of(context, builder, a, first), [first_at])
        other = builder.gep(data_of(context, builder, b, second), [second_at])
        total = _over(
            builder, length, v.zeros, lambda i, value: v.fma(v.load(v.at(one, i)), v.load(v.at(other, i)), value)
        )
        lanes = ROW
        while lanes > 1:  # the upper half to the lower one
            lanes //= 2
            upper = v.shuffle(total, total, [*range(lanes, 2 * lanes), *range(lanes, ROW)][:ROW])
            total = builder.fadd(total, upper)
        return builder.extract_element(total, INT32(0))

    n = types.int64
    return a.dtype(a, n, b, n, n), generate
