"""GatherGrad on the CPU: every element of dX is written once, by one thread, its terms added in the order of dY.

Wide rows: positions are sorted by the row they add to, so a row's sum is formed while it is in the cache and rows that
nothing adds to are zeroed in passing. Narrow rows: sorting would cost more than it saves, so each task zeroes a range
of rows and adds into it; half types add into a float32 copy of that range.
"""

import math

import numpy as np

from onnxgrad.cpu.core.halves import finish_sums, flat, is_half, load, sums_for, zero
from onnxgrad.cpu.core.indices import find_bad_index, refuse_bad, wrapped
from onnxgrad.cpu.core.jit import int64, native
from onnxgrad.cpu.core.memory import GIVEN, ZEROS, workspace
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.threads import get_num_threads, launch
from onnxgrad.tensor_types import Array

WIDE_ROW = 64  # bytes: one cache line
SPAN = 1 << 17  # bytes of dX in one task: large enough to amortise drawing it, small enough to share evenly
COLUMNS = 256  # of one row in a task, where a few rows have most of the work
RADIX_BITS = 11
UNNOTICED = 1 << 22  # bytes of working memory that are not worth saving


def gather_grad(shape: Array, indices: Array, dY: Array, dX: Array, axis: int, memory: int = GIVEN) -> None:
    axis %= shape.size
    outer, size, inner = math.prod(dX.shape[:axis]), dX.shape[axis], math.prod(dX.shape[axis + 1 :])
    zeroed = memory == ZEROS
    positions, terms, result = flat(indices), flat(dY), flat(dX)
    touched = dX.nbytes + dY.nbytes + indices.nbytes
    if inner * dY.itemsize >= WIDE_ROW:
        order_type = np.int32 if positions.size < 2**31 else np.int64
        order = workspace((2, positions.size), order_type)
        bad = launch(_wide_rows, positions, terms, result, order, outer, size, inner, zeroed, bytes_touched=touched)
    else:
        rows = _rows_per_task(dY, outer, size, inner)
        bad = launch(_narrow_rows, positions, terms, result, outer, size, inner, rows, zeroed, bytes_touched=touched)
    refuse_bad(bad, indices, size)


