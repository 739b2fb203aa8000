"""Products over all steps and rows of a recurrent operator: aᵀ · b, where a and b have a row for each.

They are made of blocks of DEPTH rows. Of each block some columns of a are packed once and multiplied with b in turn.
"""

import numpy as np

from onnxgrad.cpu.core.halves import load, move, store, zero
from onnxgrad.cpu.core.jit import native
from onnxgrad.cpu.core.matmul.microkernel import PACKED, ROWS, Matrix, Panels, aligned, multiply, panel_width
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.tensor_types import Array

DEPTH = 192  # rows of a and b at a time; fixed, since it orders the additions
WIDTH = 768  # columns of b at a time: what is packed stays in the second-level cache
GROUP = 4  # rows of a packed side by side, so that whole cache lines are written
ZERO_ROW = -1  # a row of zeros, in place of a row's number
SUMMED_COLUMNS = 256


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
def pack_left(a: Array, start: int, a_row: int, depth: int, columns: int, packed: Array) -> None:
    """Lays `columns` of `depth` rows of a out as the PACKED left side of a product with its transpose."""
    for k in range(0, depth, GROUP):
        taken = min(GROUP, depth - k)
        for column in range(0, columns, ROWS):
            here, at = start + k * a_row + column, column * depth + k * ROWS
            if taken == GROUP and column + ROWS <= columns:
                for i in range(GROUP):
                    move(ROWS, a, here + i * a_row, packed, at + i * ROWS)
            else:
                valid = min(ROWS, columns - column)
                for i in range(taken):
                    for j in range(valid):
                        store(packed, at + i * ROWS + j, load(a, here + i * a_row + j))


@native
def _pack_right(
    b: Array, first: Array, rows: Array, width: int, left: int, columns: int, packed: Array, at: int
) -> None:
    """Lays some columns of those rows of b out as the right side of a product."""
    panel, depth = panel_width(packed), rows.size
    for i in range(depth):
        row = rows[i]
        for column in range(0, columns, panel):
            place, taken = at + column * depth + i * panel, min(panel, columns - column)
            if row >= 0 and taken == panel:
                source = row * width + left + column
                for j in range(panel):
                    store(packed, place + j, load(b, source + j))
            else:
                gather_row(b, first, row, width, left + column, taken, packed, place)
                zero(packed, place + taken, place + panel)


@native
def outer_block(
    packed_a: Array,
    height: int,
    b: Array,
    first: Array,
    rows: Array,
    width: int,
    packed_b: Array,
    c: Array,
    c_start: int,
    add: bool,
    gemm: int,
) -> None:
    """c[m, n] (+)= Σ a[k, m] · b[rows[k], n], for the rows of one block; packed_b is room for WIDTH columns."""
    at, depth = aligned(packed_b), rows.size
    for left in range(0, width, WIDTH):
        columns = min(WIDTH, width - left)
        _pack_right(b, first, rows, width, left, columns, packed_b, at)
        multiply(
            gemm,
            Matrix(packed_a, 0, PACKED),
            Panels(packed_b, at, depth),
            Matrix(c, c_start + left, width),
            (height, depth, columns),
            add,
        )


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
