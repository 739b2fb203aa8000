"""LSTMTraining and LSTMGrad as ONNX functions: Scan over time, everything else in large matrix products."""

from collections.abc import Sequence
from typing import NamedTuple

from onnx import TensorProto

from onnxgrad.functions.body import Body, Value
from onnxgrad.functions.recurrent import (
    Cast,
    alive_rows,
    apply,
    clamp,
    derivative,
    for_all_steps,
    in_reverse,
    padded,
    pick,
    plus,
    transposed,
)
from onnxgrad.ops.families.activations import Chosen, choose
from onnxgrad.ops.families.recurrent import DIRECTIONS


class Settings(NamedTuple):
    """What the body's structure depends on."""

    input_forget: int
    clip: float | None
    activations: list[Chosen]
    backwards: tuple[bool, ...]

    def clamp(self, o: Body, x: Value) -> Value:
        return x if self.clip is None else clamp(o, x, -self.clip, self.clip)


def _settings(
    input_forget: int,
    direction: str,
    activations: Sequence[str] | None,
    activation_alpha: Sequence[float] | None,
    activation_beta: Sequence[float] | None,
    clip: float | None,
) -> Settings:
    backwards = DIRECTIONS[direction]
    chosen = choose(activations, activation_alpha, activation_beta, ("Sigmoid", "Tanh", "Tanh"), len(backwards))
    return Settings(input_forget, None if clip == float("inf") else clip, chosen, backwards)


class Sizes(NamedTuple):
    """S, N and H, each as a vector of one element."""

    steps: Value
    rows: Value
    hidden: Value


def _sizes(o: Body, X: Value, R: Value) -> Sizes:
    shape = o.Shape(X)
    return Sizes(o.slice(shape, 0, 1), o.slice(shape, 1, 2), o.slice(o.Shape(R), 2, 3))


def _split(o: Body, x: Value, parts: int, sizes: Sizes) -> list[Value]:
    """Parts of H along the last axis."""
    return o.nodes("Split", parts, x, o.dims(*[sizes.hidden] * parts), axis=-1)


def _given(o: Body, sizes: Sizes, X: Value, **more: Value | None) -> list[Value | None]:
    """The inputs, None where absent."""

    def tail(name: str) -> list[Value]:
        if name == "dHAll":
            return [o.slice(o.Shape(more["HAll"]), 1)]
        wide = {"B": 8, "P": 3}.get(name)
        return [sizes.rows, sizes.hidden] if wide is None else [sizes.hidden * wide]

    return [
        X,
        *(o.given(v, X, o.dims(0, *tail(name))) if v is not None and v.guarded else v for name, v in more.items()),
    ]


def _bias(o: Body, B: Value | None, d: int, sizes: Sizes) -> Value | None:
    """The sum of both biases, for all steps."""
    if B is None:
        return None
    halves = o.nodes("Split", 2, pick(o, B, d), o.dims(sizes.hidden * 4, sizes.hidden * 4), axis=0)
    return for_all_steps(o, halves[0] + halves[1])


def _peepholes(o: Body, P: Value | None, d: int, sizes: Sizes) -> list[Value | None]:
    """Of i, o and f."""
    return [None] * 3 if P is None else [*_split(o, pick(o, P, d), 3, sizes)]


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
    settings = _settings(input_forget, direction, activations, activation_alpha, activation_beta, clip)

    def compute(work: Cast) -> list[Value]:
        sizes = _sizes(o, X, R)
        alive = alive_rows(o, sizes.steps, sizes.rows, SL)
        wide = [None if v is None else work(v) for v in _given(o, sizes, X=X, W=W, R=R, B=B, Ht0=Ht0, Ct0=Ct0, P=P)]
        results = [_forward(o, wide, alive, d, sizes, settings) for d in range(len(settings.backwards))]
        HAll, HFinal, CFinal, CAll, IOFC = zip(*results, strict=True)
        every = [o.Concat(*values, axis=1) for values in (HAll, CAll, IOFC)]
        last = [o.Concat(*values, axis=0) for values in (HFinal, CFinal)]
        return [every[0], *last, *every[1:]]

    return o.in_work_type(X, compute)


