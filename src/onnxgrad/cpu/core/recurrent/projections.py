"""GRU, LSTM and RNN over all steps and rows at once, in large products: before the loop over steps and after it.

`width` is that of all gates of a row together, gates times hidden size.
"""

from typing import NamedTuple

import numpy as np

from onnxgrad.cpu.core.halves import load, store
from onnxgrad.cpu.core.jit import int64, native
from onnxgrad.cpu.core.matmul.microkernel import ROWS, Matrix, Panels, aligned, multiply, packed_matrix, packed_size
from onnxgrad.cpu.core.matmul.outer import DEPTH, WIDTH, ZERO_ROW, column_sums, from_first, outer_block, pack_left
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.recurrent.arguments import Direction, Execution, Sizes
from onnxgrad.tensor_types import Array

BLOCK_ROWS = 64  # rows of all steps in one task
HEIGHT = 384  # most rows of dW and dR in one task


@native
def bad_length(lengths: Array, steps: int) -> int:
    """The first row whose length is not 0 to `steps`, or -1."""
    for n in range(lengths.size):
        if lengths[n] < 0 or lengths[n] > steps:
            return int64(n)
    return int64(-1)


@native
def both_biases(B: Array, direction: int, width: int, like: Array) -> Array:
    """The sum of the input's and the state's bias; zeros without B."""
    bias = np.zeros(width, like.dtype)
    if B.size > 0:
        for j in range(width):
            bias[j] = load(B, direction * 2 * width + j) + load(B, (direction * 2 + 1) * width + j)
    return bias


@native
def _project_rows(
    number: int, X: Array, packed: Array, bias: Array, gates: Array, direction: int, sizes: Sizes, gemm: int
) -> None:
    steps, batch, inputs, _, directions = sizes
    width = bias.size
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
    X: Array, W: Array, bias: Array, gates: Array, direction: int, sizes: Sizes, gemm: int, scheduler: int
) -> None:
    """gates[t, direction, n] = X[t, n] · W[direction]ᵀ + bias, for every step and row; `gates` has all directions."""
    packed = packed_matrix(W, direction * bias.size * sizes.inputs, 1, sizes.inputs, sizes.inputs, bias.size, scheduler)
    tasks = (sizes.steps * sizes.batch + BLOCK_ROWS - 1) // BLOCK_ROWS
    parallel(scheduler, tasks, _project_rows, (X, packed, bias, gates, direction, sizes, gemm))


@native
def project_alone(
    X: Array, W: Array, bias: Array, gates: Array, direction: int, sizes: Sizes, gemm: int, scheduler: int
) -> None:
    """The same, where `gates` [S,N,width] has room for this direction alone."""
    start = direction * bias.size * sizes.inputs
    alone = Sizes(sizes.steps, sizes.batch, sizes.inputs, sizes.hidden, int64(1))
    project(X, W[start : start + bias.size * sizes.inputs], bias, gates, int64(0), alone, gemm, scheduler)


@native
def previous_rows(lengths: Array, direction: Direction, sizes: Sizes) -> Array:
    """For each step and row, where its previous state lies: a row of all states, of the first ones, or nowhere."""
    where = np.empty(sizes.steps * sizes.batch, np.int64)
    for t in range(sizes.steps):
        for n in range(sizes.batch):
            before = t + 1 if direction.backwards else t - 1
            if t >= lengths[n]:
                where[t * sizes.batch + n] = ZERO_ROW
            elif before < 0 or before >= lengths[n]:
                where[t * sizes.batch + n] = from_first(direction.number * sizes.batch + n)
            else:
                where[t * sizes.batch + n] = (before * sizes.directions + direction.number) * sizes.batch + n
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


class Factors(NamedTuple):
    """The two sides of the products that weights' gradients are, with a row for each step and row of one direction.

    For a GRU's candidate, dR takes `reset` instead: in place of the states or, with linear_before_reset, of δ.
    """

    deltas: Array
    X: Array
    states: Array
    first: Array
    previous: Array  # as previous_rows gives it
    reset: Array  # empty for LSTM and RNN
    linear_before_reset: int


@native
def _weight_rows(
    number: int,
    factors: Factors,
    own: Array,
    dW: Array,
    dR: Array,
    direction: int,
    width: int,
    group: int,
    chunk: int,
    sizes: Sizes,
    gemm: int,
) -> None:
    """A chunk of rows of dW and dR: both are made of the same δ, which is packed once."""
    deltas, X, states, first, previous, reset, linear_before_reset = factors
    inputs, hidden = sizes.inputs, sizes.hidden
    per_group = (group + chunk - 1) // chunk
    start, top = number // per_group * group, number % per_group * chunk
    height, row = min(chunk, group - top), start + top
    target, resets = direction * width + row, start + group == width and reset.size > 0
    packed_a = np.empty((height + ROWS - 1) // ROWS * ROWS * DEPTH, deltas.dtype)
    packed_b = np.empty(packed_size(deltas, DEPTH, min(WIDTH, max(inputs, hidden))), deltas.dtype)
    for k in range(0, max(1, own.size), DEPTH):
        here, before = own[k : k + DEPTH], previous[k : k + DEPTH]
        pack_left(deltas, k * width + row, width, here.size, height, packed_a)
        if dW.size > 0:
            outer_block(packed_a, height, X, X, here, inputs, packed_b, dW, target * inputs, k > 0, gemm)
        if dR.size > 0:
            if resets and not linear_before_reset:
                outer_block(packed_a, height, reset, X, here, hidden, packed_b, dR, target * hidden, k > 0, gemm)
                continue
            if resets:
                pack_left(reset, k * hidden + top, hidden, here.size, height, packed_a)
            outer_block(packed_a, height, states, first, before, hidden, packed_b, dR, target * hidden, k > 0, gemm)


@native
def _even_chunk(total: int, count: int) -> int:
    """The size of `count` chunks of `total` rows, in whole tiles."""
    chunk = (total + count - 1) // count
    return (chunk + ROWS - 1) // ROWS * ROWS


@native
def weight_gradients(
    factors: Factors,
    dW: Array,
    dR: Array,
    direction: int,
    width: int,
    sizes: Sizes,
    execution: Execution,
    scheduler: int,
) -> None:
    """dW = Σ δᵀ · X and dR = Σ δᵀ · states[previous], each unless it is empty."""
    previous = factors.previous
    own = np.arange(previous.size)
    for i in range(previous.size):
        if previous[i] == ZERO_ROW:  # past a row's length X may hold anything
            own[i] = ZERO_ROW
    # Chunks are large, since each packs X and the states anew. A GRU's end where a gate does: its last takes `reset`.
    group = sizes.hidden if factors.reset.size > 0 else width
    chunk = _even_chunk(group, (group + HEIGHT - 1) // HEIGHT)
    while chunk > 3 * ROWS and (group + chunk - 1) // chunk * (width // group) < 2 * execution.threads:
        chunk = _even_chunk(chunk, 2)
    work = (factors, own, dW, dR, direction, width, group, chunk, sizes, execution.gemm)
    parallel(scheduler, (group + chunk - 1) // chunk * (width // group), _weight_rows, work)


@native
def bias_gradient(deltas: Array, width: int, dB: Array, direction: int, scheduler: int) -> None:
    """Both biases have the same gradient: the sum of δ over all steps and rows."""
    start = direction * 2 * width
    column_sums(deltas, width, dB, start, scheduler)
    for j in range(width):
        store(dB, start + width + j, load(dB, start + j))
