"""LinearCrossEntropy on the CPU: chunks of rows are multiplied, become gradients in place, and are multiplied again."""

import math
from typing import Any, NamedTuple

import numpy as np

from onnxgrad.arguments import label_error
from onnxgrad.cpu.core.convert import convert
from onnxgrad.cpu.core.cross_entropy import SHARE, SUM, begin_chunks, loss_of_chunk
from onnxgrad.cpu.core.halves import flat, load, store, zero
from onnxgrad.cpu.core.jit import native
from onnxgrad.cpu.core.matmul.launch_matmul import launch_matmul
from onnxgrad.cpu.core.memory import workspace
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.threads import NOTHING_WRONG, launch
from onnxgrad.tensor_types import Array, accumulator

CHUNK = 1 << 26  # bytes of logits at a time: dW comes from memory and goes back once for each chunk
DEPTH = 256  # rows that products add up at a time: with a few more, they would go over dW once more
BLOCK = 4096  # classes whose part of dW is made aside, in the cache, to be added
COLUMNS = 1024  # of a task that adds up columns


def linear_cross_entropy(
    X: Array,
    W: Array,
    labels: Array,
    bias: Array | None,
    weights: Array | None,
    scale: Array | None,
    loss: Array | None,
    dX: Array | None,
    dW: Array | None,
    dB: Array | None,
    transW: int,
    reduction: str,
    ignore_index: int,
    precision: str,
) -> None:
    dtype = accumulator(X.dtype)
    rows, depth, classes = math.prod(X.shape[:-1]), X.shape[-1], W.shape[0 if transW else 1]
    nothing = np.empty(0, dtype)
    each, factor = (np.empty(0, W.dtype) if a is None else a for a in (weights, scale))
    numbers = workspace((3,), np.float64)
    given = (flat(labels), flat(each), flat(factor), numbers, classes, (reduction == "mean", ignore_index))
    position = launch(begin_chunks, *given, bytes_touched=labels.nbytes)
    if position != NOTHING_WRONG:
        raise label_error(labels.shape, position, labels.reshape(-1)[position], classes, ignore_index)

    x, w = _numbers(X, dtype), _numbers(W, X.dtype, dtype)
    offset = nothing if bias is None else _numbers(bias, dtype)
    to_x, to_w, to_b = (
        None if a is None else a.reshape(-1) if a.dtype == dtype else workspace((a.size,), dtype) for a in (dX, dW, dB)
    )
    at_once = max(1, CHUNK // max(1, classes * dtype.itemsize))
    at_once = min(max(1, rows), at_once // DEPTH * DEPTH or at_once)
    logits = workspace((at_once * classes,), dtype)
    aside = workspace((BLOCK * depth if at_once < rows and to_w is not None else 0,), dtype)
    of_depth, of_class = (1, depth) if transW else (classes, 1)  # steps in W
    is_replaced = to_x is not None or to_w is not None or to_b is not None
    is_rounded = precision == "bfloat16" and dtype.itemsize == 4

    def product(a: _Matrix, b: _Matrix, c: _Matrix, sizes: tuple[int, int, int], bias: Array = nothing) -> None:
        starts = np.array([[a.start, b.start, c.start]], np.int64)
        launch_matmul(a.array, b.array, c.array, bias, starts, (*a[2:], *b[2:], *c[2:]), sizes, is_rounded=is_rounded)

    for first in range(0, rows, at_once):
        count = min(at_once, rows - first)
        chunk, some = _Matrix(logits, 0, classes, 1), _Matrix(x, first * depth, depth, 1)
        product(some, _Matrix(w, 0, of_depth, of_class), chunk, (count, classes, depth), offset)
        work = (logits, flat(labels), flat(each), numbers, first, (count, classes), (is_replaced, ignore_index))
        launch(loss_of_chunk, *work, bytes_touched=logits.nbytes)
        if to_x is not None:
            target = _Matrix(to_x, first * depth, depth, 1)
            product(chunk, _Matrix(w, 0, of_class, of_depth), target, (count, depth, classes))
        if to_b is not None:
            launch(_add_columns, logits, to_b, (count, classes), first == 0, bytes_touched=logits.nbytes)
        # The first chunk's part of dW is where it belongs; parts of others are made aside and added.
        width = max(1, classes) if first == 0 else BLOCK
        for block in range(0, classes if to_w is not None else 0, width):
            width = min(width, classes - block)
            to = to_w if first == 0 else aside
            if transW:
                transposed = _Matrix(logits, block, 1, classes)
                product(transposed, some, _Matrix(to, 0, depth, 1), (width, depth, count))
                where = (1, width * depth, block * depth, 0)
            else:
                transposed = _Matrix(x, first * depth, 1, depth)
                product(transposed, _Matrix(logits, block, classes, 1), _Matrix(to, 0, width, 1), (depth, width, count))
                where = (depth, width, block, classes)
            if first > 0:
                launch(_add, aside, to_w, where, bytes_touched=2 * width * depth * dtype.itemsize)
    for wide, array in ((to_x, dX), (to_w, dW), (to_b, dB)):
        if array is not None and wide is not None:
            if rows == 0:
                launch(_clear, wide, bytes_touched=wide.nbytes)
            if array.dtype != dtype:
                convert(wide, array)
    if loss is not None:
        launch(_finish, numbers, flat(loss), bytes_touched=0)


class _Matrix(NamedTuple):
    """Where a matrix begins in an array, and its steps from row to row and from column to column."""

    array: Any
    start: int
    row_step: int
    column_step: int


def _numbers(array: Array, *dtypes: np.dtype[Any]) -> Array:
    """The array, flat, converted to one type after the other."""
    for dtype in dtypes:
        if array.dtype != dtype:
            converted = workspace((array.size,), dtype)
            convert(array, converted)
            array = converted
    return flat(array)


@native
def _add(source: Array, target: Array, where: tuple[int, int, int, int], scheduler: int) -> None:
    """Adds a matrix to rows of another, from a place on and some step apart."""
    rows, columns, _, _ = where
    tasks = (columns + COLUMNS - 1) // COLUMNS
    parallel(scheduler, rows * tasks, _add_some, (source, target, where, tasks))


@native
def _add_some(task: int, source: Array, target: Array, where: tuple[int, int, int, int], tasks: int) -> None:
    _, columns, start, step = where
    row, first = task // tasks, task % tasks * COLUMNS
    at, to = row * columns + first, start + row * step + first
    for k in range(min(COLUMNS, columns - first)):
        store(target, to + k, load(target, to + k) + load(source, at + k))


@native
def _add_columns(source: Array, sums: Array, sizes: tuple[int, int], is_first: bool, scheduler: int) -> None:
    """The sums of a matrix's columns, or more of them."""
    tasks = (sizes[1] + COLUMNS - 1) // COLUMNS
    parallel(scheduler, tasks, _add_some_columns, (source, sums, sizes, is_first))


@native
def _add_some_columns(task: int, source: Array, sums: Array, sizes: tuple[int, int], is_first: bool) -> None:
    rows, columns = sizes
    first, end = task * COLUMNS, min(columns, (task + 1) * COLUMNS)
    if is_first:
        zero(sums, first, end)
    for row in range(rows):
        at = row * columns
        for k in range(first, end):
            store(sums, k, load(sums, k) + load(source, at + k))


@native
def _clear(array: Array, scheduler: int) -> None:
    zero(array, 0, array.size)


@native
def _finish(numbers: Array, loss: Array, scheduler: int) -> None:
    store(loss, 0, numbers[SUM] * numbers[SHARE])
