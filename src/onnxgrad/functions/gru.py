"""GRUTraining and GRUGrad as ONNX functions: Scan over time, everything else in large matrix products."""

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

    linear_before_reset: int
    clip: float | None
    activations: list[Chosen]
    backwards: tuple[bool, ...]

    def clamp(self, o: Body, x: Value) -> Value:
        return x if self.clip is None else clamp(o, x, -self.clip, self.clip)


def _settings(
    linear_before_reset: int,
    direction: str,
    activations: Sequence[str] | None,
    activation_alpha: Sequence[float] | None,
    activation_beta: Sequence[float] | None,
    clip: float | None,
) -> Settings:
    backwards = DIRECTIONS[direction]
    chosen = choose(activations, activation_alpha, activation_beta, ("Sigmoid", "Tanh"), len(backwards))
    return Settings(linear_before_reset, None if clip == float("inf") else clip, chosen, backwards)


class Sizes(NamedTuple):
    """S, N and H, each as a vector of one element, and lengths of parts to split into."""

    steps: Value
    rows: Value
    hidden: Value
    two: Value  # H, H
    gates: Value  # 2H for z and r, H for the candidate


def _sizes(o: Body, X: Value, R: Value) -> Sizes:
    shape, hidden = o.Shape(X), o.slice(o.Shape(R), 2, 3)
    return Sizes(o.slice(shape, 0, 1), o.slice(shape, 1, 2), hidden, o.dims(hidden, hidden), o.dims(hidden * 2, hidden))


def _weights(o: Body, R: Value, d: int, sizes: Sizes) -> tuple[Value, Value]:
    """R of the gates z and r, and of the candidate."""
    zr, h = o.nodes("Split", 2, pick(o, R, d), sizes.gates, axis=0)
    return zr, h


def _biases(o: Body, B: Value | None, d: int, sizes: Sizes) -> tuple[Value, ...]:
    """What is added to X Wᵀ, and to the state's part of z and r, and of h; nothing without B."""
    if B is None:
        return ()
    return tuple(o.nodes("Split", 3, pick(o, B, d), o.dims(sizes.hidden * 3, sizes.gates), axis=0))


def _z_and_r(o: Body, x: Value, sizes: Sizes) -> tuple[Value, Value]:
    z, r = o.nodes("Split", 2, x, sizes.two, axis=-1)
    return z, r


def _gates_and_candidate(o: Body, x: Value, sizes: Sizes) -> tuple[Value, Value]:
    zr, h = o.nodes("Split", 2, x, sizes.gates, axis=-1)
    return zr, h


def _preactivations(
    o: Body,
    before: Value,
    state: Value,
    weights: tuple[Value, Value],
    biases: tuple[Value, ...],  # none, or three
    f: Chosen,
    sizes: Sizes,
    settings: Settings,
) -> tuple[Value, Value, Value]:
    """What z and r together, and h, are the activations of, and z and r themselves; `before` is X Wᵀ + Wb."""
    _, for_zr, for_h = biases or (None, None, None)
    Rzr, Rh = weights
    before_zr, before_h = _gates_and_candidate(o, before, sizes)
    inner_zr = plus(before_zr + state @ transposed(o, Rzr), for_zr)
    zr = apply(o, f, settings.clamp(o, inner_zr))
    _, r = _z_and_r(o, zr, sizes)
    if settings.linear_before_reset:
        inner_h = before_h + r * plus(state @ transposed(o, Rh), for_h)
    else:
        inner_h = plus(before_h + (r * state) @ transposed(o, Rh), for_h)
    return inner_zr, inner_h, zr


def gru_training(
    o: Body,
    X: Value,
    W: Value,
    R: Value,
    B: Value | None,
    SL: Value | None,
    Ht0: Value | None,
    linear_before_reset: int,
    direction: str,
    activations: Sequence[str] | None,
    activation_alpha: Sequence[float] | None,
    activation_beta: Sequence[float] | None,
    clip: float | None,
) -> list[Value]:
    """HAll, HFinal and ZRH.

    Everything is computed in the branch that in_work_type makes, so that Scan reads from no further out: see
    Body.choose.
    """
    settings = _settings(linear_before_reset, direction, activations, activation_alpha, activation_beta, clip)

    def compute(work: Cast) -> list[Value]:
        sizes = _sizes(o, X, R)
        alive = alive_rows(o, sizes.steps, sizes.rows, SL)
        wide = [None if v is None else work(v) for v in _given(o, sizes, X=X, W=W, R=R, B=B, Ht0=Ht0)]
        results = [_forward(o, wide, alive, d, sizes, settings) for d in range(len(settings.backwards))]
        HAll, HFinal, ZRH = zip(*results, strict=True)
        return [o.Concat(*HAll, axis=1), o.Concat(*HFinal, axis=0), o.Concat(*ZRH, axis=1)]

    return o.in_work_type(X, compute)


