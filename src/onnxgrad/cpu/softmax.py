"""SoftmaxGrad_13 and LogSoftmaxGrad_13 on the CPU: each line along the axis is read twice, the second time from cache.

Lines that lie side by side in memory go through together, a block of columns at a time.
"""

import math

import numpy as np

from onnxgrad.cpu.core.halves import flat, load, store
from onnxgrad.cpu.core.jit import native
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.recurrent.activations import probability
from onnxgrad.cpu.core.threads import launch
from onnxgrad.tensor_types import Array

TASK = 1 << 14  # elements of one task, at least
COLUMNS = 256  # of one block, at most
LANES = 16  # sums that a line is added up in, so that it goes through the machine's vectors


def softmax_grad_13(dY: Array, Y: Array, dX: Array, axis: int) -> None:
    _run(dY, Y, dX, axis, False)


def log_softmax_grad_13(dY: Array, Y: Array, dX: Array, axis: int) -> None:
    _run(dY, Y, dX, axis, True)


def _run(dY: Array, Y: Array, dX: Array, axis: int, is_log: bool) -> None:
    axis %= dX.ndim
    size, inner = dX.shape[axis], math.prod(dX.shape[axis + 1 :])
    outer = math.prod(dX.shape[:axis])
    if dX.size == 0:
        return
    launch(_lines, flat(dY), flat(Y), flat(dX), outer, size, inner, is_log, bytes_touched=3 * dX.nbytes)


@native
def _lines(dY: Array, Y: Array, dX: Array, outer: int, size: int, inner: int, is_log: bool, scheduler: int) -> None:
    if inner == 1:
        per_task = max(1, TASK // size)
        work = (dY, Y, dX, outer, size, per_task)
        if is_log:
            parallel(scheduler, (outer + per_task - 1) // per_task, _log_rows, work)
        else:
            parallel(scheduler, (outer + per_task - 1) // per_task, _rows, work)
        return
    width = min(COLUMNS, inner)
    blocks = outer * ((inner + width - 1) // width)
    per_task = max(1, TASK // (size * width))
    parallel(
        scheduler, (blocks + per_task - 1) // per_task, _columns, (dY, Y, dX, blocks, per_task, size, inner, is_log)
    )


@native
def _rows(number: int, dY: Array, Y: Array, dX: Array, outer: int, size: int, per_task: int) -> None:
    number_type = type(load(Y, 0))  # float32 for half numbers
    lanes = np.empty(LANES, number_type)
    for row in range(number * per_task, min(outer, (number + 1) * per_task)):
        at = row * size
        for k in range(LANES):
            lanes[k] = 0
        whole = size // LANES * LANES
        for i in range(0, whole, LANES):
            for k in range(LANES):
                store(lanes, k, load(lanes, k) + load(dY, at + i + k) * load(Y, at + i + k))
        total = number_type(0)
        for k in range(LANES):
            total += lanes[k]
        for i in range(whole, size):
            total += load(dY, at + i) * load(Y, at + i)
        for i in range(size):
            store(dX, at + i, load(Y, at + i) * (load(dY, at + i) - total))


@native
def _log_rows(number: int, dY: Array, Y: Array, dX: Array, outer: int, size: int, per_task: int) -> None:
    number_type = type(load(Y, 0))  # float32 for half numbers
    lanes = np.empty(LANES, number_type)
    for row in range(number * per_task, min(outer, (number + 1) * per_task)):
        at = row * size
        for k in range(LANES):
            lanes[k] = 0
        whole = size // LANES * LANES
        for i in range(0, whole, LANES):
            for k in range(LANES):
                store(lanes, k, load(lanes, k) + load(dY, at + i + k))
        total = number_type(0)
        for k in range(LANES):
            total += lanes[k]
        for i in range(whole, size):
            total += load(dY, at + i)
        for i in range(size):
            store(dX, at + i, load(dY, at + i) - probability(load(Y, at + i)) * total)


@native
def _columns(
    number: int, dY: Array, Y: Array, dX: Array, blocks: int, per_task: int, size: int, inner: int, is_log: bool
) -> None:
    number_type = type(load(Y, 0))  # float32 for half numbers
    width = min(COLUMNS, inner)
    across = (inner + width - 1) // width
    totals = np.empty(width, number_type)
    for block in range(number * per_task, min(blocks, (number + 1) * per_task)):
        first = block % across * width
        count = min(width, inner - first)
        at = block // across * size * inner + first
        for j in range(count):
            totals[j] = 0
        for i in range(size):
            for j in range(count):
                y = number_type(1) if is_log else load(Y, at + i * inner + j)
                store(totals, j, load(totals, j) + load(dY, at + i * inner + j) * y)
        for i in range(size):
            for j in range(count):
                g, y = load(dY, at + i * inner + j), load(Y, at + i * inner + j)
                store(
                    dX,
                    at + i * inner + j,
                    g - probability(y) * load(totals, j) if is_log else y * (g - load(totals, j)),
                )
