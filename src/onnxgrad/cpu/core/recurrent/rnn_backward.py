"""RNNGrad in native code: blocks of rows walk back through time, then large products make the weights' gradients."""

import numpy as np

from onnxgrad.cpu.core.halves import load, store, zero
from onnxgrad.cpu.core.jit import int64, native
from onnxgrad.cpu.core.matmul.microkernel import Matrix, Panels, aligned, multiply, packed_matrix
from onnxgrad.cpu.core.matmul.outer import gather_row
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.recurrent.activations import times_derivative
from onnxgrad.cpu.core.recurrent.gru_forward import bad_length
from onnxgrad.cpu.core.recurrent.projections import (
    bias_gradient,
    input_gradient,
    previous_rows,
    project,
    weight_gradients,
)
from onnxgrad.tensor_types import Array


@native
def _walk_back(
    number: int,
    states: Array,
    first: Array,
    d_states: Array,
    d_final: Array,
    lengths: Array,
    previous: Array,
    deltas: Array,
    d_first: Array,
    packed: tuple[Array, Array],
    codes: Array,
    parameters: Array,
    settings: tuple[float, int, int],
    sizes: tuple[int, ...],
    block: int,
    gemm: int,
) -> None:
    """A block of rows from the last step to the first."""
    steps, batch, _, hidden, directions = sizes
    clip, backwards, direction = settings
    back, ahead = packed
    start, origin = number * block, int64(0)
    rows = min(block, batch - start)
    size, own = rows * hidden, (direction * batch + start) * hidden
    G, before = np.zeros(size, deltas.dtype), np.empty(size, deltas.dtype)
    within = np.ones(size, deltas.dtype)
    if d_final.size > 0:
        for i in range(size):
            G[i] = load(d_final, own + i)
    for s in range(steps):
        t = s if backwards else steps - 1 - s
        state_row, row = (t * directions + direction) * batch + start, t * batch + start
        if clip > 0:
            # deltas holds X · Wᵀ + bias; with the state's part it is what `clip` was applied to.
            for i in range(rows):
                gather_row(states, first, previous[row + i], hidden, origin, hidden, before, i * hidden)
            at = aligned(ahead)
            multiply(
                gemm,
                Matrix(before, 0, hidden),
                Panels(ahead, at, hidden),
                Matrix(deltas, row * hidden, hidden),
                (rows, hidden, hidden),
                True,
            )
            for i in range(size):
                within[i] = abs(load(deltas, row * hidden + i)) <= clip
        for i in range(rows):
            δ, state, at = (row + i) * hidden, (state_row + i) * hidden, i * hidden
            if t >= lengths[start + i]:
                zero(deltas, δ, δ + hidden)
                continue
            for j in range(hidden):
                through = load(G, at + j)
                if d_states.size > 0:
                    through += load(d_states, state + j)
                store(deltas, δ + j, through)
            times_derivative(
                codes[direction], parameters[direction, 0], parameters[direction, 1], states, state, deltas, δ, hidden
            )
            if clip > 0:
                for j in range(hidden):
                    store(deltas, δ + j, load(deltas, δ + j) * load(within, at + j))
        at = aligned(back)
        multiply(
            gemm,
            Matrix(deltas, row * hidden, hidden),
            Panels(back, at, hidden),
            Matrix(before, origin, hidden),
            (rows, hidden, hidden),
            False,
        )
        for i in range(rows):
            if t < lengths[start + i]:
                for j in range(i * hidden, (i + 1) * hidden):
                    store(G, j, load(before, j))
    if d_first.size > 0:
        for i in range(size):
            store(d_first, own + i, G[i])


@native
def rnn_backward(
    X: Array,
    W: Array,
    R: Array,
    B: Array,
    lengths: Array,
    first: Array,
    states: Array,
    d_states: Array,
    d_final: Array,
    dX: Array,
    dW: Array,
    dR: Array,
    dB: Array,
    dH0: Array,
    deltas: Array,
    wanted: tuple[bool, ...],
    codes: Array,
    parameters: Array,
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
    if hidden == 0:
        zero(dX, 0, dX.size)
        return int64(-1)
    for d in range(directions):
        previous = previous_rows(lengths, d, backwards[d], sizes)
        ahead = np.empty(0, X.dtype)
        if clip > 0:
            ahead = packed_matrix(R, d * hidden * hidden, 1, hidden, hidden, hidden, scheduler)
            alone = (steps, batch, inputs, hidden, int64(1))
            project(X, W, B, deltas, int64(0), d, hidden, alone, gemm, scheduler)
        back = packed_matrix(R, d * hidden * hidden, hidden, 1, hidden, hidden, scheduler)
        given = (states, first, d_states, d_final, lengths, previous, deltas, dH0, (back, ahead), codes, parameters)
        settings = (clip, backwards[d], d)
        parallel(scheduler, (batch + block - 1) // block, _walk_back, (*given, settings, sizes, block, gemm))
        if wanted[0]:
            input_gradient(deltas, W, dX, d, inputs, hidden, gemm, scheduler)
        if wanted[1] or wanted[2]:
            weight_gradients(
                deltas, X, dW, states, first, previous, dR, d, (wanted[1], wanted[2]), (inputs, hidden, hidden),
                threads, gemm, scheduler,
            )  # fmt: skip
        if wanted[3]:
            bias_gradient(deltas, hidden, dB, d, scheduler)
    return int64(-1)
