"""GRUGrad in native code: blocks of rows walk back through time, then large products make the weights' gradients.

Two buffers hold what the products need, for all steps and rows of one direction: `deltas`, the gradients δz, δr, δh
before the activations, and `aside`, which is δh∘r or r∘Hp (linear_before_reset 1 or 0). Together they take 4/3 of
ZRH's memory.
"""

import numpy as np

from onnxgrad.cpu.core.halves import load, store, zero
from onnxgrad.cpu.core.jit import int64, native
from onnxgrad.cpu.core.matmul.microkernel import Matrix, Panels, aligned, multiply, packed_matrix
from onnxgrad.cpu.core.matmul.outer import ZERO_ROW, column_sums, gather_row
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.recurrent.activations import times_derivative
from onnxgrad.cpu.core.recurrent.gru_forward import bad_length, input_bias, pack_transposed, project
from onnxgrad.cpu.core.recurrent.gru_weights import weight_gradients
from onnxgrad.cpu.core.recurrent.projections import previous_rows
from onnxgrad.tensor_types import Array

BLOCK_ROWS = 64  # rows of all steps in one task of a large product


@native
def _pack_straight(weights: Array, start: int, depth: int, columns: int, scheduler: int) -> Array:
    """weights[k, column] from `start` on, packed."""
    return packed_matrix(weights, start, columns, 1, depth, columns, scheduler)


@native
def _recurrent_rows(
    number: int,
    states: Array,
    first: Array,
    previous: Array,
    packed: Array,
    B: Array,
    bias: int,
    aside: Array,
    hidden: int,
    gemm: int,
) -> None:
    start, stop = number * BLOCK_ROWS, min(previous.size, (number + 1) * BLOCK_ROWS)
    before, origin = np.empty((stop - start) * hidden, aside.dtype), int64(0)
    for i in range(stop - start):
        gather_row(states, first, previous[start + i], hidden, origin, hidden, before, i * hidden)
        for j in range(hidden):
            store(aside, (start + i) * hidden + j, load(B, bias + j) if B.size > 0 else 0)
    at = aligned(packed)
    multiply(
        gemm,
        Matrix(before, 0, hidden),
        Panels(packed, at, hidden),
        Matrix(aside, start * hidden, hidden),
        (stop - start, hidden, hidden),
        True,
    )


@native
def _mask(deltas: Array, at: int, count: int, clip: float, within: Array) -> None:
    """within[i] = 1 where the input of a gate was not cut off, else 0."""
    for i in range(count):
        within[i] = abs(load(deltas, at + i)) <= clip


