"""LSTMTraining in native code: one large product for the inputs, then each block of rows walks through time alone."""

import numpy as np

from onnxgrad.cpu.core.halves import load, store, zero
from onnxgrad.cpu.core.jit import int64, native
from onnxgrad.cpu.core.matmul.microkernel import Matrix, Panels, aligned, multiply, packed_matrix
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.recurrent.activations import activate, clamp
from onnxgrad.cpu.core.recurrent.gru_forward import bad_length
from onnxgrad.cpu.core.recurrent.projections import project
from onnxgrad.tensor_types import Array


@native
def add_peephole(values: Array, at: int, P: Array, peephole: int, cells: Array, cell: int, count: int) -> None:
    """values[at + j] += P[peephole + j] · cells[cell + j]."""
    for j in range(count):
        store(values, at + j, load(values, at + j) + load(P, peephole + j) * load(cells, cell + j))


@native
def _gate(f: int, codes: Array, parameters: Array, clip: float, gates: Array, at: int, count: int) -> None:
    """Clip and activation of a stretch of gates."""
    if clip > 0:
        clamp(gates, at, count, clip)
    activate(codes[f], parameters[f, 0], parameters[f, 1], gates, at, count)


@native
def _walk(
    number: int,
    gates: Array,
    states: Array,
    cells: Array,
    final: Array,
    final_cell: Array,
    first: Array,
    first_cell: Array,
    P: Array,
    lengths: Array,
    packed: Array,
    codes: Array,
    parameters: Array,
    settings: tuple[int, float, int, int],
    sizes: tuple[int, ...],
    block: int,
    gemm: int,
) -> None:
    """A block of rows from the first step to the last."""
    steps, batch, _, hidden, directions = sizes
    input_forget, clip, backwards, direction = settings
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
    at_packed, f, g, h = aligned(packed), 3 * direction, 3 * direction + 1, 3 * direction + 2
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
                _gate(f, codes, parameters, clip, gates, gate_i, hidden)
                _gate(f, codes, parameters, clip, gates, gate_f, hidden)
            else:
                _gate(f, codes, parameters, clip, gates, gate_i, 3 * hidden)
            if input_forget:
                for j in range(hidden):
                    store(gates, gate_f + j, one - load(gates, gate_i + j))
            _gate(g, codes, parameters, clip, gates, candidate, hidden)
            for j in range(hidden):
                kept = load(gates, gate_f + j) * load(cell, at + j)
                new = kept + load(gates, gate_i + j) * load(gates, candidate + j)
                store(cell, at + j, new)
                store(cells, out + j, new)
                store(shown, j, new)
            if peeping:
                add_peephole(gates, gate_o, P, Po, cell, at, hidden)
                _gate(f, codes, parameters, clip, gates, gate_o, hidden)
            activate(codes[h], parameters[h, 0], parameters[h, 1], shown, origin, hidden)
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
    W: Array,
    R: Array,
    B: Array,
    lengths: Array,
    first: Array,
    first_cell: Array,
    P: Array,
    states: Array,
    final: Array,
    final_cell: Array,
    cells: Array,
    gates: Array,
    codes: Array,
    parameters: Array,
    input_forget: int,
    clip: float,
    backwards: Array,
    sizes: tuple[int, ...],
    block: int,
    gemm: int,
    scheduler: int,
) -> int:
    """Everything one-dimensional, in float32 or float64; what is absent is an empty array, no clip 0.

    Returns -1, or the first row whose length is no number of steps; then nothing is written.
    """
    steps, batch, _, hidden, directions = sizes
    bad = bad_length(lengths, steps)
    if bad >= 0:
        return bad
    width = 4 * hidden
    for d in range(directions):
        project(X, W, B, gates, d, d, width, sizes, gemm, scheduler)
        packed = packed_matrix(R, d * width * hidden, 1, hidden, hidden, width, scheduler)
        settings = (input_forget, clip, backwards[d], d)
        arrays = (gates, states, cells, final, final_cell, first, first_cell, P, lengths, packed, codes, parameters)
        parallel(scheduler, (batch + block - 1) // block, _walk, (*arrays, settings, sizes, block, gemm))
    return int64(-1)
