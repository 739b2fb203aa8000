"""SliceGrad on the CPU: dX is written front to back, each stretch once, as zeros or as elements of dY."""

import math

import numpy as np

from onnxgrad.cpu.core.halves import flat, load, store, zero
from onnxgrad.cpu.core.jit import inlined, int64, native
from onnxgrad.cpu.core.memory import GIVEN, ZEROS
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.threads import launch
from onnxgrad.ops.slice import merged_ranges
from onnxgrad.tensor_types import Array

# Only the size of an element matters: it is moved, never computed with.
CARRIERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
CHUNK = 1 << 14  # bytes of dX zeroed, then filled at a step while still in the first-level cache
SHORT = 32  # elements of a row that are quicker to pick one by one
TASK = 1 << 17  # bytes of dX in one task


def slice_grad(
    dY: Array,
    shape: Array,
    starts: Array,
    ends: Array,
    axes: Array | None,
    steps: Array | None,
    dX: Array,
    memory: int = GIVEN,
) -> None:
    zeroed = memory == ZEROS
    if dX.size == 0 or (zeroed and dY.size == 0):
        return
    carrier = CARRIERS[dX.itemsize]
    terms: Array = flat(dY).view(carrier)
    result: Array = dX.view(carrier).reshape(-1)
    *outer, (dim, last) = merged_ranges(dX.shape, starts, ends, axes, steps)
    # One row per dimension but the last: length in dX, start, step, length in dY, stride in dY.
    dims, y_stride = np.empty((len(outer), 5), np.int64), last.length
    for d in reversed(range(len(outer))):
        dims[d] = (outer[d][0], *outer[d][1], y_stride)
        y_stride *= outer[d][1].length
    rows = math.prod(length for length, _ in outer)
    work = (terms, result, dims, (dim, *last), rows, dY.size == 0, zeroed)
    launch(_lay, *work, bytes_touched=dX.nbytes + dY.nbytes)


@inlined
def _write_part(
    dY: Array, dX: Array, y: int, x: int, begin: int, end: int, last: tuple[int, ...], zeroed: bool
) -> None:
    """Writes positions begin … end-1 of a row of dX that starts at x; the row of dY starts at y."""
    _, start, step, length = last
    if step == 1 or step == -1:
        low = start if step == 1 else start - length + 1
        first, stop = min(max(low, begin), end), max(min(low + length, end), begin)
        if not zeroed:
            zero(dX, x + begin, x + min(first, stop))
            zero(dX, x + max(first, stop), x + end)
        if step == 1:
            for i in range(first, stop):
                store(dX, x + i, load(dY, y + i - start))
        else:
            for i in range(first, stop):
                store(dX, x + i, load(dY, y + start - i))
        return
    chunk = CHUNK // dX.itemsize
    for here in range(begin, end, chunk):
        there = min(end, here + chunk)
        if not zeroed:
            zero(dX, x + here, x + there)
        # The terms j with here <= start + j · step < there.
        if step > 0:
            first, stop = (here - start + step - 1) // step, (there - start + step - 1) // step
        else:
            first, stop = (start - there) // -step + 1, (start - here) // -step + 1
        for j in range(max(first, 0), min(stop, length)):
            store(dX, x + start + j * step, load(dY, y + j))


@inlined
def _place(coordinate: int, start: int, step: int, length: int) -> int:
    """Which element of dY's dimension stands at a coordinate of dX, or -1."""
    offset = coordinate - start
    place = offset if step == 1 else offset // step
    return place if place * step == offset and 0 <= place < length else int64(-1)


@native
def _short_row(dim: int, last: tuple[int, ...]) -> Array:
    """For rows too short for vector code: the element of dY's row at each position of dX's row, or -1."""
    pattern = np.empty(dim if dim <= SHORT else 0, np.int64)
    for c in range(pattern.size):
        pattern[c] = _place(c, last[1], last[2], last[3])
    return pattern


@native
def _lay_rows(
    number: int, dY: Array, dX: Array, dims: Array, last: tuple[int, ...], rows: int, per_task: int, zeroed: bool
) -> None:
    """Writes some whole rows: the outer coordinates count up, those of the last dimension are a row."""
    dim = last[0]
    row, stop = number * per_task, min(rows, (number + 1) * per_task)
    innermost = len(dims) - 1
    count, start, step = dims[innermost, 0], dims[innermost, 1], dims[innermost, 2]
    length, y_stride = dims[innermost, 3], dims[innermost, 4]
    pattern = _short_row(dim, last)
    while row < stop:
        # One sweep along the innermost of the outer dimensions, under fixed coordinates of the others.
        along = row % count
        sweep = min(count - along, stop - row)
        rest, y = row // count, int64(0)
        for d in range(len(dims) - 2, -1, -1):
            place = _place(rest % dims[d, 0], dims[d, 1], dims[d, 2], dims[d, 3])
            y = y + place * dims[d, 4] if place >= 0 and y >= 0 else int64(-1)
            rest //= dims[d, 0]
        if y < 0 and zeroed:
            pass
        elif y < 0:
            zero(dX, row * dim, (row + sweep) * dim)
        else:
            for i in range(sweep):
                place = _place(along + i, start, step, length)
                if place >= 0 and pattern.size > 0:
                    y_row, x_row = y + place * y_stride, (row + i) * dim
                    for c in range(pattern.size):
                        store(dX, x_row + c, load(dY, y_row + pattern[c]) if pattern[c] >= 0 else dX.dtype.type(0))
                elif place >= 0:
                    _write_part(dY, dX, y + place * y_stride, (row + i) * dim, 0, dim, last, zeroed)
                elif not zeroed:
                    zero(dX, (row + i) * dim, (row + i + 1) * dim)
        row += sweep


@native
def _lay_part(
    number: int, dY: Array, dX: Array, dims: Array, last: tuple[int, ...], parts: int, per_part: int, zeroed: bool
) -> None:
    """Writes a part of one long row."""
    dim = last[0]
    row, begin = number // parts, (number % parts) * per_part
    end = min(dim, begin + per_part)
    rest, y = row, int64(0)
    for d in range(len(dims) - 1, -1, -1):
        place = _place(rest % dims[d, 0], dims[d, 1], dims[d, 2], dims[d, 3])
        y = y + place * dims[d, 4] if place >= 0 and y >= 0 else int64(-1)
        rest //= dims[d, 0]
    if y >= 0:
        _write_part(dY, dX, y, row * dim, begin, end, last, zeroed)
    elif not zeroed:
        zero(dX, row * dim + begin, row * dim + end)


@native
def _zero_part(number: int, dX: Array, per_part: int) -> None:
    zero(dX, number * per_part, min(dX.size, (number + 1) * per_part))


@native
def _lay(
    dY: Array, dX: Array, dims: Array, last: tuple[int, ...], rows: int, nothing: bool, zeroed: bool, scheduler: int
) -> None:
    dim, per_part = last[0], TASK // dX.itemsize
    if nothing:
        parallel(scheduler, (dX.size + per_part - 1) // per_part, _zero_part, (dX, per_part))
    elif dim >= per_part or len(dims) == 0:
        parts = (dim + per_part - 1) // per_part
        parallel(scheduler, rows * parts, _lay_part, (dY, dX, dims, last, parts, per_part, zeroed))
    else:
        per_task = max(1, per_part // dim)
        parallel(scheduler, (rows + per_task - 1) // per_task, _lay_rows, (dY, dX, dims, last, rows, per_task, zeroed))