def _given(o: Body, sizes: Sizes, X: Value, **more: Value | None) -> list[Value | None]:
    """The inputs, None where absent."""
    _, rows, hidden, *_ = sizes
    tails = {
        "B": lambda: [hidden * 6],
        "Ht0": lambda: [rows, hidden],
        "dHAll": lambda: [o.slice(o.Shape(more["HAll"]), 1)],
        "dHFinal": lambda: [rows, hidden],
    }
    return [X] + [
        o.given(value, X, o.dims(0, *tails[name]())) if value is not None and value.guarded else value
        for name, value in more.items()
    ]


def _forward(
    o: Body, inputs: Sequence[Value | None], alive: Value, d: int, sizes: Sizes, settings: Settings
) -> tuple[Value, Value, Value]:
    """One direction's HAll [S,1,N,H], HFinal [1,N,H] and ZRH [S,1,N,3H]."""
    X, W, R, B, Ht0 = inputs
    assert X and W and R
    x = padded(o, X)
    f, g = settings.activations[2 * d : 2 * d + 2]
    weights, biases = _weights(o, R, d, sizes), _biases(o, B, d, sizes)
    before = plus(x @ transposed(o, pick(o, W, d)), for_all_steps(o, biases[0]) if biases else None)
    state = o.fill(0, o.dims(sizes.rows, sizes.hidden), x) if Ht0 is None else pick(o, Ht0, d)

    def step(state: Value, before: Value, alive: Value) -> list[Value]:
        _, inner_h, zr = _preactivations(o, before, state, weights, biases, f, sizes, settings)
        z, _ = _z_and_r(o, zr, sizes)
        h = apply(o, g, settings.clamp(o, inner_h))
        new, zero = (1.0 - z) * h + z * state, o.like(0.0, h)
        zrh = o.Concat(zr, h, axis=-1)
        return [o.Where(alive, new, state), o.Where(alive, new, zero), o.Where(alive, zrh, zero)]

    backwards = settings.backwards[d]
    in_order = [in_reverse(o, v) if backwards else v for v in (before, alive)]
    last, *stacked = o.scan([state], in_order, step, rank=2)
    HAll, ZRH = (o.slice(in_reverse(o, v), 0, -1) if backwards else o.slice(v, 0, -1) for v in stacked)
    return o.Unsqueeze(HAll, [1]), o.Unsqueeze(last, [0]), o.Unsqueeze(ZRH, [1])


def gru_grad(
    o: Body,
    X: Value,
    W: Value,
    R: Value,
    B: Value | None,
    SL: Value | None,
    Ht0: Value | None,
    HAll: Value,
    ZRH: Value,
    dHAll: Value | None,
    dHFinal: Value | None,
    linear_before_reset: int,
    direction: str,
    activations: Sequence[str] | None,
    activation_alpha: Sequence[float] | None,
    activation_beta: Sequence[float] | None,
    clip: float | None,
) -> list[Value]:
    """dX, dW, dR, dB and dH0."""
    settings = _settings(linear_before_reset, direction, activations, activation_alpha, activation_beta, clip)

    def compute(work: Cast) -> list[Value]:
        sizes = _sizes(o, X, R)
        alive = alive_rows(o, sizes.steps, sizes.rows, SL)
        given = _given(o, sizes, X=X, W=W, R=R, B=B, Ht0=Ht0, HAll=HAll, ZRH=ZRH, dHAll=dHAll, dHFinal=dHFinal)
        wide = [None if v is None else work(v) for v in given]
        results = [_backward(o, wide, alive, d, sizes, settings) for d in range(len(settings.backwards))]
        dX, *others = zip(*results, strict=True)
        total = dX[0] if len(dX) == 1 else dX[0] + dX[1]
        return [total, *(o.Concat(*(o.Unsqueeze(v, [0]) for v in values), axis=0) for values in others)]

    return o.in_work_type(X, compute)


