"""LSTMGrad in native code: blocks of rows walk back through time, then large products make the weights' gradients.

`deltas` holds the gradients δi, δo, δf, δc before the activations, for all steps and rows of one direction.
"""

import numpy as np

from onnxgrad.cpu.core.halves import load, store, zero
from onnxgrad.cpu.core.jit import int64, native
from onnxgrad.cpu.core.matmul.microkernel import Matrix, Panels, aligned, multiply, packed_matrix
from onnxgrad.cpu.core.matmul.outer import DEPTH, ZERO_ROW, gather_row
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.recurrent.activations import activate, times_derivative
from onnxgrad.cpu.core.recurrent.gru_forward import bad_length
from onnxgrad.cpu.core.recurrent.lstm_forward import add_peephole
from onnxgrad.cpu.core.recurrent.projections import (
    bias_gradient,
    input_gradient,
    previous_rows,
    project,
    weight_gradients,
)
from onnxgrad.tensor_types import Array

SUMMED_COLUMNS = 64


@native
def mask(values: Array, at: int, count: int, clip: float, within: Array) -> None:
    """within[i] = 1 where the input of a gate was not cut off, else 0."""
    for i in range(count):
        within[i] = abs(load(values, at + i)) <= clip


@native
def _walk_back(
    number: int,
    states: Array,
    cells: Array,
    first: Array,
    first_cell: Array,
    gates: Array,
    P: Array,
    d_states: Array,
    d_final: Array,
    d_final_cell: Array,
    lengths: Array,
    previous: Array,
    deltas: Array,
    d_first: Array,
    d_first_cell: Array,
    packed: tuple[Array, Array],
    codes: Array,
    parameters: Array,
    settings: tuple[int, float, int, int],
    sizes: tuple[int, ...],
    block: int,
    gemm: int,
) -> None:
    """A block of rows from the last step to the first."""
    steps, batch, _, hidden, directions = sizes
    input_forget, clip, backwards, direction = settings
    back, ahead = packed
    start = number * block
    rows = min(block, batch - start)
    size, width, origin = rows * hidden, 4 * hidden, int64(0)
    f, g, h = 3 * direction, 3 * direction + 1, 3 * direction + 2
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
            # deltas holds X · Wᵀ + bias; with the state's and the cell's part it is what `clip` was applied to.
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
            mask(deltas, row * width, rows * width, clip, within)
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
            activate(codes[h], parameters[h, 0], parameters[h, 1], shown, origin, hidden)
            for j in range(hidden):
                through = load(G, at + j)
                store(deltas, δo + j, through * load(shown, j))
                store(flow, j, through * load(gates, gate_o + j))
            times_derivative(codes[f], parameters[f, 0], parameters[f, 1], gates, gate_o, deltas, δo, hidden)
            times_derivative(codes[h], parameters[h, 0], parameters[h, 1], shown, origin, flow, origin, hidden)
            if clip > 0:
                for j in range(hidden):
                    store(deltas, δo + j, load(deltas, δo + j) * load(within, i * width + hidden + j))
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
            times_derivative(codes[f], parameters[f, 0], parameters[f, 1], gates, gate_i, deltas, δi, hidden)
            times_derivative(codes[g], parameters[g, 0], parameters[g, 1], gates, candidate, deltas, δc, hidden)
            if input_forget:
                zero(deltas, δf, δf + hidden)
            else:
                times_derivative(codes[f], parameters[f, 0], parameters[f, 1], gates, gate_f, deltas, δf, hidden)
            if clip > 0:
                for j in range(hidden):
                    store(deltas, δi + j, load(deltas, δi + j) * load(within, i * width + j))
                for j in range(2 * hidden):
                    store(deltas, δf + j, load(deltas, δf + j) * load(within, i * width + 2 * hidden + j))
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
    sizes: tuple[int, ...],
) -> None:
    _, batch, _, hidden, directions = sizes
    per_gate = (hidden + SUMMED_COLUMNS - 1) // SUMMED_COLUMNS
    gate, left = number // per_gate, number % per_gate * SUMMED_COLUMNS
    n = min(SUMMED_COLUMNS, hidden - left)
    total, part, cell = np.zeros(n, dP.dtype), np.empty(n, dP.dtype), np.empty(n, dP.dtype)
    for k in range(0, previous.size, DEPTH):  # sums of sums: the error grows with the square root of what it would
        part[:] = 0
        for row in range(k, min(previous.size, k + DEPTH)):
            where = previous[row]
            if where == ZERO_ROW:
                continue
            if gate == 1:  # o sees the new cell
                where = (row // batch * directions + direction) * batch + row % batch
            gather_row(cells, first_cell, where, hidden, left, n, cell, int64(0))
            for j in range(n):
                part[j] += load(deltas, (row * 4 + gate) * hidden + left + j) * load(cell, j)
        total += part
    for j in range(n):
        store(dP, (direction * 3 + gate) * hidden + left + j, total[j])


@native
def lstm_backward(
    X: Array,
    W: Array,
    R: Array,
    lengths: Array,
    first: Array,
    first_cell: Array,
    states: Array,
    cells: Array,
    gates: Array,
    d_states: Array,
    d_final: Array,
    d_final_cell: Array,
    B: Array,
    P: Array,
    dX: Array,
    dW: Array,
    dR: Array,
    dB: Array,
    dH0: Array,
    dC0: Array,
    dP: Array,
    deltas: Array,
    wanted: tuple[bool, ...],
    codes: Array,
    parameters: Array,
    input_forget: int,
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
    width, origin = 4 * hidden, int64(0)
    if hidden == 0:
        zero(dX, 0, dX.size)
        return int64(-1)
    for d in range(directions):
        previous = previous_rows(lengths, d, backwards[d], sizes)
        ahead = np.empty(0, X.dtype)
        if clip > 0:
            ahead = packed_matrix(R, d * width * hidden, 1, hidden, hidden, width, scheduler)
            alone = (steps, batch, inputs, hidden, int64(1))
            project(X, W, B, deltas, origin, d, width, alone, gemm, scheduler)
        back = packed_matrix(R, d * width * hidden, hidden, 1, width, hidden, scheduler)
        given = (states, cells, first, first_cell, gates, P, d_states, d_final, d_final_cell, lengths, previous)
        settings = (input_forget, clip, backwards[d], d)
        work = (*given, deltas, dH0, dC0, (back, ahead), codes, parameters, settings, sizes, block, gemm)
        parallel(scheduler, (batch + block - 1) // block, _walk_back, work)
        if wanted[0]:
            input_gradient(deltas, W, dX, d, inputs, width, gemm, scheduler)
        if wanted[1] or wanted[2]:
            weight_gradients(
                deltas, X, dW, states, first, previous, dR, d, (wanted[1], wanted[2]), (inputs, hidden, width),
                threads, gemm, scheduler,
            )  # fmt: skip
        if wanted[3]:
            bias_gradient(deltas, width, dB, d, scheduler)
        if wanted[6]:
            tasks = 3 * ((hidden + SUMMED_COLUMNS - 1) // SUMMED_COLUMNS)
            work_p = (deltas, cells, first_cell, previous, dP, d, sizes)
            parallel(scheduler, tasks, _peephole_columns, work_p)
    return int64(-1)
