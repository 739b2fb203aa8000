"""GRUGrad in native code: blocks of rows take the steps backwards, then large products make the weights' gradients.

Two buffers hold the factors of these products, for all steps and rows of one direction: `deltas`, the gradients δz, δr,
δh before the activations, and `reset`, which is δh∘r or r∘Hp (linear_before_reset 1 or 0). Together they take 4/3 of
ZRH's memory.
"""

import numpy as np

from onnxgrad.cpu.core.halves import load, store, zero
from onnxgrad.cpu.core.jit import int64, native
from onnxgrad.cpu.core.matmul.microkernel import Matrix, Panels, aligned, multiply, packed_matrix
from onnxgrad.cpu.core.matmul.outer import column_sums, gather_row
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.recurrent.activations import Activations, activation_of, scale, times_derivative, within_clip
from onnxgrad.cpu.core.recurrent.arguments import Direction, Execution, Sizes
from onnxgrad.cpu.core.recurrent.gru_forward import input_bias
from onnxgrad.cpu.core.recurrent.projections import (
    BLOCK_ROWS,
    Factors,
    bad_length,
    bias_gradient,
    input_gradient,
    previous_rows,
    project_alone,
    weight_gradients,
)
from onnxgrad.tensor_types import Array


@native
def _recurrent_rows(
    number: int,
    states: Array,
    first: Array,
    previous: Array,
    packed: Array,
    B: Array,
    bias: int,
    reset: Array,
    hidden: int,
    gemm: int,
) -> None:
    """reset = Hp · Rhᵀ + Rbh, for some steps and rows."""
    start, stop = number * BLOCK_ROWS, min(previous.size, (number + 1) * BLOCK_ROWS)
    before, origin = np.empty((stop - start) * hidden, reset.dtype), int64(0)
    for i in range(stop - start):
        gather_row(states, first, previous[start + i], hidden, origin, hidden, before, i * hidden)
        for j in range(hidden):
            store(reset, (start + i) * hidden + j, load(B, bias + j) if B.size > 0 else 0)
    at = aligned(packed)
    multiply(
        gemm,
        Matrix(before, 0, hidden),
        Panels(packed, at, hidden),
        Matrix(reset, start * hidden, hidden),
        (stop - start, hidden, hidden),
        True,
    )


@native
def _backward_steps(
    number: int,
    given: tuple[Array, ...],
    lengths: Array,
    previous: Array,
    deltas: Array,
    reset: Array,
    d_first: Array,
    packed: tuple[Array, Array, Array, Array],
    activations: Activations,
    linear_before_reset: int,
    order: Direction,
    sizes: Sizes,
    execution: Execution,
) -> None:
    """A block of rows from the last step to the first."""
    first, states, gates, d_states, d_final = given
    steps, batch, _, hidden, directions = sizes
    direction, backwards = order
    block, _, gemm = execution
    back_zr, back_h, ahead_zr, ahead_h = packed
    clip = activations.clip
    start = number * block
    rows = min(block, batch - start)
    size, width = rows * hidden, 3 * hidden
    f, g = activation_of(activations, 2 * direction), activation_of(activations, 2 * direction + 1)
    origin = int64(0)
    one = gates.dtype.type(1)
    G, before = np.zeros(size, gates.dtype), np.empty(size, gates.dtype)
    product, within = np.empty(size, gates.dtype), np.ones(rows * width, gates.dtype)
    if d_final.size > 0:
        for i in range(size):
            G[i] = load(d_final, (direction * batch + start) * hidden + i)
    for s in range(steps):
        t = s if backwards else steps - 1 - s
        gate_row, row = (t * directions + direction) * batch + start, t * batch + start
        delta, side = row * width, row * hidden
        for i in range(rows):
            gather_row(states, first, previous[row + i], hidden, origin, hidden, before, i * hidden)
        if clip > 0:
            # deltas holds X · Wᵀ + bias; plus the state's product it is the gates' unclipped input.
            at, columns = aligned(ahead_zr), 2 * hidden
            multiply(
                gemm,
                Matrix(before, 0, hidden),
                Panels(ahead_zr, at, hidden),
                Matrix(deltas, delta, width),
                (rows, hidden, columns),
                True,
            )
            for i in range(rows):
                r = (gate_row + i) * width + hidden
                for j in range(hidden):
                    state = before[i * hidden + j]
                    if linear_before_reset:
                        at = delta + i * width + 2 * hidden + j
                        store(deltas, at, load(deltas, at) + load(gates, r + j) * load(reset, side + i * hidden + j))
                    else:
                        product[i * hidden + j] = load(gates, r + j) * state
            if not linear_before_reset:
                at, h = aligned(ahead_h), delta + 2 * hidden
                multiply(
                    gemm,
                    Matrix(product, 0, hidden),
                    Panels(ahead_h, at, hidden),
                    Matrix(deltas, h, width),
                    (rows, hidden, hidden),
                    True,
                )
            within_clip(deltas, delta, rows * width, clip, within)
        for i in range(rows):
            z, own = (gate_row + i) * width, i * hidden
            h, δz = z + 2 * hidden, delta + i * width
            δh = δz + 2 * hidden
            if t >= lengths[start + i]:
                zero(deltas, δz, δz + width)
                zero(reset, side + own, side + own + hidden)
                continue
            if d_states.size > 0:
                for j in range(hidden):
                    G[own + j] += load(d_states, (gate_row + i) * hidden + j)
            for j in range(hidden):
                through, kept = load(G, own + j), load(gates, z + j)
                store(deltas, δz + j, through * (load(before, own + j) - load(gates, h + j)))
                store(deltas, δh + j, through * (one - kept))
                store(G, own + j, through * kept)
            times_derivative(f, gates, z, deltas, δz, hidden)
            times_derivative(g, gates, h, deltas, δh, hidden)
            if clip > 0:
                scale(deltas, δz, within, i * width, hidden)
                scale(deltas, δh, within, i * width + 2 * hidden, hidden)
        if not linear_before_reset:
            at, h = aligned(back_h), delta + 2 * hidden
            multiply(
                gemm,
                Matrix(deltas, h, width),
                Panels(back_h, at, hidden),
                Matrix(product, 0, hidden),
                (rows, hidden, hidden),
                False,
            )
        for i in range(rows):
            if t >= lengths[start + i]:
                continue
            r, own = (gate_row + i) * width + hidden, i * hidden
            δr = delta + i * width + hidden
            δh = δr + hidden
            if linear_before_reset:
                for j in range(hidden):
                    flow = load(deltas, δh + j)
                    store(deltas, δr + j, flow * load(reset, side + own + j))
                    store(reset, side + own + j, flow * load(gates, r + j))
            else:
                for j in range(hidden):
                    flow, gate, state = load(product, own + j), load(gates, r + j), load(before, own + j)
                    store(deltas, δr + j, flow * state)
                    store(reset, side + own + j, gate * state)
                    store(G, own + j, load(G, own + j) + flow * gate)
            times_derivative(f, gates, r, deltas, δr, hidden)
            if clip > 0:
                scale(deltas, δr, within, i * width + hidden, hidden)
        at, depth = aligned(back_zr), 2 * hidden
        multiply(
            gemm,
            Matrix(deltas, delta, width),
            Panels(back_zr, at, depth),
            Matrix(product, origin, hidden),
            (rows, depth, hidden),
            False,
        )
        if linear_before_reset:
            at = aligned(back_h)
            multiply(
                gemm,
                Matrix(reset, side, hidden),
                Panels(back_h, at, hidden),
                Matrix(product, 0, hidden),
                (rows, hidden, hidden),
                True,
            )
        for i in range(rows):
            if t < lengths[start + i]:
                for j in range(i * hidden, (i + 1) * hidden):
                    store(G, j, load(G, j) + load(product, j))
    if d_first.size > 0:
        for i in range(size):
            store(d_first, (direction * batch + start) * hidden + i, G[i])


