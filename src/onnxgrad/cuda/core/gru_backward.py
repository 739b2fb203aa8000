"""GRUGrad's backward steps on CUDA: one launch, whose programs wait for each other once or twice a step."""

import triton
import triton.language as tl

from onnxgrad.cuda.core.activations import derivative
from onnxgrad.cuda.core.grid import tile_of, wait_for_all
from onnxgrad.cuda.core.launch import float_of
from onnxgrad.cuda.core.recurrent import product, reaches


@triton.jit
def backward_steps(
    ZRH, dHAll, previous, weights, within, lengths, gradient, deltas, reset, counter,
    steps, batch, hidden, all_step, f_alpha, f_beta, g_alpha, g_beta,
    F: tl.constexpr, G: tl.constexpr, LINEAR_BEFORE_RESET: tl.constexpr, BACKWARDS: tl.constexpr,
    CLIPS: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_ALL: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """From the last step to the first, each program for its tiles of the states' gradient.

    `previous` [S·N, H] holds the states before each step, `weights` [H, 3H] is Rᵀ, `within` [S·N, 3H] is 1 where
    clip left a gate's input as it is, `gradient` [N, H] is that of the state. The programs write `deltas` [S·N, 3H],
    which are δz, δr, δh, and `reset` [S·N, H]: with linear_before_reset δh∘r in place of Hp · Rhᵀ + Rbh, else r∘Hp.
    """
    kind = gradient.dtype.element_ty
    f_alpha = float_of(f_alpha, kind)
    f_beta = float_of(f_beta, kind)
    g_alpha = float_of(g_alpha, kind)
    g_beta = float_of(g_beta, kind)
    tiles = tl.cdiv(batch, ROWS) * tl.cdiv(hidden, COLUMNS)
    width = 3 * hidden
    meeting = 0
    origin = tl.program_id(0).to(tl.int64) * 0  # all steps together may need 64 bits
    for s in range(steps):
        t = origin + (s if BACKWARDS else steps - 1 - s)
        for tile in range(tl.program_id(0), tiles, PROGRAMS):
            row, column, inside, own = tile_of(tile, batch, hidden, ROWS, COLUMNS)
            alive = inside & reaches(t, lengths, row, batch, HAS_LENGTHS)[:, None]
            gate = ZRH + t * all_step * 3 + row[:, None] * width + column[None, :]
            z = tl.load(gate, alive, other=0).to(kind)
            r = tl.load(gate + hidden, alive, other=0).to(kind)
            h = tl.load(gate + 2 * hidden, alive, other=0).to(kind)
            through = tl.load(gradient + own, inside, other=0)
            flow = through
            if HAS_ALL:
                flow += tl.load(dHAll + t * all_step + own, alive, other=0).to(kind)
            side = (t * batch + row)[:, None] * hidden + column[None, :]
            at = (t * batch + row)[:, None] * width + column[None, :]
            state = tl.load(previous + side, alive, other=0)
            δz = flow * (state - h) * derivative(F, z, f_alpha, f_beta)
            δh = flow * (1 - z) * derivative(G, h, g_alpha, g_beta)
            if CLIPS:
                δz *= tl.load(within + at, inside, other=0)
                δh *= tl.load(within + at + 2 * hidden, inside, other=0)
            δz, δh = tl.where(alive, δz, 0), tl.where(alive, δh, 0)
            tl.store(deltas + at, δz, inside)
            tl.store(deltas + at + 2 * hidden, δh, inside)
            tl.store(gradient + own, tl.where(alive, flow * z, through), inside)
            if LINEAR_BEFORE_RESET:
                δr = δh * tl.load(reset + side, inside, other=0) * derivative(F, r, f_alpha, f_beta)
                if CLIPS:
                    δr *= tl.load(within + at + hidden, inside, other=0)
                tl.store(deltas + at + hidden, tl.where(alive, δr, 0), inside)
                tl.debug_barrier()  # another thread may write there than has read
                tl.store(reset + side, δh * r, inside)
        meeting += 1
        wait_for_all(counter, meeting, PROGRAMS)
        step = deltas + t * batch * width
        if not LINEAR_BEFORE_RESET:
            for tile in range(tl.program_id(0), tiles, PROGRAMS):
                row, column, inside, own = tile_of(tile, batch, hidden, ROWS, COLUMNS)
                alive = inside & reaches(t, lengths, row, batch, HAS_LENGTHS)[:, None]
                flow = product(
                    step + 2 * hidden, width, weights + 2 * hidden, width, row, column, batch, hidden, hidden,
                    tl.zeros((ROWS, COLUMNS), kind), DEPTH, PRECISION,
                )  # fmt: skip
                gate = ZRH + t * all_step * 3 + row[:, None] * width + column[None, :]
                r = tl.load(gate + hidden, alive, other=0).to(kind)
                side = (t * batch + row)[:, None] * hidden + column[None, :]
                at = (t * batch + row)[:, None] * width + column[None, :]
                state = tl.load(previous + side, alive, other=0)
                δr = flow * state * derivative(F, r, f_alpha, f_beta)
                if CLIPS:
                    δr *= tl.load(within + at + hidden, inside, other=0)
                tl.store(deltas + at + hidden, tl.where(alive, δr, 0), inside)
                tl.store(reset + side, r * state, inside)
                tl.store(gradient + own, tl.load(gradient + own, inside, other=0) + flow * r, inside)
            meeting += 1
            wait_for_all(counter, meeting, PROGRAMS)
        for tile in range(tl.program_id(0), tiles, PROGRAMS):
            row, column, inside, own = tile_of(tile, batch, hidden, ROWS, COLUMNS)
            total = tl.load(gradient + own, inside, other=0)
            total = product(
                step, width, weights, width, row, column, batch, hidden, 2 * hidden, total, DEPTH, PRECISION
            )
            if LINEAR_BEFORE_RESET:
                total = product(
                    reset + t * batch * hidden, hidden, weights + 2 * hidden, width, row, column, batch, hidden, hidden,
                    total, DEPTH, PRECISION,
                )  # fmt: skip
            tl.store(gradient + own, total, inside)