def _backward(
    o: Body, inputs: Sequence[Value | None], alive: Value, d: int, sizes: Sizes, settings: Settings
) -> list[Value]:
    """dX of one direction, and its dW, dR, dB and dH0."""
    X, W, R, B, Ht0, HAll, ZRH, dHAll, dHFinal = inputs
    assert X and W and R and HAll and ZRH
    f, g = settings.activations[2 * d : 2 * d + 2]
    linear, backwards = settings.linear_before_reset, settings.backwards[d]
    zero = o.like(0.0, X)
    zeros = o.fill(0, o.dims(sizes.rows, sizes.hidden), X)

    def from_last(x: Value) -> Value:
        """In the order in which the gradient comes through: a backward direction's last step is the first in time."""
        return x if backwards else in_reverse(o, x)

    alive = from_last(alive)
    # Past a row's length there may be anything, NaN too, and nothing of it may get through.
    x = o.Where(alive, from_last(padded(o, X)), zero)
    zrh = o.Where(alive, from_last(padded(o, pick(o, ZRH, d, 1))), zero)
    zr, h = _gates_and_candidate(o, zrh, sizes)
    z, r = _z_and_r(o, zr, sizes)
    # The state before a step is the one after the step that follows here, if the row ran then, or the first one.
    first = zeros if Ht0 is None else pick(o, Ht0, d)
    states = from_last(padded(o, pick(o, HAll, d, 1)))
    ran = o.slice(padded(o, o.Cast(alive, to=TensorProto.INT32)), 1)
    state = o.Where(o.Cast(ran, to=TensorProto.BOOL), o.slice(padded(o, states), 1), first)
    state = o.Where(alive, state, zero)

    Wd, (Rzr, Rh) = pick(o, W, d), _weights(o, R, d, sizes)
    biases = tuple(for_all_steps(o, b) for b in _biases(o, B, d, sizes))
    # δz = G∘of_z, δh = G∘of_h, δr = δh∘of_r or (δh Rh)∘of_r: only what needs G is left for the loop.
    of_z, of_h = (state - h) * derivative(o, f, z), (1.0 - z) * derivative(o, g, h)
    candidate = plus(state @ transposed(o, Rh), biases[2] if biases else None) if linear else state
    of_r = candidate * derivative(o, f, r)
    if settings.clip is not None:
        before = plus(x @ transposed(o, Wd), biases[0] if biases else None)
        inner_zr, inner_h, _ = _preactivations(o, before, state, (Rzr, Rh), biases, f, sizes, settings)
        within_zr, within_h = (o.CastLike(o.Abs(v) <= settings.clip, x) for v in (inner_zr, inner_h))
        within_z, within_r = _z_and_r(o, within_zr, sizes)
        of_z, of_r, of_h = of_z * within_z, of_r * within_r, of_h * within_h

    def step(G: Value, alive: Value, z: Value, r: Value, *rest: Value) -> list[Value]:
        of_z, of_r, of_h, *gradient = rest
        through = o.Where(alive, G + gradient[0] if gradient else G, zero)
        δz, δh = through * of_z, through * of_h
        if linear:
            δr, from_h = δh * of_r, (δh * r) @ Rh
        else:
            from_h = δh @ Rh
            δr, from_h = from_h * of_r, from_h * r
        back = through * z + o.Concat(δz, δr, axis=-1) @ Rzr + from_h
        return [o.Where(alive, back, G), *(o.Where(alive, δ, zero) for δ in (δz, δr, δh))]

    gradients = [] if dHAll is None else [from_last(padded(o, pick(o, dHAll, d, 1)))]
    G = zeros if dHFinal is None else pick(o, dHFinal, d)
    dH0, δz, δr, δh = o.scan([G], [alive, z, r, of_z, of_r, of_h, *gradients], step, rank=2)
    δzr, δhr = o.Concat(δz, δr, axis=-1), δh * r if linear else δh
    δ = o.Concat(δzr, δh, axis=-1)

    def rows(x: Value) -> Value:
        """All steps and rows as one matrix."""
        return o.Reshape(x, o.dims((sizes.steps + 1) * sizes.rows, o.slice(o.Shape(x), 2)), allowzero=1)

    dX = o.slice(from_last(δ @ Wd), 0, -1)  # the order of time again
    dW = transposed(o, rows(δ)) @ rows(x)
    dRzr = transposed(o, rows(δzr)) @ rows(state)
    dRh = transposed(o, rows(δhr)) @ rows(state if linear else r * state)
    sums = o.ReduceSum(o.Concat(δ, δzr, δhr, axis=-1), [0, 1], keepdims=0)
    return [dX, dW, o.Concat(dRzr, dRh, axis=0), sums, dH0]
