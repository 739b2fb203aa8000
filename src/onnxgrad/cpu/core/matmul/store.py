"""Rows of a product on their way into memory."""

from onnxgrad.cpu.core.halves import load, store
from onnxgrad.cpu.core.jit import native
from onnxgrad.tensor_types import Array


@native
def begin_rows(
    c: Array, start: int, row: int, column: int, rows: int, columns: int, bias: Array, bias_start: int
) -> None:
    """c[i, j] = bias[j]."""
    if column == 1:  # so that it becomes vector moves
        for i in range(rows):
            for j in range(columns):
                store(c, start + i * row + j, load(bias, bias_start + j))
        return
    for i in range(rows):
        for j in range(columns):
            store(c, start + i * row + j * column, load(bias, bias_start + j))


@native
def put(
    piece: Array,
    piece_start: int,
    piece_row: int,
    rows: int,
    columns: int,
    c: Array,
    start: int,
    row: int,
    column: int,
    accumulate: bool,
) -> None:
    """c[i, j] (+)= piece[i, j]."""
    for i in range(rows):
        for j in range(columns):
            at = start + i * row + j * column
            new = load(piece, piece_start + i * piece_row + j)
            store(c, at, load(c, at) + new if accumulate else new)
