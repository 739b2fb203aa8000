"""The steps of RNNGrad on CUDA: one launch, whose programs wait for each other after every step."""

import triton
import triton.language as tl

from onnxgrad.cuda.core.activations import derivative
from onnxgrad.cuda.core.grid import tile_of, wait_for_all
from onnxgrad.cuda.core.launch import float_of
from onnxgrad.cuda.core.recurrent import product, reaches


@triton.jit
def backward_steps(
    HAll, dHAll, weights, within, lengths, gradient, deltas, counter,
    steps, batch, hidden, all_step, f_alpha, f_beta,
    F: tl.constexpr, BACKWARDS: tl.constexpr,
    CLIPS: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_ALL: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """From the last step to the first, each program for its tiles of the states' gradient.

    `weights` [H, H] is Rᵀ, `within` [S·N, H] is 1 where clip left the activation's input as it is, `gradient` [N, H]
    is that of the state. The programs write `deltas` [S·N, H].
    """
    kind = gradient.dtype.element_ty
    f_alpha = float_of(f_alpha, kind)
    f_beta = float_of(f_beta, kind)
    tiles = tl.cdiv(batch, ROWS) * tl.cdiv(hidden, COLUMNS)
    origin = tl.program_id(0).to(tl.int64) * 0  # all steps together may need 64 bits
    for s in range(steps):
        t = origin + (s if BACKWARDS else steps - 1 - s)
        step = deltas + t * batch * hidden
        for tile in range(tl.program_id(0), tiles, PROGRAMS):
            row, column, inside, own = tile_of(tile, batch, hidden, ROWS, COLUMNS)
            alive = inside & reaches(t, lengths, row, batch, HAS_LENGTHS)[:, None]
            y = tl.load(HAll + t * all_step + own, alive, other=0).to(kind)
            through = tl.load(gradient + own, inside, other=0)
            flow = through
            if HAS_ALL:
                flow += tl.load(dHAll + t * all_step + own, alive, other=0).to(kind)
            δ = flow * derivative(F, y, f_alpha, f_beta)
            if CLIPS:
                δ *= tl.load(within + t * batch * hidden + own, inside, other=0)
            tl.store(step + own, tl.where(alive, δ, 0), inside)
            tl.store(gradient + own, tl.where(alive, 0, through), inside)
        wait_for_all(counter, s + 1, PROGRAMS)
        for tile in range(tl.program_id(0), tiles, PROGRAMS):
            row, column, inside, own = tile_of(tile, batch, hidden, ROWS, COLUMNS)
            total = tl.load(gradient + own, inside, other=0)
            total = product(step, hidden, weights, hidden, row, column, batch, hidden, hidden, total, DEPTH, PRECISION)
            tl.debug_barrier()  # another thread may write there than has read
            tl.store(gradient + own, total, inside)
        tl.debug_barrier()
