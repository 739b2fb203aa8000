"""LSTMGrad in native code: blocks of rows take the steps backwards, then large products make the weights' gradients.

`deltas` holds the gradients δi, δo, δf, δc before the activations, for all steps and rows of one direction.
"""

import numpy as np

from onnxgrad.cpu.core.halves import load, store, zero
from onnxgrad.cpu.core.jit import int64, native
from onnxgrad.cpu.core.matmul.microkernel import Matrix, Panels, aligned, multiply, packed_matrix
from onnxgrad.cpu.core.matmul.outer import DEPTH, ZERO_ROW, gather_row
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.recurrent.activations import (
    Activations,
    activate,
    activation_of,
    scale,
    times_derivative,
    within_clip,
)
from onnxgrad.cpu.core.recurrent.arguments import Direction, Execution, Sizes
from onnxgrad.cpu.core.recurrent.lstm_forward import add_peephole
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

SUMMED_COLUMNS = 64


@native
def _backward_steps(
    number: int,
    given: tuple[Array, ...],
    P: Array,
    lengths: Array,
    previous: Array,
    deltas: Array,
    d_first: Array,
    d_first_cell: Array,
    packed: tuple[Array, Array],
    activations: Activations,
    input_forget: int,
    order: Direction,
    sizes: Sizes,
    execution: Execution,
) -> None:
    """A block of rows from the last step to the first."""
    first, first_cell, states, cells, gates, d_states, d_final, d_final_cell = given
    steps, batch, _, hidden, directions = sizes
    direction, backwards = order
    block, _, gemm = execution
    back, ahead = packed
    clip = activations.clip
    start = number * block
    rows = min(block, batch - start)
    size, width, origin = rows * hidden, 4 * hidden, int64(0)
    f, g = activation_of(activations, 3 * direction), activation_of(activations, 3 * direction + 1)
    h = activation_of(activations, 3 * direction + 2)
    Pi, Po, Pf = direction * 3 * hidden, (direction * 3 + 1) * hidden, (direction * 3 + 2) * hidden
    peeping, own = P.size > 0, (direction * batch + start) * hidden
    G, Gc = np.zeros(size, gates.dtype), np.zeros(size, gates.dtype)
    before, old = np.empty(size, gates.dtype), np.empty(size, gates.dtype)
    shown, flow = np.empty(hidden, gates.dtype), np.empty(hidden, gates.dtype)
    within = np.ones(rows * width, gates.dtype)
    for i in range(size):
        if d_final.size > 0:
            G[i] = load(d_final, own + i)
        if d_final_cell.size > 0:
            Gc[i] = load(d_final_cell, own + i)
    for s in range(steps):
        t = s if backwards else steps - 1 - s
        gate_row, row = (t * directions + direction) * batch + start, t * batch + start
        for i in range(rows):
            gather_row(cells, first_cell, previous[row + i], hidden, origin, hidden, old, i * hidden)
        if clip > 0:
            # deltas holds X · Wᵀ + bias; plus the state's product and the peepholes it is the gates' unclipped input.
            for i in range(rows):
                gather_row(states, first, previous[row + i], hidden, origin, hidden, before, i * hidden)
            at = aligned(ahead)
            multiply(
                gemm,
                Matrix(before, 0, hidden),
                Panels(ahead, at, hidden),
                Matrix(deltas, row * width, width),
                (rows, hidden, width),
                True,
            )
            if peeping:
                for i in range(rows):
                    δi = (row + i) * width
                    add_peephole(deltas, δi, P, Pi, old, i * hidden, hidden)
                    add_peephole(deltas, δi + hidden, P, Po, cells, (gate_row + i) * hidden, hidden)
                    add_peephole(deltas, δi + 2 * hidden, P, Pf, old, i * hidden, hidden)
            within_clip(deltas, row * width, rows * width, clip, within)
        for i in range(rows):
            gate_i, new, at = (gate_row + i) * width, (gate_row + i) * hidden, i * hidden
            gate_o, gate_f, candidate = gate_i + hidden, gate_i + 2 * hidden, gate_i + 3 * hidden
            δi = (row + i) * width
            δo, δf, δc = δi + hidden, δi + 2 * hidden, δi + 3 * hidden
            if t >= lengths[start + i]:
                zero(deltas, δi, δi + width)
                continue
            if d_states.size > 0:
                for j in range(hidden):
                    G[at + j] += load(d_states, new + j)
            for j in range(hidden):
                store(shown, j, load(cells, new + j))
            activate(h, shown, origin, hidden)
            for j in range(hidden):
                through = load(G, at + j)
                store(deltas, δo + j, through * load(shown, j))
                store(flow, j, through * load(gates, gate_o + j))
            times_derivative(f, gates, gate_o, deltas, δo, hidden)
            times_derivative(h, shown, origin, flow, origin, hidden)
            if clip > 0:
                scale(deltas, δo, within, i * width + hidden, hidden)
            for j in range(hidden):
                store(Gc, at + j, load(Gc, at + j) + load(flow, j))
            if peeping:
                add_peephole(Gc, at, P, Po, deltas, δo, hidden)
            for j in range(hidden):
                through, c, kept = load(Gc, at + j), load(gates, candidate + j), load(old, at + j)
                store(deltas, δi + j, through * (c - kept if input_forget else c))
                store(deltas, δf + j, through * kept)
                store(deltas, δc + j, through * load(gates, gate_i + j))
                store(Gc, at + j, through * load(gates, gate_f + j))
            times_derivative(f, gates, gate_i, deltas, δi, hidden)
            times_derivative(g, gates, candidate, deltas, δc, hidden)
            if input_forget:
                zero(deltas, δf, δf + hidden)
            else:
                times_derivative(f, gates, gate_f, deltas, δf, hidden)
            if clip > 0:
                scale(deltas, δi, within, i * width, hidden)
                scale(deltas, δf, within, i * width + 2 * hidden, 2 * hidden)
            if peeping:
                add_peephole(Gc, at, P, Pi, deltas, δi, hidden)
                add_peephole(Gc, at, P, Pf, deltas, δf, hidden)
        at = aligned(back)
        multiply(
            gemm,
            Matrix(deltas, row * width, width),
            Panels(back, at, width),
            Matrix(before, origin, hidden),
            (rows, width, hidden),
            False,
        )
        for i in range(rows):
            if t < lengths[start + i]:
                for j in range(i * hidden, (i + 1) * hidden):
                    store(G, j, load(before, j))
    for i in range(size):
        if d_first.size > 0:
            store(d_first, own + i, G[i])
        if d_first_cell.size > 0:
            store(d_first_cell, own + i, Gc[i])


