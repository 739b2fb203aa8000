"""GatherElementsGrad on the CPU: each task owns some columns of dX along the axis and adds dY into them in order.

A unit is one block of columns that lie side by side in memory, under one choice of the other coordinates. The sums of
half types are formed in a float32 copy of the unit, a range of rows at a time if it is large.
"""

import math

import numpy as np

from onnxgrad.cpu.core.halves import flat, is_half, load, store, zero
from onnxgrad.cpu.core.indices import find_bad_index, refuse_bad, wrapped
from onnxgrad.cpu.core.jit import inlined, int64, native
from onnxgrad.cpu.core.memory import GIVEN, ZEROS
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.threads import get_num_threads, launch
from onnxgrad.tensor_types import Array

UNIT = 1 << 21  # bytes of dX in one unit: about a core's second-level cache, where random additions are cheap
FEWEST_COLUMNS = 16  # one cache line of float32
TASK = 1 << 17  # bytes of dX in one task, which may be many units
CHECKED = 1 << 11  # indices looked at before they are used, so that they are still in the first-level cache
UNNOTICED = 1 << 22  # bytes of working memory that are not worth saving


def gather_elements_grad(dY: Array, shape: Array, indices: Array, dX: Array, axis: int, memory: int = GIVEN) -> None:
    axis %= shape.size
    size, count = dX.shape[axis], indices.shape[axis]
    before = _merge(indices.shape[:axis], dX.shape[:axis])
    after = _merge(indices.shape[axis + 1 :], dX.shape[axis + 1 :])
    columns = after[-1][0] if after else 1
    # One row per dimension that units are counted over: its length, its stride in dY, its stride in dX.
    y_step, x_step = math.prod(q for q, _ in after), math.prod(s for _, s in after)
    outer = _strides(before, y_step * count, x_step * size)
    dims = np.array([*outer, *_strides(after, 1, 1)[:-1]], np.int64).reshape(-1, 3)
    width, rows = _unit(dY, dX, size, columns)
    slabs, blocks = -(-columns // max(width, 1)), -(-size // max(rows, 1))
    units = math.prod(int(d) for d in dims[:, 0]) * slabs * blocks
    per_task = max(1, TASK // max(1, rows * width * dX.itemsize))
    # Units that together are all of dX, each in one piece, are zeroed one by one, while they are in the cache. Others
    # are not: pieces of 1 kB took twice the time of dX in one go. Half types are written from their sums at the end.
    covered = all(q == s for k, (q, s) in enumerate(zip(indices.shape, dX.shape, strict=True)) if k != axis)
    whole = covered and (width == x_step or dX.itemsize == 2)
    layout = (size, count, columns, width, rows, y_step, x_step)
    touched = dX.nbytes + dY.nbytes + indices.nbytes
    work = (flat(dY), flat(indices), flat(dX), dims, layout, units, per_task, whole, memory)
    refuse_bad(launch(_add_elements, *work, bytes_touched=touched), indices, size)


def _merge(taken: tuple[int, ...], whole: tuple[int, ...]) -> list[tuple[int, int]]:
    """(elements of indices, elements of dX) per dimension, neighbours joined where indices cover dX's dimension."""
    merged: list[tuple[int, int]] = []
    for q, s in zip(taken, whole, strict=True):
        if merged and q == s:
            merged[-1] = (merged[-1][0] * q, merged[-1][1] * s)
        else:
            merged.append((q, s))
    return merged


def _strides(dims: list[tuple[int, int]], y_stride: int, x_stride: int) -> list[tuple[int, int, int]]:
    """(length, stride in dY, stride in dX) of each dimension, the last one with the strides given."""
    rows = []
    for q, s in reversed(dims):
        rows.append((q, y_stride, x_stride))
        y_stride, x_stride = y_stride * q, x_stride * s
    return rows[::-1]


def _unit(dY: Array, dX: Array, size: int, columns: int) -> tuple[int, int]:
    """Columns and rows of a unit."""
    item = 4 if dX.itemsize == 2 else dX.itemsize
    even = -(-columns // (2 * get_num_threads()))  # two units for each thread, or more
    width = min(columns, max(FEWEST_COLUMNS, min(even, UNIT // max(1, size * item))))
    if dX.itemsize != 2:
        return width, size
    budget = max(dY.nbytes // 4, UNNOTICED) // get_num_threads()
    return width, max(1, min(size, budget // (4 * max(width, 1))))


@inlined
def _in_range(row: int, size: int) -> bool:
    return bool(np.uint64(row) < np.uint64(size))  # one comparison for both ends


@inlined
def _add(dY: Array, indices: Array, sums: Array, y: int, x: int, layout: tuple[int, ...]) -> bool:
    """sums[x + row · x_step + j] += dY[y + i · y_step + j], for the rows that indices name and this unit owns.

    False, and not all added, if an index is out of range.
    """
    size, first, rows, count, width, y_step, x_step = layout
    few = max(1, CHECKED // max(1, width))
    for top in range(0, count, few):
        bottom = min(count, top + few)
        lowest, highest = int64(0), int64(-1)
        for i in range(top, bottom):  # on vectors, and it brings the indices into the cache
            for j in range(width):
                lowest = min(lowest, int64(load(indices, y + i * y_step + j)))
                highest = max(highest, int64(load(indices, y + i * y_step + j)))
        if lowest < -size or highest >= size:
            return False
        if rows == size and lowest == 0:
            for i in range(top, bottom):
                for j in range(width):
                    at = x + int64(load(indices, y + i * y_step + j)) * x_step + j
                    store(sums, at, load(sums, at) + load(dY, y + i * y_step + j))
        else:
            for i in range(top, bottom):
                for j in range(width):
                    row = wrapped(load(indices, y + i * y_step + j), size) - first
                    if _in_range(row, rows):
                        at = x + row * x_step + j
                        store(sums, at, load(sums, at) + load(dY, y + i * y_step + j))
    return True


@inlined
def _add_unit(
    unit: int, dY: Array, indices: Array, dX: Array, dims: Array, layout: tuple[int, ...], zero_first: bool
) -> bool:
    """Writes one unit of dX; False if an index is out of range."""
    size, count, columns, width, rows, y_step, x_step = layout
    slabs, blocks = (columns + width - 1) // width, (size + rows - 1) // rows
    column, unit = (unit % slabs) * width, unit // slabs
    first, unit = (unit % blocks) * rows, unit // blocks
    width, rows = min(width, columns - column), min(rows, size - first)
    y, x = int64(column), int64(column) + first * x_step
    for d in range(len(dims) - 1, -1, -1):
        y += (unit % dims[d, 0]) * dims[d, 1]
        x += (unit % dims[d, 0]) * dims[d, 2]
        unit //= dims[d, 0]
    if is_half(dX):
        sums = np.zeros(rows * width, np.float32)
        good = _add(dY, indices, sums, y, int64(0), (size, first, rows, count, width, y_step, width))
        for row in range(rows):
            for j in range(width):
                store(dX, x + row * x_step + j, sums[row * width + j])
        return good
    if zero_first:
        zero(dX, x, x + size * x_step)
    return _add(dY, indices, dX, y, x, (size, first, rows, count, width, y_step, x_step))


@native
def _add_units(
    number: int,
    dY: Array,
    indices: Array,
    dX: Array,
    dims: Array,
    layout: tuple[int, ...],
    units: int,
    per_task: int,
    zero_first: bool,
    failed: Array,
) -> None:
    for unit in range(number * per_task, min(units, (number + 1) * per_task)):
        if not _add_unit(unit, dY, indices, dX, dims, layout, zero_first):
            failed[0] = True


@native
def _add_lines(
    number: int,
    dY: Array,
    indices: Array,
    dX: Array,
    dims: Array,
    layout: tuple[int, ...],
    units: int,
    per_task: int,
    zero_first: bool,
    failed: Array,
) -> None:
    """The same for the last axis, where a unit is a line in one piece.

    There are many short ones, so this is one function without calls: a call counts references, and threads that count
    the same array's wait for each other.
    """
    size, count = layout[0], layout[1]
    sums = np.empty(size if is_half(dX) else 0, np.float32)
    for unit in range(number * per_task, min(units, (number + 1) * per_task)):
        y, x, rest = int64(0), int64(0), unit
        for d in range(len(dims) - 1, -1, -1):
            y += (rest % dims[d, 0]) * dims[d, 1]
            x += (rest % dims[d, 0]) * dims[d, 2]
            rest //= dims[d, 0]
        if is_half(dX):
            for k in range(size):
                sums[k] = 0
        elif zero_first:
            for k in range(size):
                store(dX, x + k, 0)
        for i in range(count):
            row = int64(load(indices, y + i))
            if not _in_range(row, size):
                row += size
            if not _in_range(row, size):
                failed[0] = True
            elif is_half(dX):
                store(sums, row, load(sums, row) + load(dY, y + i))
            else:
                store(dX, x + row, load(dX, x + row) + load(dY, y + i))
        if is_half(dX):
            for k in range(size):
                store(dX, x + k, sums[k])


@native
def _zero_chunk(number: int, dX: Array) -> None:
    zero(dX, number * TASK, min(dX.size, (number + 1) * TASK))


@native
def _add_elements(
    dY: Array,
    indices: Array,
    dX: Array,
    dims: Array,
    layout: tuple[int, ...],
    units: int,
    per_task: int,
    whole: bool,
    memory: int,
    scheduler: int,
) -> int:
    if memory == GIVEN or dX.size == 0:
        bad = find_bad_index(indices, layout[0], scheduler)
        if bad >= 0 or dX.size == 0:
            return bad
    zeroed = memory == ZEROS
    if not zeroed and (not whole or units == 0):
        parallel(scheduler, (dX.size + TASK - 1) // TASK, _zero_chunk, (dX,))
    failed = np.zeros(1, np.bool_)
    work = (dY, indices, dX, dims, layout, units, per_task, whole and not zeroed, failed)
    tasks = (units + per_task - 1) // per_task
    rows, y_step, x_step = layout[4], layout[5], layout[6]
    if y_step == 1 and x_step == 1 and rows == layout[0]:
        parallel(scheduler, tasks, _add_lines, work)
    else:
        parallel(scheduler, tasks, _add_units, work)
    return find_bad_index(indices, layout[0], scheduler) if failed[0] else int64(-1)
