"""What recurrent operators do to all steps and rows at once, in large products: before the walk and after it.

`sizes` are steps, rows, inputs, hidden size and directions; `width` is that of all gates of a row together.
"""

import numpy as np

from onnxgrad.cpu.core.halves import load, store
from onnxgrad.cpu.core.jit import native
from onnxgrad.cpu.core.matmul.microkernel import ROWS, Matrix, Panels, aligned, multiply, packed_matrix, packed_size
from onnxgrad.cpu.core.matmul.outer import DEPTH, WIDTH, ZERO_ROW, column_sums, from_first, outer_block, pack_left
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.tensor_types import Array

BLOCK_ROWS = 64  # rows of all steps in one task
HEIGHT = 384  # most rows of dW and dR in one task


@native
def _project_rows(
    number: int,
    X: Array,
    packed: Array,
    bias: Array,
    gates: Array,
    direction: int,
    width: int,
    sizes: tuple[int, ...],
    gemm: int,
) -> None:
    steps, batch, inputs, _, directions = sizes
    row, stop = number * BLOCK_ROWS, min(steps * batch, (number + 1) * BLOCK_ROWS)
    while row < stop:
        # Rows of one step lie side by side in the gates; those of the next step too, with one direction or one row.
        taken = stop - row
        if directions > 1 and batch > 1:
            taken = min(taken, batch - row % batch)
        at = ((row // batch * directions + direction) * batch + row % batch) * width
        step = directions * width if batch == 1 else width
        for i in range(taken):
            for j in range(width):
                store(gates, at + i * step + j, bias[j])
        multiply(
            gemm,
            Matrix(X, row * inputs, inputs),
            Panels(packed, aligned(packed), inputs),
            Matrix(gates, at, step),
            (taken, inputs, width),
            True,
        )
        row += taken


@native
def project(
    X: Array,
    W: Array,
    B: Array,
    gates: Array,
    direction: int,
    of: int,
    width: int,
    sizes: tuple[int, ...],
    gemm: int,
    scheduler: int,
) -> None:
    """gates[t, direction, n] = X[t, n] · W[of]ᵀ + both biases of direction `of`, for every step and row."""
    steps, batch, inputs, _, _ = sizes
    bias = np.zeros(width, gates.dtype)
    if B.size > 0:
        for j in range(width):
            bias[j] = load(B, of * 2 * width + j) + load(B, (of * 2 + 1) * width + j)
    packed = packed_matrix(W, of * width * inputs, 1, inputs, inputs, width, scheduler)
    tasks = (steps * batch + BLOCK_ROWS - 1) // BLOCK_ROWS
    parallel(scheduler, tasks, _project_rows, (X, packed, bias, gates, direction, width, sizes, gemm))


@native
def previous_rows(lengths: Array, direction: int, backwards: bool, sizes: tuple[int, ...]) -> Array:
    """For each step and row, where its previous state lies: a row of all states, of the first ones, or nowhere."""
    steps, batch, _, _, directions = sizes
    where = np.empty(steps * batch, np.int64)
    for t in range(steps):
        for n in range(batch):
            before = t + 1 if backwards else t - 1
            if t >= lengths[n]:
                where[t * batch + n] = ZERO_ROW
            elif before < 0 or before >= lengths[n]:
                where[t * batch + n] = from_first(direction * batch + n)
            else:
                where[t * batch + n] = (before * directions + direction) * batch + n
    return where


@native
def _input_gradient_rows(
    number: int, deltas: Array, packed: Array, dX: Array, inputs: int, width: int, add: bool, gemm: int
) -> None:
    start = number * BLOCK_ROWS
    rows = min(BLOCK_ROWS, deltas.size // width - start)
    at = aligned(packed)
    multiply(
        gemm,
        Matrix(deltas, start * width, width),
        Panels(packed, at, width),
        Matrix(dX, start * inputs, inputs),
        (rows, width, inputs),
        add,
    )


@native
def input_gradient(
    deltas: Array, W: Array, dX: Array, direction: int, inputs: int, width: int, gemm: int, scheduler: int
) -> None:
    """dX (+)= δ · W[direction], for every step and row; the first direction writes, the second adds."""
    packed = packed_matrix(W, direction * width * inputs, inputs, 1, width, inputs, scheduler)
    tasks = (deltas.size // width + BLOCK_ROWS - 1) // BLOCK_ROWS
    parallel(scheduler, tasks, _input_gradient_rows, (deltas, packed, dX, inputs, width, direction > 0, gemm))


@native
def _weight_rows(
    number: int,
    deltas: Array,
    X: Array,
    own: Array,
    dW: Array,
    states: Array,
    first: Array,
    previous: Array,
    dR: Array,
    direction: int,
    wanted: tuple[bool, bool],
    widths: tuple[int, int, int],
    share: int,
    gemm: int,
) -> None:
    """Some rows of dW and of dR, which belong to the same columns of δ."""
    inputs, hidden, width = widths
    top = number * share
    height, target = min(share, width - top), direction * width + top
    packed_a = np.empty((height + ROWS - 1) // ROWS * ROWS * DEPTH, deltas.dtype)
    packed_b = np.empty(packed_size(deltas, DEPTH, min(WIDTH, max(inputs, hidden))), deltas.dtype)
    for k in range(0, max(1, own.size), DEPTH):
        here, before = own[k : k + DEPTH], previous[k : k + DEPTH]
        pack_left(deltas, k * width + top, width, here.size, height, packed_a)
        if wanted[0]:
            outer_block(packed_a, height, X, X, here, inputs, packed_b, dW, target * inputs, k > 0, gemm)
        if wanted[1]:
            outer_block(packed_a, height, states, first, before, hidden, packed_b, dR, target * hidden, k > 0, gemm)


@native
def weight_gradients(
    deltas: Array,
    X: Array,
    dW: Array,
    states: Array,
    first: Array,
    previous: Array,
    dR: Array,
    direction: int,
    wanted: tuple[bool, bool],
    widths: tuple[int, int, int],
    threads: int,
    gemm: int,
    scheduler: int,
) -> None:
    """dW = Σ δᵀ · X and dR = Σ δᵀ · states[previous], as far as wanted; `widths` are those of X, the states and δ."""
    own = np.arange(previous.size)
    for i in range(previous.size):
        if previous[i] == ZERO_ROW:  # past a row's length X may hold anything
            own[i] = ZERO_ROW
    width = widths[2]
    share = min(HEIGHT, (width + ROWS - 1) // ROWS * ROWS)
    while share > 3 * ROWS and (width + share - 1) // share < 2 * threads:
        share = (share // 2 + ROWS - 1) // ROWS * ROWS
    arrays = (deltas, X, own, dW, states, first, previous, dR)
    parallel(scheduler, (width + share - 1) // share, _weight_rows, (*arrays, direction, wanted, widths, share, gemm))


@native
def bias_gradient(deltas: Array, width: int, dB: Array, direction: int, scheduler: int) -> None:
    """Both biases have the same gradient: the sum of δ over all steps and rows."""
    start = direction * 2 * width
    column_sums(deltas, width, dB, start, scheduler)
    for j in range(width):
        store(dB, start + width + j, load(dB, start + j))