@native
def _walk_back(
    number: int,
    states: Array,
    first: Array,
    gates: Array,
    d_states: Array,
    d_final: Array,
    lengths: Array,
    previous: Array,
    deltas: Array,
    aside: Array,
    d_first: Array,
    packed: tuple[Array, Array, Array, Array],
    codes: Array,
    parameters: Array,
    settings: tuple[int, float, int, int, bool],
    sizes: tuple[int, ...],
    block: int,
    gemm: int,
) -> None:
    """A block of rows from the last step to the first."""
    steps, batch, _, hidden, directions = sizes
    linear_before_reset, clip, backwards, direction, wants_first = settings
    back_zr, back_h, ahead_zr, ahead_h = packed
    start = number * block
    rows = min(block, batch - start)
    size, f, g = rows * hidden, 2 * direction, 2 * direction + 1
    origin = int64(0)
    one = gates.dtype.type(1)
    G, before = np.zeros(size, gates.dtype), np.empty(size, gates.dtype)
    product, within = np.empty(size, gates.dtype), np.ones(rows * 3 * hidden, gates.dtype)
    if d_final.size > 0:
        for i in range(size):
            G[i] = load(d_final, (direction * batch + start) * hidden + i)
    for s in range(steps):
        t = s if backwards else steps - 1 - s
        gate_row, row = (t * directions + direction) * batch + start, t * batch + start
        delta, side = row * 3 * hidden, row * hidden
        for i in range(rows):
            gather_row(states, first, previous[row + i], hidden, origin, hidden, before, i * hidden)
        if clip > 0:
            # deltas holds X · Wᵀ + bias; with the state's part it is what `clip` was applied to.
            width = 3 * hidden
            multiply(
                gemm,
                Matrix(before, 0, hidden),
                Panels(ahead_zr, aligned(ahead_zr), hidden),
                Matrix(deltas, delta, width),
                (rows, hidden, 2 * hidden),
                True,
            )
            for i in range(rows):
                r = (gate_row + i) * width + hidden
                for j in range(hidden):
                    state = before[i * hidden + j]
                    if linear_before_reset:
                        at = delta + i * width + 2 * hidden + j
                        store(deltas, at, load(deltas, at) + load(gates, r + j) * load(aside, side + i * hidden + j))
                    else:
                        product[i * hidden + j] = load(gates, r + j) * state
            if not linear_before_reset:
                multiply(
                    gemm,
                    Matrix(product, 0, hidden),
                    Panels(ahead_h, aligned(ahead_h), hidden),
                    Matrix(deltas, delta + 2 * hidden, width),
                    (rows, hidden, hidden),
                    True,
                )
            _mask(deltas, delta, rows * width, clip, within)
        for i in range(rows):
            z, own = (gate_row + i) * 3 * hidden, i * hidden
            r, h = z + hidden, z + 2 * hidden
            δz, δr, δh = delta + i * 3 * hidden, delta + (i * 3 + 1) * hidden, delta + (i * 3 + 2) * hidden
            if t >= lengths[start + i]:
                zero(deltas, δz, δz + 3 * hidden)
                zero(aside, side + own, side + own + hidden)
                continue
            if d_states.size > 0:
                for j in range(hidden):
                    G[own + j] += load(d_states, (gate_row + i) * hidden + j)
            for j in range(hidden):
                through, kept = load(G, own + j), load(gates, z + j)
                store(deltas, δz + j, through * (load(before, own + j) - load(gates, h + j)))
                store(deltas, δh + j, through * (one - kept))
                store(G, own + j, through * kept)
            times_derivative(codes[f], parameters[f, 0], parameters[f, 1], gates, z, deltas, δz, hidden)
            times_derivative(codes[g], parameters[g, 0], parameters[g, 1], gates, h, deltas, δh, hidden)
            if clip > 0:
                for j in range(hidden):
                    store(deltas, δz + j, load(deltas, δz + j) * load(within, i * 3 * hidden + j))
                    store(deltas, δh + j, load(deltas, δh + j) * load(within, i * 3 * hidden + 2 * hidden + j))
        if not linear_before_reset:
            multiply(
                gemm,
                Matrix(deltas, delta + 2 * hidden, 3 * hidden),
                Panels(back_h, aligned(back_h), hidden),
                Matrix(product, 0, hidden),
                (rows, hidden, hidden),
                False,
            )
        for i in range(rows):
            if t >= lengths[start + i]:
                continue
            r, own = (gate_row + i) * 3 * hidden + hidden, i * hidden
            δr, δh = delta + (i * 3 + 1) * hidden, delta + (i * 3 + 2) * hidden
            if linear_before_reset:
                for j in range(hidden):
                    flow = load(deltas, δh + j)
                    store(deltas, δr + j, flow * load(aside, side + own + j))
                    store(aside, side + own + j, flow * load(gates, r + j))
            else:
                for j in range(hidden):
                    flow, reset, state = load(product, own + j), load(gates, r + j), load(before, own + j)
                    store(deltas, δr + j, flow * state)
                    store(aside, side + own + j, reset * state)
                    store(G, own + j, load(G, own + j) + flow * reset)
            times_derivative(codes[f], parameters[f, 0], parameters[f, 1], gates, r, deltas, δr, hidden)
            if clip > 0:
                for j in range(hidden):
                    store(deltas, δr + j, load(deltas, δr + j) * load(within, i * 3 * hidden + hidden + j))
        at, depth = aligned(back_zr), 2 * hidden
        multiply(
            gemm,
            Matrix(deltas, delta, 3 * hidden),
            Panels(back_zr, at, depth),
            Matrix(product, origin, hidden),
            (rows, depth, hidden),
            False,
        )
        if linear_before_reset:
            multiply(
                gemm,
                Matrix(aside, side, hidden),
                Panels(back_h, aligned(back_h), hidden),
                Matrix(product, 0, hidden),
                (rows, hidden, hidden),
                True,
            )
        for i in range(rows):
            if t < lengths[start + i]:
                for j in range(i * hidden, (i + 1) * hidden):
                    store(G, j, load(G, j) + load(product, j))
    if wants_first:
        for i in range(size):
            store(d_first, (direction * batch + start) * hidden + i, G[i])


