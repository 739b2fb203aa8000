"""GRUTraining in native code: one large product for the inputs, then each block of rows takes its steps alone.

Rows of a batch do not depend on one another, so threads take blocks of rows and never wait for each other.
"""

import numpy as np

from onnxgrad.cpu.core.halves import load, store, zero
from onnxgrad.cpu.core.jit import int64, native
from onnxgrad.cpu.core.matmul.microkernel import Matrix, Panels, aligned, multiply, packed_matrix
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.recurrent.activations import Activations, activate_clipped, activation_of
from onnxgrad.cpu.core.recurrent.arguments import Direction, Execution, Sizes
from onnxgrad.cpu.core.recurrent.projections import bad_length, project
from onnxgrad.tensor_types import Array


@native
def input_bias(B: Array, direction: int, hidden: int, linear_before_reset: int, like: Array) -> Array:
    """The bias added to X · Wᵀ: both biases of z and r; of h the one outside the reset gate, or both."""
    bias = np.zeros(3 * hidden, like.dtype)
    if B.size > 0:
        base = direction * 6 * hidden
        for j in range(3 * hidden):
            bias[j] = load(B, base + j)
            if j < 2 * hidden or not linear_before_reset:
                bias[j] += load(B, base + 3 * hidden + j)
    return bias


@native
def _forward_steps(
    number: int,
    results: tuple[Array, ...],
    first: Array,
    lengths: Array,
    B: Array,
    packed: tuple[Array, Array],
    activations: Activations,
    linear_before_reset: int,
    order: Direction,
    sizes: Sizes,
    execution: Execution,
) -> None:
    """A block of rows from the first step to the last."""
    states, final, gates = results
    steps, batch, _, hidden, directions = sizes
    direction, backwards = order
    block, _, gemm = execution
    packed_zr, packed_h = packed
    start = number * block
    rows = min(block, batch - start)
    state, product = np.empty(rows * hidden, gates.dtype), np.empty(rows * hidden, gates.dtype)
    for i in range(rows * hidden):
        state[i] = load(first, (direction * batch + start) * hidden + i) if first.size > 0 else 0
    at_zr, at_h = aligned(packed_zr), aligned(packed_h)
    f, g = activation_of(activations, 2 * direction), activation_of(activations, 2 * direction + 1)
    clip, width = activations.clip, 3 * hidden
    one = gates.dtype.type(1)
    for s in range(steps):
        t = steps - 1 - s if backwards else s
        row = (t * directions + direction) * batch + start
        gate, out = row * width, row * hidden
        multiply(
            gemm,
            Matrix(state, 0, hidden),
            Panels(packed_zr, at_zr, hidden),
            Matrix(gates, gate, width),
            (rows, hidden, 2 * hidden),
            True,
        )
        for i in range(rows):
            activate_clipped(f, clip, gates, gate + i * width, 2 * hidden)
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
                r, h = gate + i * width + hidden, gate + i * width + 2 * hidden
                if B.size > 0:
                    for j in range(hidden):
                        inner = load(product, i * hidden + j) + load(B, bias + j)
                        store(gates, h + j, load(gates, h + j) + load(gates, r + j) * inner)
                else:
                    for j in range(hidden):
                        store(gates, h + j, load(gates, h + j) + load(gates, r + j) * load(product, i * hidden + j))
        else:
            for i in range(rows):
                r = gate + i * width + hidden
                for j in range(hidden):
                    store(product, i * hidden + j, load(gates, r + j) * load(state, i * hidden + j))
            h = gate + 2 * hidden
            multiply(
                gemm,
                Matrix(product, 0, hidden),
                Panels(packed_h, at_h, hidden),
                Matrix(gates, h, width),
                (rows, hidden, hidden),
                True,
            )
        for i in range(rows):
            z, h = gate + i * width, gate + i * width + 2 * hidden
            if t >= lengths[start + i]:
                zero(gates, z, z + width)
                zero(states, out + i * hidden, out + (i + 1) * hidden)
                continue
            activate_clipped(g, clip, gates, h, hidden)
            for j in range(hidden):
                kept = load(gates, z + j)
                new = (one - kept) * load(gates, h + j) + kept * load(state, i * hidden + j)
                store(state, i * hidden + j, new)
                store(states, out + i * hidden + j, new)
    for i in range(rows * hidden):
        store(final, (direction * batch + start) * hidden + i, state[i])


@native
def gru_forward(
    X: Array,
    weights: tuple[Array, ...],
    lengths: Array,
    first: Array,
    results: tuple[Array, ...],
    activations: Activations,
    linear_before_reset: int,
    backwards: Array,
    sizes: Sizes,
    execution: Execution,
    scheduler: int,
) -> int:
    """Everything one-dimensional, in float32 or float64; an absent B or first state is an empty array.

    Returns -1, or the first row whose length is not 0 to the number of steps; then nothing is written.
    """
    sizes, execution, activations = Sizes(*sizes), Execution(*execution), Activations(*activations)
    W, R, B = weights
    gates = results[2]
    hidden = sizes.hidden
    bad = bad_length(lengths, sizes.steps)
    if bad >= 0:
        return bad
    for d in range(sizes.directions):
        bias = input_bias(B, d, hidden, linear_before_reset, gates)
        project(X, W, bias, gates, d, sizes, execution.gemm, scheduler)
        base = d * 3 * hidden * hidden
        packed_zr = packed_matrix(R, base, 1, hidden, hidden, 2 * hidden, scheduler)
        packed_h = packed_matrix(R, base + 2 * hidden * hidden, 1, hidden, hidden, hidden, scheduler)
        given = (results, first, lengths, B, (packed_zr, packed_h), activations, linear_before_reset)
        tasks = (sizes.batch + execution.block - 1) // execution.block
        parallel(scheduler, tasks, _forward_steps, (*given, Direction(d, backwards[d]), sizes, execution))
    return int64(-1)
