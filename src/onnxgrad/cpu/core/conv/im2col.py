"""Images as matrices: a row for each element of a kernel, a column for each window; and back again.

Rows of an image are found in tables, so that the code knows two axes only, whatever the number of dimensions: `lines`
has, for each element of the kernel's outer axes and each output line, where the image's line begins that it sees, or
-1 where that is padding; `taps` has, for each element of the kernel's last axis, the windows that see something of the
image, first and end, and where window 0 would. `geometry` is (elements in an image, output lines, windows in a line,
kernel lines, taps in a line, stride). Tables are flat.
"""

from typing import Any

from llvmlite import ir
from numba import types

from onnxgrad.cpu.core.halves import load, store, zero
from onnxgrad.cpu.core.jit import inlined, machine_code
from onnxgrad.cpu.core.vectors import VECTOR_BYTES, Vectors, data_of
from onnxgrad.tensor_types import Array


@machine_code
def _move(
    typing_context: Any,
    adds: Any,
    source: Any,
    source_start: Any,
    low: Any,
    high: Any,
    target: Any,
    target_start: Any,
    count: Any,
    factor: Any,
) -> Any:
    """One vector: target[k] = source[k] if low <= k < high, else 0, k < count; or target[k] += factor · source[k].

    Lines are short: a loop that becomes vector code would spend its time on beginnings and ends.
    """
    element = target.dtype

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        _, s_array, s_at, first, last, t_array, t_at, valid, scale = values
        v = Vectors(builder, element.bitwidth // 8)
        inside = builder.and_(v.compare(">=", first), v.compare("<", last))
        moved = v.masked_load(v.at(data_of(context, builder, source, s_array), s_at), inside)
        place = v.at(data_of(context, builder, target, t_array), t_at)
        if adds.literal_value:
            v.masked_store(v.fma(moved, v.splat(scale), v.masked_load(place, inside)), place, inside)
        else:
            v.masked_store(moved, place, v.compare("<", valid))
        return context.get_dummy_value()

    n = types.int64
    return types.void(adds, source, n, n, n, target, n, n, element), generate


@inlined
def unfold(
    X: Array,
    image: int,
    lines: Array,
    taps: Array,
    geometry: tuple[int, ...],
    element: int,
    start: int,
    end: int,
    target: Array,
    at: int,
) -> None:
    """target[at …] = what an element of the kernel sees of the image from window `start` to `end`."""
    _, out_lines, width, _, tap_count, stride = geometry
    line, tap = element // tap_count, element % tap_count
    first, last, shift = load(taps, 3 * tap), load(taps, 3 * tap + 1), load(taps, 3 * tap + 2)
    lanes, nothing = VECTOR_BYTES // X.itemsize, type(load(X, 0))(0)
    out_line = start // width
    left = start - out_line * width
    window = start
    while window < end:
        right = min(width, left + end - window)
        here = at + window - start - left
        source = load(lines, line * out_lines + out_line)
        if source < 0:
            zero(target, here + left, here + right)
        elif stride == 1:
            base = image + source + shift
            for j in range(left, right, lanes):
                low, high = max(first - j, 0), min(last - j, lanes)
                _move(0, X, base + j, low, high, target, here + j, min(right - j, lanes), nothing)
        else:
            low = max(left, min(first, right))
            high = max(low, min(right, last))
            base = image + source + shift
            zero(target, here + left, here + low)
            for j in range(low, high):
                store(target, here + j, load(X, base + j * stride))
            zero(target, here + high, here + right)
        window += right - left
        left = 0
        out_line += 1


@inlined
def fold(
    source: Array,
    at: int,
    lines: Array,
    taps: Array,
    geometry: tuple[int, ...],
    element: int,
    start: int,
    end: int,
    factor: float,
    dX: Array,
    image: int,
) -> None:
    """Adds source[at …], times a factor, to where an element of the kernel saw it: the way back of `unfold`."""
    _, out_lines, width, _, tap_count, stride = geometry
    line, tap = element // tap_count, element % tap_count
    first, last, shift = load(taps, 3 * tap), load(taps, 3 * tap + 1), load(taps, 3 * tap + 2)
    lanes = VECTOR_BYTES // dX.itemsize
    out_line = start // width
    left = start - out_line * width
    window = start
    while window < end:
        right = min(width, left + end - window)
        target = load(lines, line * out_lines + out_line)
        if target >= 0:
            low, high = max(left, first), min(right, last)
            here, base = at + window - start - left, image + target + shift
            if stride == 1:
                for j in range(low, high, lanes):
                    _move(1, source, here + j, 0, min(high - j, lanes), dX, base + j, lanes, factor)
            else:
                for j in range(low, high):
                    place = base + j * stride
                    store(dX, place, load(dX, place) + factor * load(source, here + j))
        window += right - left
        left = 0
        out_line += 1
