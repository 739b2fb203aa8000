"""The gradients of the GRU's weights, dW and dR: products over all steps and rows of one direction.

Most of both comes from the same δ, so each task makes some rows of both and packs that δ once.
"""

import numpy as np

from onnxgrad.cpu.core.jit import native
from onnxgrad.cpu.core.matmul.microkernel import ROWS, packed_size
from onnxgrad.cpu.core.matmul.outer import DEPTH, WIDTH, outer_block, pack_left
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.tensor_types import Array

GATES = 3
LAST = GATES - 1  # h, whose part of dR is made of `aside`
HEIGHT = 384  # most rows of dW and dR in one task


@native
def even_share(total: int, parts: int, unit: int) -> int:
    """How much each of `parts` takes of `total`, in whole units."""
    share = (total + parts - 1) // parts
    return (share + unit - 1) // unit * unit


@native
def _weight_rows(
    number: int,
    deltas: Array,
    aside: Array,
    X: Array,
    own: Array,
    dW: Array,
    states: Array,
    first: Array,
    previous: Array,
    dR: Array,
    direction: int,
    linear_before_reset: int,
    wanted: tuple[bool, bool],
    widths: tuple[int, int],
    share: int,
    gemm: int,
) -> None:
    """Some rows of one gate, in dW and in dR."""
    inputs, hidden = widths
    per_gate = (hidden + share - 1) // share
    gate, top = number // per_gate, number % per_gate * share
    height, row = min(share, hidden - top), gate * hidden + top
    target = direction * GATES * hidden + row
    packed_a = np.empty((height + ROWS - 1) // ROWS * ROWS * DEPTH, deltas.dtype)
    packed_b = np.empty(packed_size(deltas, DEPTH, min(WIDTH, max(inputs, hidden))), deltas.dtype)
    for k in range(0, max(1, own.size), DEPTH):
        here, before = own[k : k + DEPTH], previous[k : k + DEPTH]
        pack_left(deltas, k * GATES * hidden + row, GATES * hidden, here.size, height, packed_a)
        if wanted[0]:
            outer_block(packed_a, height, X, X, here, inputs, packed_b, dW, target * inputs, k > 0, gemm)
        if wanted[1]:
            if gate == LAST and not linear_before_reset:
                outer_block(packed_a, height, aside, X, here, hidden, packed_b, dR, target * hidden, k > 0, gemm)
                continue
            if gate == LAST:
                pack_left(aside, k * hidden + top, hidden, here.size, height, packed_a)
            outer_block(packed_a, height, states, first, before, hidden, packed_b, dR, target * hidden, k > 0, gemm)


@native
def weight_gradients(
    deltas: Array,
    aside: Array,
    X: Array,
    own: Array,
    dW: Array,
    states: Array,
    first: Array,
    previous: Array,
    dR: Array,
    direction: int,
    linear_before_reset: int,
    wanted: tuple[bool, bool],
    widths: tuple[int, int],
    threads: int,
    gemm: int,
    scheduler: int,
) -> None:
    """dW = Σ δᵀ · X[own] and dR = Σ δᵀ · states[previous], as far as wanted; `widths` are those of X and the states.

    For the gate h, dR is made of `aside` instead: in place of the states or, with linear_before_reset, of δ.
    """
    hidden = widths[1]
    share = even_share(hidden, (hidden + HEIGHT - 1) // HEIGHT, ROWS)
    while share > 3 * ROWS and (hidden + share - 1) // share * GATES < 2 * threads:
        share = even_share(share, 2, ROWS)
    tasks = (hidden + share - 1) // share * GATES
    arrays = (deltas, aside, X, own, dW, states, first, previous, dR)
    parallel(scheduler, tasks, _weight_rows, (*arrays, direction, linear_before_reset, wanted, widths, share, gemm))
