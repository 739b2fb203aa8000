"""LSTMTraining and LSTMGrad as ONNX functions: Scan over time, everything else in large matrix products."""

from collections.abc import Sequence
from typing import NamedTuple

from onnxgrad.functions.body import Body, Value
from onnxgrad.functions.recurrent import (
    BackwardSteps,
    Cast,
    Sizes,
    apply,
    both_biases,
    clipped,
    derivative,
    in_reverse,
    joined,
    of_directions,
    padded,
    pick,
    plus,
    split,
    transposed,
)
from onnxgrad.ops.families.recurrent import Direction, settings
from onnxgrad.ops.lstm import DEFAULTS


class Settings(NamedTuple):
    """The attributes behind the body's structure, for one direction."""

    direction: Direction
    clip: float | None
    input_forget: int


def _peepholes(o: Body, P: Value | None, d: int, sizes: Sizes) -> list[Value | None]:
    """Of i, o and f."""
    return [None] * 3 if P is None else [*split(o, pick(o, P, d), 3, sizes)]


def _peeping(x: Value, peephole: Value | None, cell: Value) -> Value:
    return x if peephole is None else x + cell * peephole


def lstm_training(
    o: Body,
    X: Value,
    W: Value,
    R: Value,
    B: Value | None,
    SL: Value | None,
    Ht0: Value | None,
    Ct0: Value | None,
    P: Value | None,
    input_forget: int,
    direction: str,
    activations: Sequence[str] | None,
    activation_alpha: Sequence[float] | None,
    activation_beta: Sequence[float] | None,
    clip: float | None,
) -> list[Value]:
    """HAll, HFinal, CFinal, CAll and IOFC.

    Everything is computed in the branch that in_work_type makes, so that Scan reads from no further out: see
    Body.choose.
    """
    directions, limit = settings(DEFAULTS, direction, activations, activation_alpha, activation_beta, clip)
    each = [Settings(of, limit, input_forget) for of in directions]

    def compute(work: Cast) -> list[Value]:
        results = of_directions(o, work, 4, each, _forward, X, SL, W=W, R=R, B=B, Ht0=Ht0, Ct0=Ct0, P=P)
        HAll, HFinal, CFinal, CAll, IOFC = zip(*results, strict=True)
        every = [o.Concat(*values, axis=1) for values in (HAll, CAll, IOFC)]
        last = [o.Concat(*values, axis=0) for values in (HFinal, CFinal)]
        return [every[0], *last, *every[1:]]

    return o.in_work_type(X, compute)


def _forward(
    o: Body, inputs: Sequence[Value | None], alive: Value, d: int, sizes: Sizes, given: Settings
) -> tuple[Value, ...]:
    """One direction's HAll [S,1,N,H], HFinal and CFinal [1,N,H], CAll [S,1,N,H] and IOFC [S,1,N,4H]."""
    X, W, R, B, Ht0, Ct0, P = inputs
    assert X and W and R
    x = padded(o, X)
    (backwards, (f, g, h)), clip, input_forget = given
    before = plus(x @ transposed(o, pick(o, W, d)), both_biases(o, B, d, sizes.hidden * 4))
    recurrent = transposed(o, pick(o, R, d))
    Pi, Po, Pf = _peepholes(o, P, d, sizes)
    zeros = o.fill(0, o.dims(sizes.rows, sizes.hidden), x)
    state, cell = (zeros if v is None else pick(o, v, d) for v in (Ht0, Ct0))

    def step(state: Value, cell: Value, before: Value, alive: Value) -> list[Value]:
        inner_i, inner_o, inner_f, inner_c = split(o, before + state @ recurrent, 4, sizes)
        gate_i = apply(o, f, clipped(o, _peeping(inner_i, Pi, cell), clip))
        inner_f = clipped(o, _peeping(inner_f, Pf, cell), clip)
        gate_f = 1.0 - gate_i if input_forget else apply(o, f, inner_f)
        candidate = apply(o, g, clipped(o, inner_c, clip))
        new_cell = gate_f * cell + gate_i * candidate
        gate_o = apply(o, f, clipped(o, _peeping(inner_o, Po, new_cell), clip))
        new_state, zero = gate_o * apply(o, h, new_cell), o.like(0.0, new_cell)
        iofc = o.Concat(gate_i, gate_o, gate_f, candidate, axis=-1)
        kept = [o.Where(alive, new, old) for new, old in ((new_state, state), (new_cell, cell))]
        return [*kept, *(o.Where(alive, v, zero) for v in (new_state, new_cell, iofc))]

    in_order = [in_reverse(o, v) if backwards else v for v in (before, alive)]
    *finals, HAll, CAll, IOFC = o.scan([state, cell], in_order, step, rank=2)
    HAll, CAll, IOFC = (
        o.Unsqueeze(o.slice(in_reverse(o, v) if backwards else v, 0, -1), [1]) for v in (HAll, CAll, IOFC)
    )
    HFinal, CFinal = (o.Unsqueeze(v, [0]) for v in finals)
    return HAll, HFinal, CFinal, CAll, IOFC