def _forward(
    o: Body, inputs: Sequence[Value | None], alive: Value, d: int, sizes: Sizes, settings: Settings
) -> tuple[Value, ...]:
    """One direction's HAll [S,1,N,H], HFinal and CFinal [1,N,H], CAll [S,1,N,H] and IOFC [S,1,N,4H]."""
    X, W, R, B, Ht0, Ct0, P = inputs
    assert X and W and R
    x = padded(o, X)
    f, g, h = settings.activations[3 * d : 3 * d + 3]
    before = plus(x @ transposed(o, pick(o, W, d)), _bias(o, B, d, sizes))
    recurrent = transposed(o, pick(o, R, d))
    Pi, Po, Pf = _peepholes(o, P, d, sizes)
    zeros = o.fill(0, o.dims(sizes.rows, sizes.hidden), x)
    state, cell = (zeros if v is None else pick(o, v, d) for v in (Ht0, Ct0))

    def step(state: Value, cell: Value, before: Value, alive: Value) -> list[Value]:
        inner_i, inner_o, inner_f, inner_c = _split(o, before + state @ recurrent, 4, sizes)
        gate_i = apply(o, f, settings.clamp(o, _peeping(inner_i, Pi, cell)))
        inner_f = settings.clamp(o, _peeping(inner_f, Pf, cell))
        gate_f = 1.0 - gate_i if settings.input_forget else apply(o, f, inner_f)
        candidate = apply(o, g, settings.clamp(o, inner_c))
        new_cell = gate_f * cell + gate_i * candidate
        gate_o = apply(o, f, settings.clamp(o, _peeping(inner_o, Po, new_cell)))
        new_state, zero = gate_o * apply(o, h, new_cell), o.like(0.0, new_cell)
        iofc = o.Concat(gate_i, gate_o, gate_f, candidate, axis=-1)
        kept = [o.Where(alive, new, old) for new, old in ((new_state, state), (new_cell, cell))]
        return [*kept, *(o.Where(alive, v, zero) for v in (new_state, new_cell, iofc))]

    backwards = settings.backwards[d]
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
    settings = _settings(input_forget, direction, activations, activation_alpha, activation_beta, clip)

    def compute(work: Cast) -> list[Value]:
        sizes = _sizes(o, X, R)
        alive = alive_rows(o, sizes.steps, sizes.rows, SL)
        given = _given(
            o, sizes, X=X, W=W, R=R, B=B, Ht0=Ht0, Ct0=Ct0, P=P, HAll=HAll, CAll=CAll, IOFC=IOFC, dHAll=dHAll,
            dHFinal=dHFinal, dCFinal=dCFinal,
        )  # fmt: skip
        wide = [None if v is None else work(v) for v in given]
        results = [_backward(o, wide, alive, d, sizes, settings) for d in range(len(settings.backwards))]
        dX, *others = zip(*results, strict=True)
        total = dX[0] if len(dX) == 1 else dX[0] + dX[1]
        return [total, *(o.Concat(*(o.Unsqueeze(v, [0]) for v in values), axis=0) for values in others)]

    return o.in_work_type(X, compute)


