"""RNNGrad in native code: blocks of rows take the steps backwards, then large products make the weights' gradients."""

import numpy as np

from onnxgrad.cpu.core.halves import load, store, zero
from onnxgrad.cpu.core.jit import int64, native
from onnxgrad.cpu.core.matmul.microkernel import Matrix, Panels, aligned, multiply, packed_matrix
from onnxgrad.cpu.core.matmul.outer import gather_row
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.recurrent.activations import Activations, activation_of, scale, times_derivative, within_clip
from onnxgrad.cpu.core.recurrent.arguments import Direction, Execution, Sizes
from onnxgrad.cpu.core.recurrent.projections import (
    Factors,
    bad_length,
    bias_gradient,
    both_biases,
    input_gradient,
    previous_rows,
    project_alone,
    weight_gradients,
)
from onnxgrad.tensor_types import Array


@native
def _backward_steps(
    number: int,
    given: tuple[Array, ...],
    lengths: Array,
    previous: Array,
    deltas: Array,
    d_first: Array,
    packed: tuple[Array, Array],
    activations: Activations,
    order: Direction,
    sizes: Sizes,
    execution: Execution,
) -> None:
    """A block of rows from the last step to the first."""
    first, states, d_states, d_final = given
    steps, batch, _, hidden, directions = sizes
    direction, backwards = order
    block, _, gemm = execution
    back, ahead = packed
    f, clip = activation_of(activations, direction), activations.clip
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
            # deltas holds X · Wᵀ + bias; plus the state's product it is the gates' unclipped input.
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
            within_clip(deltas, row * hidden, size, clip, within)
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
            times_derivative(f, states, state, deltas, δ, hidden)
            if clip > 0:
                scale(deltas, δ, within, at, hidden)
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
    weights: tuple[Array, ...],
    lengths: Array,
    given: tuple[Array, ...],
    gradients: tuple[Array, ...],
    deltas: Array,
    activations: Activations,
    backwards: Array,
    sizes: Sizes,
    execution: Execution,
    scheduler: int,
) -> int:
    """Everything one-dimensional, in float32 or float64; absent inputs and unwanted gradients are empty arrays.

    Returns -1, or the first row whose length is not 0 to the number of steps; then nothing is written.
    """
    sizes, execution, activations = Sizes(*sizes), Execution(*execution), Activations(*activations)
    W, R, B = weights
    first, states, _, _ = given
    dX, dW, dR, dB, dH0 = gradients
    hidden, clip, gemm = sizes.hidden, activations.clip, execution.gemm
    bad = bad_length(lengths, sizes.steps)
    if bad >= 0:
        return bad
    if hidden == 0:
        zero(dX, 0, dX.size)
        return int64(-1)
    nothing = np.empty(0, X.dtype)
    for d in range(sizes.directions):
        order = Direction(d, backwards[d])
        previous = previous_rows(lengths, order, sizes)
        ahead = nothing
        if clip > 0:
            ahead = packed_matrix(R, d * hidden * hidden, 1, hidden, hidden, hidden, scheduler)
            project_alone(X, W, both_biases(B, d, hidden, deltas), deltas, d, sizes, gemm, scheduler)
        back = packed_matrix(R, d * hidden * hidden, hidden, 1, hidden, hidden, scheduler)
        arrays = (given, lengths, previous, deltas, dH0, (back, ahead))
        tasks = (sizes.batch + execution.block - 1) // execution.block
        parallel(scheduler, tasks, _backward_steps, (*arrays, activations, order, sizes, execution))
        if dX.size > 0:
            input_gradient(deltas, W, dX, d, sizes.inputs, hidden, gemm, scheduler)
        if dW.size > 0 or dR.size > 0:
            factors = Factors(deltas, X, states, first, previous, nothing, int64(0))
            weight_gradients(factors, dW, dR, d, hidden, sizes, execution, scheduler)
        if dB.size > 0:
            bias_gradient(deltas, hidden, dB, d, scheduler)
    return int64(-1)