def _rows_per_task(dY: Array, outer: int, size: int, inner: int) -> int:
    """How many rows of dX a narrow task owns: it reads every index, so as many as balance and memory allow."""
    threads = get_num_threads()
    rows = size if outer >= threads else -(-size * outer // threads)
    if dY.itemsize == 2:  # the float32 copies of all threads together: a quarter of dY, or what no one notices
        budget = max(dY.nbytes // 4, UNNOTICED) // threads
        rows = min(rows, budget // (4 * max(inner, 1)))
    return max(1, rows)


@native
def _sort_positions(indices: Array, size: int, order: Array) -> int:
    """Fills order[result] with the positions of `indices`, sorted by the row they name and then by position."""
    count = indices.size
    for i in range(count):
        order[0, i] = i
    source = 0
    counts = np.empty(1 << RADIX_BITS, np.int64)
    shift = 0
    while (size - 1) >> shift > 0:
        counts[:] = 0
        for i in range(count):
            counts[(wrapped(indices[i], size) >> shift) & ((1 << RADIX_BITS) - 1)] += 1
        total = int64(0)
        for digit in range(counts.size):
            total, counts[digit] = total + counts[digit], total
        for i in range(count):
            position = order[source, i]
            digit = (wrapped(indices[position], size) >> shift) & ((1 << RADIX_BITS) - 1)
            order[1 - source, counts[digit]] = position
            counts[digit] += 1
        source = 1 - source
        shift += RADIX_BITS
    return source


@native
def _run_end(indices: Array, order: Array, size: int, start: int) -> int:
    """The end of the run of positions that add to the same row as the one at `start`."""
    row = wrapped(indices[order[start]], size)
    end = start + 1
    while end < order.size and wrapped(indices[order[end]], size) == row:
        end += 1
    return end


@native
def _long_runs(indices: Array, order: Array, size: int, limit: int) -> Array:
    """[start, end] of each run longer than `limit`."""
    runs = np.empty((order.size // limit, 2), np.int64)
    count, start = 0, int64(0)
    while start < order.size:
        end = _run_end(indices, order, size, start)
        if end - start > limit:
            runs[count, 0], runs[count, 1] = start, end
            count += 1
        start = end
    return runs[:count]


@native
def _first_at_least(indices: Array, order: Array, size: int, row: int) -> int:
    low, high = 0, order.size
    while low < high:
        middle = (low + high) // 2
        if wrapped(indices[order[middle]], size) < row:
            low = middle + 1
        else:
            high = middle
    return low


@native
def _add_run(dY: Array, dX: Array, run: Array, source: int, target: int, inner: int, width: int) -> None:
    """dX[target : target + width] = the sum of the rows `run` of dY."""
    sums = sums_for(dX, target, width)
    start = source + run[0] * inner
    for c in range(width):
        sums[c] = load(dY, start + c)
    for position in run[1:]:
        start = source + position * inner
        for c in range(width):
            sums[c] += load(dY, start + c)
    finish_sums(dX, target, sums)


@native
def _wide_task(
    number: int,
    indices: Array,
    order: Array,
    dY: Array,
    dX: Array,
    outer: int,
    size: int,
    inner: int,
    rows: int,
    limit: int,
    zeroed: bool,
) -> None:
    """Writes `rows` rows of dX, except those with a run longer than `limit`."""
    row = number * rows
    last = min(outer * size, row + rows)
    batch, at = int64(-1), 0
    while row < last:
        if row // size != batch:
            batch = row // size
            at = _first_at_least(indices, order, size, row - batch * size)
        batch_end = min(last, (batch + 1) * size)
        next_row = batch_end if at == order.size else batch * size + wrapped(indices[order[at]], size)
        next_row = min(next_row, batch_end)
        if not zeroed:
            zero(dX, row * inner, next_row * inner)
        row = next_row
        if row < batch_end:
            end = _run_end(indices, order, size, at)
            if end - at <= limit:
                _add_run(dY, dX, order[at:end], batch * indices.size * inner, row * inner, inner, inner)
            at = end
            row += 1


@native
def _long_run_task(
    number: int, indices: Array, order: Array, runs: Array, dY: Array, dX: Array, size: int, inner: int
) -> None:
    """Writes some columns of one row whose sum is so long that threads share it."""
    slabs = (inner + COLUMNS - 1) // COLUMNS
    column, number = (number % slabs) * COLUMNS, number // slabs
    run, batch = runs[number % len(runs)], number // len(runs)
    row = batch * size + wrapped(indices[order[run[0]]], size)
    source, target = batch * indices.size * inner + column, row * inner + column
    _add_run(dY, dX, order[run[0] : run[1]], source, target, inner, min(COLUMNS, inner - column))


@native
def _wide_rows(
    indices: Array,
    dY: Array,
    dX: Array,
    buffers: Array,
    outer: int,
    size: int,
    inner: int,
    zeroed: bool,
    scheduler: int,
) -> int:
    bad = find_bad_index(indices, size, scheduler)
    if bad >= 0 or outer * size == 0:
        return bad
    order = buffers[_sort_positions(indices, size, buffers)]
    row_bytes = inner * dX.itemsize
    rows = max(1, SPAN // row_bytes)
    limit = max(1, order.size // 16, SPAN // row_bytes)
    tasks = (outer * size + rows - 1) // rows
    parallel(scheduler, tasks, _wide_task, (indices, order, dY, dX, outer, size, inner, rows, limit, zeroed))
    runs = _long_runs(indices, order, size, limit)
    tasks = outer * len(runs) * ((inner + COLUMNS - 1) // COLUMNS)
    if tasks > 0:
        parallel(scheduler, tasks, _long_run_task, (indices, order, runs, dY, dX, size, inner))
    return bad


@native
def _narrow_task(
    number: int, indices: Array, dY: Array, dX: Array, size: int, inner: int, rows: int, zeroed: bool
) -> None:
    """Writes `rows` rows of one batch of dX."""
    blocks = (size + rows - 1) // rows
    batch, first = number // blocks, (number % blocks) * rows
    rows = min(rows, size - first)
    target, source = (batch * size + first) * inner, batch * indices.size * inner
    sums = sums_for(dX, target, rows * inner)
    if is_half(dX) or not zeroed:
        sums[:] = 0
    for j in range(indices.size):
        row = wrapped(indices[j], size) - first
        if 0 <= row < rows:
            if inner == 1:
                sums[row] += load(dY, source + j)
            else:
                for c in range(inner):
                    sums[row * inner + c] += load(dY, source + j * inner + c)
    finish_sums(dX, target, sums)


@native
def _narrow_rows(
    indices: Array, dY: Array, dX: Array, outer: int, size: int, inner: int, rows: int, zeroed: bool, scheduler: int
) -> int:
    bad = find_bad_index(indices, size, scheduler)
    if bad >= 0 or dX.size == 0:
        return bad
    tasks = outer * ((size + rows - 1) // rows)
    parallel(scheduler, tasks, _narrow_task, (indices, dY, dX, size, inner, rows, zeroed))
    return bad
