"""Products over all steps and rows of a recurrent operator: aᵀ · b, where a and b have a row for each."""

import numpy as np

from onnxgrad.cpu.core.gemm import PACKED, ROWS, aligned, multiply, pack, packed_size, panel_width
from onnxgrad.cpu.core.halves import load, store, zero
from onnxgrad.cpu.core.jit import native
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.tensor_types import Array

DEPTH = 192  # rows of a and b at a time; fixed, since it orders the additions
HEIGHT, WIDTH = 384, 384  # of the product, in one task
ZERO_ROW = -1  # a row of zeros, in place of a row's number
SUMMED_COLUMNS = 64


@native
def from_first(row: int) -> int:
    """The number that stands for a row of the first state instead of one of all states; and back again."""
    return -2 - row


@native
def gather_row(
    source: Array, first: Array, row: int, width: int, column: int, count: int, target: Array, at: int
) -> None:
    """target[at : at + count] = some columns of a row of `source`, of `first` (zeros if that is empty), or zeros."""
    if row >= 0:
        for j in range(count):
            store(target, at + j, load(source, row * width + column + j))
    elif row != ZERO_ROW and first.size > 0:
        for j in range(count):
            store(target, at + j, load(first, from_first(row) * width + column + j))
    else:
        for j in range(count):
            store(target, at + j, 0)


@native
def even_share(total: int, parts: int, unit: int) -> int:
    """How much each of `parts` takes of `total`, in whole units."""
    share = (total + parts - 1) // parts
    return (share + unit - 1) // unit * unit


@native
def _outer_tile(
    number: int,
    a: Array,
    a_start: int,
    a_row: int,
    height: int,
    b: Array,
    first: Array,
    rows: Array,
    width: int,
    c: Array,
    c_start: int,
    tall: int,
    gemm: int,
) -> None:
    panel = panel_width(c)
    across = (width + WIDTH - 1) // WIDTH
    wide = even_share(width, across, panel)
    top, left = number // across * tall, number % across * wide
    m, n = min(tall, height - top), max(0, min(wide, width - left))
    packed_a = np.empty((m + ROWS - 1) // ROWS * ROWS * DEPTH, c.dtype)
    packed_b = np.empty(packed_size(c, DEPTH, n), c.dtype)
    at = aligned(packed_b)
    target = c_start + top * width + left
    for k in range(0, max(1, rows.size), DEPTH):
        depth = min(DEPTH, rows.size - k)
        pack(a, a_start + k * a_row + top, a_row, 1, depth, m, ROWS, packed_a, 0)
        for i in range(depth):
            row = rows[k + i]
            for column in range(0, n, panel):
                place, taken = at + column * depth + i * panel, min(panel, n - column)
                if row >= 0 and taken == panel:
                    source = row * width + left + column
                    for j in range(panel):
                        store(packed_b, place + j, load(b, source + j))
                else:
                    gather_row(b, first, row, width, left + column, taken, packed_b, place)
                    zero(packed_b, place + taken, place + panel)
        multiply(gemm, packed_a, 0, PACKED, m, packed_b, at, depth, depth, n, c, target, width, k > 0)


@native
def outer_product(
    a: Array,
    a_start: int,
    a_row: int,
    height: int,
    b: Array,
    first: Array,
    rows: Array,
    width: int,
    target: tuple[Array, int],
    threads: int,
    gemm: int,
    scheduler: int,
) -> None:
    """target[m, n] = Σ a[k, m] · b[rows[k], n]; a's row k starts at a_start + k · a_row."""
    c, c_start = target
    across = (width + WIDTH - 1) // WIDTH
    tall = HEIGHT
    while tall > 3 * ROWS and (height + tall - 1) // tall * across < 2 * threads:
        tall //= 2
    tasks = (height + tall - 1) // tall * across
    parallel(scheduler, tasks, _outer_tile, (a, a_start, a_row, height, b, first, rows, width, c, c_start, tall, gemm))


@native
def _sum_columns(number: int, a: Array, width: int, c: Array, c_start: int) -> None:
    left = number * SUMMED_COLUMNS
    n = min(SUMMED_COLUMNS, width - left)
    total, part = np.zeros(n, c.dtype), np.empty(n, c.dtype)
    rows = a.size // width
    for k in range(0, rows, DEPTH):  # sums of sums: the error grows with the square root of what it would
        part[:] = 0
        for i in range(k, min(rows, k + DEPTH)):
            for j in range(n):
                part[j] += load(a, i * width + left + j)
        total += part
    for j in range(n):
        store(c, c_start + left + j, total[j])


@native
def column_sums(a: Array, width: int, c: Array, c_start: int, scheduler: int) -> None:
    """c[c_start + j] = Σ a[k, j]."""
    parallel(scheduler, (width + SUMMED_COLUMNS - 1) // SUMMED_COLUMNS, _sum_columns, (a, width, c, c_start))
