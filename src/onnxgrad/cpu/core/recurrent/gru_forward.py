"""GRUTraining in native code: one large product for the inputs, then each block of rows walks through time alone.

Rows of a batch do not depend on one another, so threads take blocks of rows and never wait for each other.
"""

import numpy as np

from onnxgrad.cpu.core.halves import load, store, zero
from onnxgrad.cpu.core.jit import int64, native
from onnxgrad.cpu.core.matmul.microkernel import Matrix, Panels, aligned, multiply, packed_matrix
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.recurrent.activations import activate, clamp
from onnxgrad.tensor_types import Array

PROJECTED_ROWS = 64  # rows of X in one task


@native
def pack_transposed(weights: Array, start: int, depth: int, columns: int, scheduler: int) -> Array:
    """weights[column, k] from `start` on, packed as b[k, column]."""
    return packed_matrix(weights, start, 1, depth, depth, columns, scheduler)


@native
def _project_rows(
    number: int, X: Array, packed: Array, bias: Array, gates: Array, direction: int, sizes: tuple[int, ...], gemm: int
) -> None:
    steps, batch, inputs, hidden, directions = sizes
    row, stop = number * PROJECTED_ROWS, min(steps * batch, (number + 1) * PROJECTED_ROWS)
    width = 3 * hidden
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
    bias: Array,
    gates: Array,
    direction: int,
    of: int,
    sizes: tuple[int, ...],
    gemm: int,
    scheduler: int,
) -> None:
    """gates[t, direction, n] = X[t, n] · W[of]ᵀ + bias, for every step and row."""
    steps, batch, inputs, hidden, _ = sizes
    packed = pack_transposed(W, of * 3 * hidden * inputs, inputs, 3 * hidden, scheduler)
    tasks = (steps * batch + PROJECTED_ROWS - 1) // PROJECTED_ROWS
    parallel(scheduler, tasks, _project_rows, (X, packed, bias, gates, direction, sizes, gemm))


@native
def input_bias(B: Array, direction: int, hidden: int, linear_before_reset: int, like: Array) -> Array:
    """What is added to X · Wᵀ: both biases of z and r; of h the one outside the reset gate, or both."""
    bias = np.zeros(3 * hidden, like.dtype)
    if B.size > 0:
        base = direction * 6 * hidden
        for j in range(3 * hidden):
            bias[j] = load(B, base + j)
            if j < 2 * hidden or not linear_before_reset:
                bias[j] += load(B, base + 3 * hidden + j)
    return bias


