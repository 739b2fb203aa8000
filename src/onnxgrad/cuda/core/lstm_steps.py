"""The steps of LSTMTraining and LSTMGrad on CUDA: one launch, whose programs wait for each other after every step."""

import triton
import triton.language as tl

from onnxgrad.cuda.core.activations import activate, derivative
from onnxgrad.cuda.core.grid import tile_of, wait_for_all
from onnxgrad.cuda.core.launch import float_of, to_type
from onnxgrad.cuda.core.recurrent import clamped, product, reaches


@triton.jit
def forward_steps(
    before, R, P, lengths, states, cells, counter, HAll, CAll, IOFC,
    steps, batch, hidden, all_step, f_alpha, f_beta, g_alpha, g_beta, h_alpha, h_beta, clip,
    F: tl.constexpr, G: tl.constexpr, H: tl.constexpr, INPUT_FORGET: tl.constexpr, BACKWARDS: tl.constexpr,
    CLIPS: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_PEEPHOLES: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """From the first step to the last, each program for its tiles of the states.

    `before` [S·N, 4H] is X · Wᵀ with the biases; `states` [2, N, H] holds those before and after a step, alternating;
    `cells` [N, H] are read and written by the program of their tile alone.
    """
    kind = states.dtype.element_ty
    f_alpha = float_of(f_alpha, kind)
    f_beta = float_of(f_beta, kind)
    g_alpha = float_of(g_alpha, kind)
    g_beta = float_of(g_beta, kind)
    h_alpha = float_of(h_alpha, kind)
    h_beta = float_of(h_beta, kind)
    clip = float_of(clip, kind)
    tiles = tl.cdiv(batch, ROWS) * tl.cdiv(hidden, COLUMNS)
    square = hidden * hidden
    origin = tl.program_id(0).to(tl.int64) * 0  # all steps together may need 64 bits
    for s in range(steps):
        t = origin + (steps - 1 - s if BACKWARDS else s)
        old, new = states + (s % 2) * batch * hidden, states + (1 - s % 2) * batch * hidden
        for tile in range(tl.program_id(0), tiles, PROGRAMS):
            row, column, inside, own = tile_of(tile, batch, hidden, ROWS, COLUMNS)
            gate = before + (t * batch + row)[:, None] * 4 * hidden + column[None, :]
            i = tl.load(gate, inside, other=0)
            o = tl.load(gate + hidden, inside, other=0)
            f = tl.load(gate + 2 * hidden, inside, other=0)
            c = tl.load(gate + 3 * hidden, inside, other=0)
            # The states are read once for all four gates; other programs have written them since the last step.
            for k in range(0, hidden, DEPTH):
                place = k + tl.arange(0, DEPTH)
                left = tl.load(
                    old + row[:, None] * hidden + place[None, :],
                    (row < batch)[:, None] & (place < hidden)[None, :],
                    other=0,
                    cache_modifier=".cg",
                )
                there = (column < hidden)[None, :] & (place < hidden)[:, None]
                at = R + column[None, :] * hidden + place[:, None]
                i = tl.dot(left, tl.load(at, there, other=0), i, input_precision=PRECISION, out_dtype=kind)
                o = tl.dot(left, tl.load(at + square, there, other=0), o, input_precision=PRECISION, out_dtype=kind)
                if not INPUT_FORGET:
                    f = tl.dot(
                        left, tl.load(at + 2 * square, there, other=0), f, input_precision=PRECISION, out_dtype=kind
                    )
                c = tl.dot(left, tl.load(at + 3 * square, there, other=0), c, input_precision=PRECISION, out_dtype=kind)
            cell = tl.load(cells + own, inside, other=0)
            if HAS_PEEPHOLES:
                i += _peephole(P, column, hidden) * cell
                f += _peephole(P + 2 * hidden, column, hidden) * cell
            i = activate(F, clamped(i, clip, CLIPS), f_alpha, f_beta)
            f = 1 - i if INPUT_FORGET else activate(F, clamped(f, clip, CLIPS), f_alpha, f_beta)
            c = activate(G, clamped(c, clip, CLIPS), g_alpha, g_beta)
            new_cell = f * cell + i * c
            if HAS_PEEPHOLES:
                o += _peephole(P + hidden, column, hidden) * new_cell
            o = activate(F, clamped(o, clip, CLIPS), f_alpha, f_beta)
            result = o * activate(H, new_cell, h_alpha, h_beta)
            alive = reaches(t, lengths, row, batch, HAS_LENGTHS)[:, None]
            state = tl.load(old + own, inside, other=0, cache_modifier=".cg")
            tl.store(new + own, tl.where(alive, result, state), inside)
            tl.store(cells + own, tl.where(alive, new_cell, cell), inside)
            tl.store(HAll + t * all_step + own, to_type(tl.where(alive, result, 0), HAll.dtype.element_ty), inside)
            tl.store(CAll + t * all_step + own, to_type(tl.where(alive, new_cell, 0), CAll.dtype.element_ty), inside)
            out = IOFC + t * all_step * 4 + row[:, None] * 4 * hidden + column[None, :]
            tl.store(out, to_type(tl.where(alive, i, 0), IOFC.dtype.element_ty), inside)
            tl.store(out + hidden, to_type(tl.where(alive, o, 0), IOFC.dtype.element_ty), inside)
            tl.store(out + 2 * hidden, to_type(tl.where(alive, f, 0), IOFC.dtype.element_ty), inside)
            tl.store(out + 3 * hidden, to_type(tl.where(alive, c, 0), IOFC.dtype.element_ty), inside)
        wait_for_all(counter, s + 1, PROGRAMS)


@triton.jit
def _peephole(P, column, hidden):
    return tl.load(P + column, column < hidden, other=0)[None, :]


@triton.jit
def backward_steps(
    IOFC, CAll, dHAll, previous, weights, P, within, lengths, gradient, to_cells, deltas, counter,
    steps, batch, hidden, all_step, f_alpha, f_beta, g_alpha, g_beta, h_alpha, h_beta,
    F: tl.constexpr, G: tl.constexpr, H: tl.constexpr, INPUT_FORGET: tl.constexpr, BACKWARDS: tl.constexpr,
    CLIPS: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_PEEPHOLES: tl.constexpr, HAS_ALL: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """From the last step to the first, each program for its tiles of the gradients of states and cells.

    `previous` [S·N, H] holds the cells before each step, `weights` [H, 4H] is Rᵀ, `within` [S·N, 4H] is 1 where clip
    left a gate's input as it is, `gradient` and `to_cells` [N, H] are those of state and cell. The programs write
    `deltas` [S·N, 4H], which are δi, δo, δf, δc.
    """
    kind = gradient.dtype.element_ty
    f_alpha = float_of(f_alpha, kind)
    f_beta = float_of(f_beta, kind)
    g_alpha = float_of(g_alpha, kind)
    g_beta = float_of(g_beta, kind)
    h_alpha = float_of(h_alpha, kind)
    h_beta = float_of(h_beta, kind)
    tiles = tl.cdiv(batch, ROWS) * tl.cdiv(hidden, COLUMNS)
    width = 4 * hidden
    origin = tl.program_id(0).to(tl.int64) * 0  # all steps together may need 64 bits
    for s in range(steps):
        t = origin + (s if BACKWARDS else steps - 1 - s)
        for tile in range(tl.program_id(0), tiles, PROGRAMS):
            row, column, inside, own = tile_of(tile, batch, hidden, ROWS, COLUMNS)
            alive = inside & reaches(t, lengths, row, batch, HAS_LENGTHS)[:, None]
            gate = IOFC + t * all_step * 4 + row[:, None] * width + column[None, :]
            i = tl.load(gate, alive, other=0).to(kind)
            o = tl.load(gate + hidden, alive, other=0).to(kind)
            f = tl.load(gate + 2 * hidden, alive, other=0).to(kind)
            c = tl.load(gate + 3 * hidden, alive, other=0).to(kind)
            new_cell = tl.load(CAll + t * all_step + own, alive, other=0).to(kind)
            cell = tl.load(previous + (t * batch + row)[:, None] * hidden + column[None, :], alive, other=0)
            through = tl.load(gradient + own, inside, other=0)
            flow = through
            if HAS_ALL:
                flow += tl.load(dHAll + t * all_step + own, alive, other=0).to(kind)
            kept = tl.load(to_cells + own, inside, other=0)
            at = (t * batch + row)[:, None] * width + column[None, :]
            shown = activate(H, new_cell, h_alpha, h_beta)
            δo = flow * shown * derivative(F, o, f_alpha, f_beta)
            if CLIPS:
                δo *= tl.load(within + at + hidden, inside, other=0)
            to_cell = kept + flow * o * derivative(H, shown, h_alpha, h_beta)
            if HAS_PEEPHOLES:
                to_cell += δo * _peephole(P + hidden, column, hidden)
            δi = to_cell * (c - cell if INPUT_FORGET else c) * derivative(F, i, f_alpha, f_beta)
            δc = to_cell * i * derivative(G, c, g_alpha, g_beta)
            δf = to_cell * 0 if INPUT_FORGET else to_cell * cell * derivative(F, f, f_alpha, f_beta)
            if CLIPS:
                δi *= tl.load(within + at, inside, other=0)
                δf *= tl.load(within + at + 2 * hidden, inside, other=0)
                δc *= tl.load(within + at + 3 * hidden, inside, other=0)
            δi, δo = tl.where(alive, δi, 0), tl.where(alive, δo, 0)
            δf, δc = tl.where(alive, δf, 0), tl.where(alive, δc, 0)
            tl.store(deltas + at, δi, inside)
            tl.store(deltas + at + hidden, δo, inside)
            tl.store(deltas + at + 2 * hidden, δf, inside)
            tl.store(deltas + at + 3 * hidden, δc, inside)
            back = to_cell * f
            if HAS_PEEPHOLES:
                back += δi * _peephole(P, column, hidden) + δf * _peephole(P + 2 * hidden, column, hidden)
            tl.store(to_cells + own, tl.where(alive, back, kept), inside)
            tl.store(gradient + own, tl.where(alive, 0, through), inside)
        wait_for_all(counter, s + 1, PROGRAMS)
        step = deltas + t * batch * width
        for tile in range(tl.program_id(0), tiles, PROGRAMS):
            row, column, inside, own = tile_of(tile, batch, hidden, ROWS, COLUMNS)
            total = tl.load(gradient + own, inside, other=0)
            total = product(step, width, weights, width, row, column, batch, hidden, width, total, DEPTH, PRECISION)
            tl.debug_barrier()  # another thread may write there than has read
            tl.store(gradient + own, total, inside)
        tl.debug_barrier()