def lstm_grad(
    o: Body,
    X: Value,
    W: Value,
    R: Value,
    SL: Value | None,
    Ht0: Value | None,
    Ct0: Value | None,
    HAll: Value,
    CAll: Value,
    IOFC: Value,
    dHAll: Value | None,
    dHFinal: Value | None,
    dCFinal: Value | None,
    B: Value | None,
    P: Value | None,
    input_forget: int,
    direction: str,
    activations: Sequence[str] | None,
    activation_alpha: Sequence[float] | None,
    activation_beta: Sequence[float] | None,
    clip: float | None,
) -> list[Value]:
    """dX, dW, dR, dB, dH0, dC0 and dP."""
    directions, limit = settings(DEFAULTS, direction, activations, activation_alpha, activation_beta, clip)
    each = [Settings(of, limit, input_forget) for of in directions]

    def compute(work: Cast) -> list[Value]:
        given = {"W": W, "R": R, "B": B, "Ht0": Ht0, "Ct0": Ct0, "P": P, "HAll": HAll, "CAll": CAll, "IOFC": IOFC}
        gradients = {"dHAll": dHAll, "dHFinal": dHFinal, "dCFinal": dCFinal}
        return joined(o, of_directions(o, work, 4, each, _backward, X, SL, **given, **gradients))

    return o.in_work_type(X, compute)


def _backward(
    o: Body, inputs: Sequence[Value | None], alive: Value, d: int, sizes: Sizes, given: Settings
) -> list[Value]:
    """dX of one direction, and its dW, dR, dB, dH0, dC0 and dP."""
    X, W, R, B, Ht0, Ct0, P, HAll, CAll, IOFC, dHAll, dHFinal, dCFinal = inputs
    assert X and W and R and HAll and CAll and IOFC
    (backwards, (f, g, h)), clip, input_forget = given
    steps = BackwardSteps(o, d, backwards, alive, sizes, X)
    x = steps.living(steps.in_order(padded(o, X)))
    gate_i, gate_o, gate_f, candidate = split(o, steps.living(steps.of(IOFC)), 4, sizes)
    cells = steps.of(CAll)
    state, cell = steps.previous(steps.of(HAll), Ht0), steps.previous(cells, Ct0)
    new_cell = steps.living(cells)
    Wd, Rd = pick(o, W, d), pick(o, R, d)
    Pi, Po, Pf = _peepholes(o, P, d, sizes)

    # δo = G∘of_o and so on: the loop computes only the products with G and Gc, the gradients of state and cell.
    shown = apply(o, h, new_cell)
    of_o, of_cell = shown * derivative(o, f, gate_o), gate_o * derivative(o, h, shown)
    of_i = (candidate - cell if input_forget else candidate) * derivative(o, f, gate_i)
    of_f = o.fill(0, o.Shape(cell), cell) if input_forget else cell * derivative(o, f, gate_f)
    of_c = gate_i * derivative(o, g, candidate)
    if clip is not None:
        before = plus(x @ transposed(o, Wd), both_biases(o, B, d, sizes.hidden * 4)) + state @ transposed(o, Rd)
        inner = split(o, before, 4, sizes)
        seen = [_peeping(*v) for v in zip(inner, (Pi, Po, Pf, None), (cell, new_cell, cell, cell), strict=True)]
        within = [o.CastLike(o.Abs(v) <= clip, x) for v in seen]
        of_i, of_o, of_f, of_c = (v * w for v, w in zip((of_i, of_o, of_f, of_c), within, strict=True))

    def step(G: Value, Gc: Value, alive: Value, gate_f: Value, *rest: Value) -> list[Value]:
        of_cell, of_i, of_o, of_f, of_c, *gradient = rest
        through, to_cell = (o.Where(alive, v, steps.zero) for v in (G + gradient[0] if gradient else G, Gc))
        δo = through * of_o
        to_cell = to_cell + through * of_cell
        to_cell = _peeping(to_cell, Po, δo)
        δi, δf, δc = to_cell * of_i, to_cell * of_f, to_cell * of_c
        δ = o.Concat(δi, δo, δf, δc, axis=-1)
        back_c = _peeping(_peeping(to_cell * gate_f, Pi, δi), Pf, δf)
        return [o.Where(alive, δ @ Rd, G), o.Where(alive, back_c, Gc), o.Where(alive, δ, steps.zero)]

    gradients = [] if dHAll is None else [steps.of(dHAll)]
    factors = [of_cell, of_i, of_o, of_f, of_c]
    firsts = [steps.state(dHFinal), steps.state(dCFinal)]
    dH0, dC0, δ = o.scan(firsts, [steps.alive, gate_f, *factors, *gradients], step, rank=2)
    dW, dR = (steps.weight_gradient(δ, v) for v in (x, state))
    δi, δo, δf, _ = split(o, δ, 4, sizes)
    peeped = o.Concat(δi * cell, δo * new_cell, δf * cell, axis=-1)
    sums, dP = (o.ReduceSum(v, [0, 1], keepdims=0) for v in (o.Concat(δ, δ, axis=-1), peeped))
    return [steps.input_gradient(δ, Wd), dW, dR, sums, dH0, dC0, dP]