@native
def gru_backward(
    X: Array,
    weights: tuple[Array, ...],
    lengths: Array,
    given: tuple[Array, ...],
    gradients: tuple[Array, ...],
    deltas: Array,
    reset: Array,
    activations: Activations,
    linear_before_reset: int,
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
    first, states, _, _, _ = given
    dX, dW, dR, dB, dH0 = gradients
    hidden, clip, gemm = sizes.hidden, activations.clip, execution.gemm
    bad = bad_length(lengths, sizes.steps)
    if bad >= 0:
        return bad
    if hidden == 0:
        zero(dX, 0, dX.size)
        return int64(-1)
    width, nothing = 3 * hidden, np.empty(0, X.dtype)
    for d in range(sizes.directions):
        order = Direction(d, backwards[d])
        previous = previous_rows(lengths, order, sizes)
        base, base_h = d * width * hidden, (d * width + 2 * hidden) * hidden
        ahead_zr, ahead_h = nothing, nothing
        if linear_before_reset or clip > 0:
            ahead_h = packed_matrix(R, base_h, 1, hidden, hidden, hidden, scheduler)
        if linear_before_reset:
            work = (states, first, previous, ahead_h, B, (d * 6 + 5) * hidden, reset, hidden, gemm)
            parallel(scheduler, (previous.size + BLOCK_ROWS - 1) // BLOCK_ROWS, _recurrent_rows, work)
        if clip > 0:
            ahead_zr = packed_matrix(R, base, 1, hidden, hidden, 2 * hidden, scheduler)
            bias = input_bias(B, d, hidden, linear_before_reset, deltas)
            project_alone(X, W, bias, deltas, d, sizes, gemm, scheduler)
        back_zr = packed_matrix(R, base, hidden, 1, 2 * hidden, hidden, scheduler)
        back_h = packed_matrix(R, base_h, hidden, 1, hidden, hidden, scheduler)
        arrays = (given, lengths, previous, deltas, reset, dH0, (back_zr, back_h, ahead_zr, ahead_h))
        tasks = (sizes.batch + execution.block - 1) // execution.block
        steps = (*arrays, activations, linear_before_reset, order, sizes, execution)
        parallel(scheduler, tasks, _backward_steps, steps)
        if dX.size > 0:
            input_gradient(deltas, W, dX, d, sizes.inputs, width, gemm, scheduler)
        if dW.size > 0 or dR.size > 0:
            factors = Factors(deltas, X, states, first, previous, reset, linear_before_reset)
            weight_gradients(factors, dW, dR, d, width, sizes, execution, scheduler)
        if dB.size > 0:
            bias_gradient(deltas, width, dB, d, scheduler)
            if linear_before_reset:
                column_sums(reset, hidden, dB, (d * 6 + 5) * hidden, scheduler)
    return int64(-1)