@native
def _input_gradient_rows(
    number: int, deltas: Array, packed: Array, dX: Array, inputs: int, hidden: int, add: bool, gemm: int
) -> None:
    start, depth = number * BLOCK_ROWS, 3 * hidden
    rows = min(BLOCK_ROWS, deltas.size // max(1, depth) - start)
    at = aligned(packed)
    multiply(
        gemm,
        Matrix(deltas, start * depth, depth),
        Panels(packed, at, depth),
        Matrix(dX, start * inputs, inputs),
        (rows, depth, inputs),
        add,
    )


@native
def gru_backward(
    X: Array,
    W: Array,
    R: Array,
    B: Array,
    lengths: Array,
    first: Array,
    states: Array,
    gates: Array,
    d_states: Array,
    d_final: Array,
    dX: Array,
    dW: Array,
    dR: Array,
    dB: Array,
    dH0: Array,
    deltas: Array,
    aside: Array,
    wanted: tuple[bool, bool, bool, bool, bool],
    codes: Array,
    parameters: Array,
    linear_before_reset: int,
    clip: float,
    backwards: Array,
    sizes: tuple[int, ...],
    block: int,
    threads: int,
    gemm: int,
    scheduler: int,
) -> int:
    """Everything one-dimensional, in float32 or float64; what is absent or not wanted is an empty array.

    Returns -1, or the first row whose length is no number of steps; then nothing is written.
    """
    steps, batch, inputs, hidden, directions = sizes
    bad = bad_length(lengths, steps)
    if bad >= 0:
        return bad
    rows = steps * batch
    nothing = np.empty(0, X.dtype)
    origin = int64(0)  # a literal 0 would be a type of its own, and every callee compiled once more for it
    tasks = (rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    if wanted[0] and hidden == 0:
        zero(dX, 0, dX.size)
    for d in range(directions):
        previous = previous_rows(lengths, d, backwards[d], sizes)
        base = d * 3 * hidden * hidden
        ahead_zr, ahead_h = nothing, nothing
        if linear_before_reset or clip > 0:
            ahead_h = pack_transposed(R, base + 2 * hidden * hidden, hidden, hidden, scheduler)
        if linear_before_reset:
            arrays = (states, first, previous, ahead_h, B)
            parallel(scheduler, tasks, _recurrent_rows, (*arrays, (d * 6 + 5) * hidden, aside, hidden, gemm))
        if clip > 0:
            ahead_zr = pack_transposed(R, base, hidden, 2 * hidden, scheduler)
            bias = input_bias(B, d, hidden, linear_before_reset, deltas)
            project(X, W, bias, deltas, origin, d, (steps, batch, inputs, hidden, int64(1)), gemm, scheduler)
        back_zr = _pack_straight(R, base, 2 * hidden, hidden, scheduler)
        back_h = _pack_straight(R, base + 2 * hidden * hidden, hidden, hidden, scheduler)
        packed = (back_zr, back_h, ahead_zr, ahead_h)
        settings = (linear_before_reset, clip, backwards[d], d, wanted[4])
        given = (states, first, gates, d_states, d_final, lengths, previous)
        work = (*given, deltas, aside, dH0, packed, codes, parameters, settings, sizes, block, gemm)
        parallel(scheduler, (batch + block - 1) // block, _walk_back, work)
        if wanted[0] and hidden > 0:
            packed_w = _pack_straight(W, d * 3 * hidden * inputs, 3 * hidden, inputs, scheduler)
            parallel(scheduler, tasks, _input_gradient_rows, (deltas, packed_w, dX, inputs, hidden, d > 0, gemm))
        if (wanted[1] or wanted[2]) and hidden > 0:
            own = np.arange(rows)
            for t in range(steps):
                for n in range(batch):
                    if t >= lengths[n]:
                        own[t * batch + n] = ZERO_ROW
            weight_gradients(
                deltas,
                aside,
                X,
                own,
                dW,
                states,
                first,
                previous,
                dR,
                d,
                linear_before_reset,
                (wanted[1], wanted[2]),
                (inputs, hidden),
                threads,
                gemm,
                scheduler,
            )
        if wanted[3]:
            start = d * 6 * hidden
            column_sums(deltas, 3 * hidden, dB, start, scheduler)
            for j in range(3 * hidden):
                store(dB, start + 3 * hidden + j, load(dB, start + j))
            if linear_before_reset:
                column_sums(aside, hidden, dB, start + 5 * hidden, scheduler)
    return int64(-1)
