"""GRUTraining's steps on CUDA: one launch, whose programs wait for each other after every step."""

import triton
import triton.language as tl

from onnxgrad.cuda.core.activations import activate
from onnxgrad.cuda.core.grid import tile_of, wait_for_all
from onnxgrad.cuda.core.launch import float_of, to_type
from onnxgrad.cuda.core.recurrent import clamped, product, reaches


@triton.jit
def forward_steps(
    before, R, bias, lengths, states, scratch, counter, HAll, ZRH,
    steps, batch, hidden, all_step, f_alpha, f_beta, g_alpha, g_beta, clip,
    F: tl.constexpr, G: tl.constexpr, LINEAR_BEFORE_RESET: tl.constexpr, BACKWARDS: tl.constexpr,
    CLIPS: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """From the first step to the last, each program for its tiles of the states.

    `before` [S·N, 3H] is X · Wᵀ with the biases; `states` [2, N, H] holds those before and after a step, alternating;
    `scratch` [2, N, H] holds z and r∘Hp from one half of a step to the other, without linear_before_reset.
    """
    kind = states.dtype.element_ty
    f_alpha = float_of(f_alpha, kind)
    f_beta = float_of(f_beta, kind)
    g_alpha = float_of(g_alpha, kind)
    g_beta = float_of(g_beta, kind)
    clip = float_of(clip, kind)
    tiles = tl.cdiv(batch, ROWS) * tl.cdiv(hidden, COLUMNS)
    meeting = 0
    origin = tl.program_id(0).to(tl.int64) * 0  # all steps together may need 64 bits
    for s in range(steps):
        t = origin + (steps - 1 - s if BACKWARDS else s)
        old, new = states + (s % 2) * batch * hidden, states + (1 - s % 2) * batch * hidden
        if not LINEAR_BEFORE_RESET:
            for tile in range(tl.program_id(0), tiles, PROGRAMS):
                row, column, inside, own = tile_of(tile, batch, hidden, ROWS, COLUMNS)
                gate = before + (t * batch + row)[:, None] * 3 * hidden + column[None, :]
                zero = tl.zeros((ROWS, COLUMNS), kind)
                z = product(old, hidden, R, hidden, row, column, batch, hidden, hidden, zero, DEPTH, PRECISION)
                r = product(
                    old, hidden, R + hidden * hidden, hidden, row, column, batch, hidden, hidden, zero, DEPTH, PRECISION
                )
                z = activate(F, clamped(z + tl.load(gate, inside, other=0), clip, CLIPS), f_alpha, f_beta)
                r = activate(F, clamped(r + tl.load(gate + hidden, inside, other=0), clip, CLIPS), f_alpha, f_beta)
                state = tl.load(old + own, inside, other=0, cache_modifier=".cg")
                out = ZRH + t * all_step * 3 + row[:, None] * 3 * hidden + column[None, :] + hidden
                alive = reaches(t, lengths, row, batch, HAS_LENGTHS)
                tl.store(out, to_type(tl.where(alive[:, None], r, 0), ZRH.dtype.element_ty), inside)
                tl.store(scratch + own, z, inside)
                tl.store(scratch + batch * hidden + own, r * state, inside)
            meeting += 1
            wait_for_all(counter, meeting, PROGRAMS)
        for tile in range(tl.program_id(0), tiles, PROGRAMS):
            row, column, inside, own = tile_of(tile, batch, hidden, ROWS, COLUMNS)
            gate = before + (t * batch + row)[:, None] * 3 * hidden + column[None, :]
            out = ZRH + t * all_step * 3 + row[:, None] * 3 * hidden + column[None, :]
            alive = reaches(t, lengths, row, batch, HAS_LENGTHS)
            zero = tl.zeros((ROWS, COLUMNS), kind)
            state = tl.load(old + own, inside, other=0, cache_modifier=".cg")
            Rh = R + 2 * hidden * hidden
            if LINEAR_BEFORE_RESET:
                z, r, h = zero, zero, zero
                # The states are read once for all three gates.
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
                    z = tl.dot(left, tl.load(at, there, other=0), z, input_precision=PRECISION, out_dtype=kind)
                    at += hidden * hidden
                    r = tl.dot(left, tl.load(at, there, other=0), r, input_precision=PRECISION, out_dtype=kind)
                    at += hidden * hidden
                    h = tl.dot(left, tl.load(at, there, other=0), h, input_precision=PRECISION, out_dtype=kind)
                z = activate(F, clamped(z + tl.load(gate, inside, other=0), clip, CLIPS), f_alpha, f_beta)
                r = activate(F, clamped(r + tl.load(gate + hidden, inside, other=0), clip, CLIPS), f_alpha, f_beta)
                if HAS_BIAS:
                    h += tl.load(bias + column, column < hidden, other=0)[None, :]
                h = r * h
                tl.store(out + hidden, to_type(tl.where(alive[:, None], r, 0), ZRH.dtype.element_ty), inside)
            else:
                reset = scratch + batch * hidden
                h = product(reset, hidden, Rh, hidden, row, column, batch, hidden, hidden, zero, DEPTH, PRECISION)
                z = tl.load(scratch + own, inside, other=0, cache_modifier=".cg")
            h = activate(G, clamped(h + tl.load(gate + 2 * hidden, inside, other=0), clip, CLIPS), g_alpha, g_beta)
            result = (1 - z) * h + z * state
            tl.store(out, to_type(tl.where(alive[:, None], z, 0), ZRH.dtype.element_ty), inside)
            tl.store(out + 2 * hidden, to_type(tl.where(alive[:, None], h, 0), ZRH.dtype.element_ty), inside)
            tl.store(
                HAll + t * all_step + own, to_type(tl.where(alive[:, None], result, 0), HAll.dtype.element_ty), inside
            )
            tl.store(new + own, tl.where(alive[:, None], result, state), inside)
        meeting += 1
        wait_for_all(counter, meeting, PROGRAMS)