def _backward(
    o: Body, inputs: Sequence[Value | None], alive: Value, d: int, sizes: Sizes, settings: Settings
) -> list[Value]:
    """dX of one direction, and its dW, dR, dB, dH0, dC0 and dP."""
    X, W, R, B, Ht0, Ct0, P, HAll, CAll, IOFC, dHAll, dHFinal, dCFinal = inputs
    assert X and W and R and HAll and CAll and IOFC
    f, g, h = settings.activations[3 * d : 3 * d + 3]
    backwards, zero = settings.backwards[d], o.like(0.0, X)
    zeros = o.fill(0, o.dims(sizes.rows, sizes.hidden), X)

    def from_last(x: Value) -> Value:
        """In the order in which the gradient comes through: a backward direction's last step is the first in time."""
        return x if backwards else in_reverse(o, x)

    alive = from_last(alive)
    ran = o.Cast(o.slice(padded(o, o.Cast(alive, to=TensorProto.INT32)), 1), to=TensorProto.BOOL)

    def living(x: Value) -> Value:
        """Past a row's length there may be anything, NaN too, and nothing of it may get through."""
        return o.Where(alive, x, zero)

    def before_step(states: Value, first: Value | None) -> Value:
        """The state before a step: the one after the step that follows here, if the row ran then, or the first one."""
        follows = o.slice(padded(o, states), 1)
        return living(o.Where(ran, follows, zeros if first is None else pick(o, first, d)))

    x = living(from_last(padded(o, X)))
    gate_i, gate_o, gate_f, candidate = _split(o, living(from_last(padded(o, pick(o, IOFC, d, 1)))), 4, sizes)
    cells = from_last(padded(o, pick(o, CAll, d, 1)))
    state, cell = before_step(from_last(padded(o, pick(o, HAll, d, 1))), Ht0), before_step(cells, Ct0)
    new_cell = living(cells)
    Wd, Rd = pick(o, W, d), pick(o, R, d)
    Pi, Po, Pf = _peepholes(o, P, d, sizes)

    # δo = G∘of_o and so on: only what needs the gradients G and Gc of state and cell is left for the loop.
    shown = apply(o, h, new_cell)
    of_o, of_cell = shown * derivative(o, f, gate_o), gate_o * derivative(o, h, shown)
    of_i = (candidate - cell if settings.input_forget else candidate) * derivative(o, f, gate_i)
    of_f = o.fill(0, o.Shape(cell), cell) if settings.input_forget else cell * derivative(o, f, gate_f)
    of_c = gate_i * derivative(o, g, candidate)
    if settings.clip is not None:
        before = plus(x @ transposed(o, Wd), _bias(o, B, d, sizes)) + state @ transposed(o, Rd)
        inner = _split(o, before, 4, sizes)
        seen = [_peeping(*v) for v in zip(inner, (Pi, Po, Pf, None), (cell, new_cell, cell, cell), strict=True)]
        within = [o.CastLike(o.Abs(v) <= settings.clip, x) for v in seen]
        of_i, of_o, of_f, of_c = (v * w for v, w in zip((of_i, of_o, of_f, of_c), within, strict=True))

    def step(G: Value, Gc: Value, alive: Value, gate_f: Value, *rest: Value) -> list[Value]:
        of_cell, of_i, of_o, of_f, of_c, *gradient = rest
        through, to_cell = (o.Where(alive, v, zero) for v in (G + gradient[0] if gradient else G, Gc))
        δo = through * of_o
        to_cell = to_cell + through * of_cell
        to_cell = _peeping(to_cell, Po, δo)
        δi, δf, δc = to_cell * of_i, to_cell * of_f, to_cell * of_c
        δ = o.Concat(δi, δo, δf, δc, axis=-1)
        back_c = _peeping(_peeping(to_cell * gate_f, Pi, δi), Pf, δf)
        return [o.Where(alive, δ @ Rd, G), o.Where(alive, back_c, Gc), o.Where(alive, δ, zero)]

    gradients = [] if dHAll is None else [from_last(padded(o, pick(o, dHAll, d, 1)))]
    G, Gc = (zeros if v is None else pick(o, v, d) for v in (dHFinal, dCFinal))
    factors = [of_cell, of_i, of_o, of_f, of_c]
    dH0, dC0, δ = o.scan([G, Gc], [alive, gate_f, *factors, *gradients], step, rank=2)

    def rows(x: Value) -> Value:
        """All steps and rows as one matrix."""
        return o.Reshape(x, o.dims((sizes.steps + 1) * sizes.rows, o.slice(o.Shape(x), 2)), allowzero=1)

    dX = o.slice(from_last(δ @ Wd), 0, -1)  # the order of time again
    dW, dR = (transposed(o, rows(δ)) @ rows(v) for v in (x, state))
    δi, δo, δf, _ = _split(o, δ, 4, sizes)
    peeped = o.Concat(δi * cell, δo * new_cell, δf * cell, axis=-1)
    sums, dP = (o.ReduceSum(v, [0, 1], keepdims=0) for v in (o.Concat(δ, δ, axis=-1), peeped))
    return [dX, dW, dR, sums, dH0, dC0, dP]