@native
def _peephole_columns(
    number: int,
    deltas: Array,
    cells: Array,
    first_cell: Array,
    previous: Array,
    dP: Array,
    direction: int,
    sizes: Sizes,
) -> None:
    """dP = Σ δ∘cell, for some columns of one gate."""
    _, batch, _, hidden, directions = sizes
    per_gate = (hidden + SUMMED_COLUMNS - 1) // SUMMED_COLUMNS
    gate, left = number // per_gate, number % per_gate * SUMMED_COLUMNS
    n = min(SUMMED_COLUMNS, hidden - left)
    total, block, cell = np.zeros(n, dP.dtype), np.empty(n, dP.dtype), np.empty(n, dP.dtype)
    for k in range(0, previous.size, DEPTH):  # sums of sums: the error grows with the square root of the number of rows
        block[:] = 0
        for row in range(k, min(previous.size, k + DEPTH)):
            where = previous[row]
            if where == ZERO_ROW:
                continue
            if gate == 1:  # o sees the new cell
                where = (row // batch * directions + direction) * batch + row % batch
            gather_row(cells, first_cell, where, hidden, left, n, cell, int64(0))
            for j in range(n):
                block[j] += load(deltas, (row * 4 + gate) * hidden + left + j) * load(cell, j)
        total += block
    for j in range(n):
        store(dP, (direction * 3 + gate) * hidden + left + j, total[j])


@native
def lstm_backward(
    X: Array,
    weights: tuple[Array, ...],
    P: Array,
    lengths: Array,
    given: tuple[Array, ...],
    gradients: tuple[Array, ...],
    dC0: Array,
    dP: Array,
    deltas: Array,
    activations: Activations,
    input_forget: int,
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
    first, first_cell, states, cells, _, _, _, _ = given
    dX, dW, dR, dB, dH0 = gradients
    hidden, width, clip, gemm = sizes.hidden, 4 * sizes.hidden, activations.clip, execution.gemm
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
            ahead = packed_matrix(R, d * width * hidden, 1, hidden, hidden, width, scheduler)
            project_alone(X, W, both_biases(B, d, width, deltas), deltas, d, sizes, gemm, scheduler)
        back = packed_matrix(R, d * width * hidden, hidden, 1, width, hidden, scheduler)
        arrays = (given, P, lengths, previous, deltas, dH0, dC0, (back, ahead))
        tasks = (sizes.batch + execution.block - 1) // execution.block
        parallel(scheduler, tasks, _backward_steps, (*arrays, activations, input_forget, order, sizes, execution))
        if dX.size > 0:
            input_gradient(deltas, W, dX, d, sizes.inputs, width, gemm, scheduler)
        if dW.size > 0 or dR.size > 0:
            factors = Factors(deltas, X, states, first, previous, nothing, int64(0))
            weight_gradients(factors, dW, dR, d, width, sizes, execution, scheduler)
        if dB.size > 0:
            bias_gradient(deltas, width, dB, d, scheduler)
        if dP.size > 0:
            columns = 3 * ((hidden + SUMMED_COLUMNS - 1) // SUMMED_COLUMNS)
            work = (deltas, cells, first_cell, previous, dP, d, sizes)
            parallel(scheduler, columns, _peephole_columns, work)
    return int64(-1)
