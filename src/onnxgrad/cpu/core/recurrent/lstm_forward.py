"""LSTMTraining in native code: one large product for the inputs, then each block of rows takes its steps alone."""

import numpy as np

from onnxgrad.cpu.core.halves import load, store, zero
from onnxgrad.cpu.core.jit import int64, native
from onnxgrad.cpu.core.matmul.microkernel import Matrix, Panels, aligned, multiply, packed_matrix
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.recurrent.activations import Activations, activate, activate_clipped, activation_of
from onnxgrad.cpu.core.recurrent.arguments import Direction, Execution, Sizes
from onnxgrad.cpu.core.recurrent.projections import bad_length, both_biases, project
from onnxgrad.tensor_types import Array


@native
def add_peephole(values: Array, at: int, P: Array, peephole: int, cells: Array, cell: int, count: int) -> None:
    """values[at + j] += P[peephole + j] · cells[cell + j]."""
    for j in range(count):
        store(values, at + j, load(values, at + j) + load(P, peephole + j) * load(cells, cell + j))


@native
def _forward_steps(
    number: int,
    results: tuple[Array, ...],
    first: Array,
    first_cell: Array,
    P: Array,
    lengths: Array,
    packed: Array,
    activations: Activations,
    input_forget: int,
    order: Direction,
    sizes: Sizes,
    execution: Execution,
) -> None:
    """A block of rows from the first step to the last."""
    states, final, final_cell, cells, gates = results
    steps, batch, _, hidden, directions = sizes
    direction, backwards = order
    block, _, gemm = execution
    start = number * block
    rows = min(block, batch - start)
    state, cell = np.zeros(rows * hidden, gates.dtype), np.zeros(rows * hidden, gates.dtype)
    shown, width = np.empty(hidden, gates.dtype), 4 * hidden
    own, origin = (direction * batch + start) * hidden, int64(0)
    for i in range(rows * hidden):
        if first.size > 0:
            state[i] = load(first, own + i)
        if first_cell.size > 0:
            cell[i] = load(first_cell, own + i)
    at_packed, clip = aligned(packed), activations.clip
    f, g = activation_of(activations, 3 * direction), activation_of(activations, 3 * direction + 1)
    h = activation_of(activations, 3 * direction + 2)
    one, peeping = gates.dtype.type(1), P.size > 0
    Pi, Po, Pf = direction * 3 * hidden, (direction * 3 + 1) * hidden, (direction * 3 + 2) * hidden
    for s in range(steps):
        t = steps - 1 - s if backwards else s
        row = (t * directions + direction) * batch + start
        multiply(
            gemm,
            Matrix(state, 0, hidden),
            Panels(packed, at_packed, hidden),
            Matrix(gates, row * width, width),
            (rows, hidden, width),
            True,
        )
        for i in range(rows):
            gate_i, out, at = (row + i) * width, (row + i) * hidden, i * hidden
            gate_o, gate_f, candidate = gate_i + hidden, gate_i + 2 * hidden, gate_i + 3 * hidden
            if t >= lengths[start + i]:
                zero(gates, gate_i, gate_i + width)
                zero(states, out, out + hidden)
                zero(cells, out, out + hidden)
                continue
            if peeping:
                add_peephole(gates, gate_i, P, Pi, cell, at, hidden)
                add_peephole(gates, gate_f, P, Pf, cell, at, hidden)
                activate_clipped(f, clip, gates, gate_i, hidden)
                activate_clipped(f, clip, gates, gate_f, hidden)
            else:
                activate_clipped(f, clip, gates, gate_i, 3 * hidden)
            if input_forget:
                for j in range(hidden):
                    store(gates, gate_f + j, one - load(gates, gate_i + j))
            activate_clipped(g, clip, gates, candidate, hidden)
            for j in range(hidden):
                kept = load(gates, gate_f + j) * load(cell, at + j)
                new = kept + load(gates, gate_i + j) * load(gates, candidate + j)
                store(cell, at + j, new)
                store(cells, out + j, new)
                store(shown, j, new)
            if peeping:
                add_peephole(gates, gate_o, P, Po, cell, at, hidden)
                activate_clipped(f, clip, gates, gate_o, hidden)
            activate(h, shown, origin, hidden)
            for j in range(hidden):
                new = load(gates, gate_o + j) * load(shown, j)
                store(state, at + j, new)
                store(states, out + j, new)
    for i in range(rows * hidden):
        store(final, own + i, state[i])
        store(final_cell, own + i, cell[i])


@native
def lstm_forward(
    X: Array,
    weights: tuple[Array, ...],
    P: Array,
    lengths: Array,
    first: Array,
    first_cell: Array,
    results: tuple[Array, ...],
    activations: Activations,
    input_forget: int,
    backwards: Array,
    sizes: Sizes,
    execution: Execution,
    scheduler: int,
) -> int:
    """Everything one-dimensional, in float32 or float64; absent inputs are empty arrays.

    Returns -1, or the first row whose length is not 0 to the number of steps; then nothing is written.
    """
    sizes, execution, activations = Sizes(*sizes), Execution(*execution), Activations(*activations)
    W, R, B = weights
    gates = results[4]
    hidden, width = sizes.hidden, 4 * sizes.hidden
    bad = bad_length(lengths, sizes.steps)
    if bad >= 0:
        return bad
    for d in range(sizes.directions):
        bias = both_biases(B, d, width, gates)
        project(X, W, bias, gates, d, sizes, execution.gemm, scheduler)
        packed = packed_matrix(R, d * width * hidden, 1, hidden, hidden, width, scheduler)
        given = (results, first, first_cell, P, lengths, packed, activations, input_forget)
        tasks = (sizes.batch + execution.block - 1) // execution.block
        parallel(scheduler, tasks, _forward_steps, (*given, Direction(d, backwards[d]), sizes, execution))
    return int64(-1)