@native
def _walk(
    number: int,
    gates: Array,
    states: Array,
    final: Array,
    first: Array,
    lengths: Array,
    B: Array,
    packed_zr: Array,
    packed_h: Array,
    codes: Array,
    parameters: Array,
    settings: tuple[int, float, int, int],
    sizes: tuple[int, ...],
    block: int,
    gemm: int,
) -> None:
    """A block of rows from the first step to the last."""
    steps, batch, _, hidden, directions = sizes
    linear_before_reset, clip, backwards, direction = settings
    start = number * block
    rows = min(block, batch - start)
    state, product = np.empty(rows * hidden, gates.dtype), np.empty(rows * hidden, gates.dtype)
    for i in range(rows * hidden):
        state[i] = load(first, (direction * batch + start) * hidden + i) if first.size > 0 else 0
    at_zr, at_h = aligned(packed_zr), aligned(packed_h)
    f, g = 2 * direction, 2 * direction + 1
    one = gates.dtype.type(1)
    for s in range(steps):
        t = steps - 1 - s if backwards else s
        row = (t * directions + direction) * batch + start
        gate, out = row * 3 * hidden, row * hidden
        multiply(
            gemm,
            Matrix(state, 0, hidden),
            Panels(packed_zr, at_zr, hidden),
            Matrix(gates, gate, 3 * hidden),
            (rows, hidden, 2 * hidden),
            True,
        )
        for i in range(rows):
            at = gate + i * 3 * hidden
            if clip > 0:
                clamp(gates, at, 2 * hidden, clip)
            activate(codes[f], parameters[f, 0], parameters[f, 1], gates, at, 2 * hidden)
        if linear_before_reset:
            multiply(
                gemm,
                Matrix(state, 0, hidden),
                Panels(packed_h, at_h, hidden),
                Matrix(product, 0, hidden),
                (rows, hidden, hidden),
                False,
            )
            bias = (direction * 6 + 5) * hidden
            for i in range(rows):
                r, h = gate + i * 3 * hidden + hidden, gate + i * 3 * hidden + 2 * hidden
                if B.size > 0:
                    for j in range(hidden):
                        inner = load(product, i * hidden + j) + load(B, bias + j)
                        store(gates, h + j, load(gates, h + j) + load(gates, r + j) * inner)
                else:
                    for j in range(hidden):
                        store(gates, h + j, load(gates, h + j) + load(gates, r + j) * load(product, i * hidden + j))
        else:
            for i in range(rows):
                r = gate + i * 3 * hidden + hidden
                for j in range(hidden):
                    store(product, i * hidden + j, load(gates, r + j) * load(state, i * hidden + j))
            multiply(
                gemm,
                Matrix(product, 0, hidden),
                Panels(packed_h, at_h, hidden),
                Matrix(gates, gate + 2 * hidden, 3 * hidden),
                (rows, hidden, hidden),
                True,
            )
        for i in range(rows):
            z, h = gate + i * 3 * hidden, gate + i * 3 * hidden + 2 * hidden
            if t >= lengths[start + i]:
                zero(gates, z, z + 3 * hidden)
                zero(states, out + i * hidden, out + (i + 1) * hidden)
                continue
            if clip > 0:
                clamp(gates, h, hidden, clip)
            activate(codes[g], parameters[g, 0], parameters[g, 1], gates, h, hidden)
            for j in range(hidden):
                kept = load(gates, z + j)
                new = (one - kept) * load(gates, h + j) + kept * load(state, i * hidden + j)
                store(state, i * hidden + j, new)
                store(states, out + i * hidden + j, new)
    for i in range(rows * hidden):
        store(final, (direction * batch + start) * hidden + i, state[i])


@native
def bad_length(lengths: Array, steps: int) -> int:
    """The first row whose length is not 0 to `steps`, or -1."""
    for n in range(lengths.size):
        if lengths[n] < 0 or lengths[n] > steps:
            return int64(n)
    return int64(-1)


@native
def gru_forward(
    X: Array,
    W: Array,
    R: Array,
    B: Array,
    lengths: Array,
    first: Array,
    states: Array,
    final: Array,
    gates: Array,
    codes: Array,
    parameters: Array,
    linear_before_reset: int,
    clip: float,
    backwards: Array,
    sizes: tuple[int, ...],
    block: int,
    gemm: int,
    scheduler: int,
) -> int:
    """Everything one-dimensional, in float32 or float64; an absent B or first state is an empty array, no clip 0.

    Returns -1, or the first row whose length is no number of steps; then nothing is written.
    """
    steps, batch, _, hidden, directions = sizes
    bad = bad_length(lengths, steps)
    if bad >= 0:
        return bad
    for d in range(directions):
        bias = input_bias(B, d, hidden, linear_before_reset, gates)
        project(X, W, bias, gates, d, d, sizes, gemm, scheduler)
        base = d * 3 * hidden * hidden
        packed_zr = pack_transposed(R, base, hidden, 2 * hidden, scheduler)
        packed_h = pack_transposed(R, base + 2 * hidden * hidden, hidden, hidden, scheduler)
        settings = (linear_before_reset, clip, backwards[d], d)
        arrays = (gates, states, final, first, lengths, B, packed_zr, packed_h, codes, parameters)
        parallel(scheduler, (batch + block - 1) // block, _walk, (*arrays, settings, sizes, block, gemm))
    return int64(-1)
