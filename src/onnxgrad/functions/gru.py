"""GRUTraining and GRUGrad as ONNX functions: Scan over time, everything else in large matrix products."""

from collections.abc import Sequence
from typing import NamedTuple

from onnxgrad.functions.body import Body, Value
from onnxgrad.functions.recurrent import (
    BackwardSteps,
    Cast,
    Sizes,
    apply,
    clipped,
    derivative,
    for_all_steps,
    in_reverse,
    joined,
    of_directions,
    padded,
    pick,
    plus,
    transposed,
)
from onnxgrad.ops.families.recurrent import Direction, settings
from onnxgrad.ops.gru import DEFAULTS


class Settings(NamedTuple):
    """The attributes behind the body's structure, for one direction."""

    direction: Direction
    clip: float | None
    linear_before_reset: int


class Splits(NamedTuple):
    """Lengths of the slices that tensors are split into, computed outside of the loop over steps."""

    two: Value  # H, H
    gates: Value  # 2H for z and r, H for the candidate
    biases: Value  # 3H, 2H, H


def _splits(o: Body, hidden: Value) -> Splits:
    gates = o.dims(hidden * 2, hidden)
    return Splits(o.dims(hidden, hidden), gates, o.dims(hidden * 3, gates))


def _weights(o: Body, R: Value, d: int, splits: Splits) -> tuple[Value, Value]:
    """R of the gates z and r, and of the candidate."""
    zr, h = o.nodes("Split", 2, pick(o, R, d), splits.gates, axis=0)
    return zr, h


def _biases(o: Body, B: Value | None, d: int, splits: Splits) -> tuple[Value, ...]:
    """The biases of X Wᵀ, of the state's product for z and r, and of that for h; nothing without B."""
    if B is None:
        return ()
    return tuple(o.nodes("Split", 3, pick(o, B, d), splits.biases, axis=0))


def _z_and_r(o: Body, x: Value, splits: Splits) -> tuple[Value, Value]:
    z, r = o.nodes("Split", 2, x, splits.two, axis=-1)
    return z, r


def _gates_and_candidate(o: Body, x: Value, splits: Splits) -> tuple[Value, Value]:
    zr, h = o.nodes("Split", 2, x, splits.gates, axis=-1)
    return zr, h


def _preactivations(
    o: Body,
    before: Value,
    state: Value,
    weights: tuple[Value, Value],
    biases: tuple[Value, ...],  # none, or three
    splits: Splits,
    given: Settings,
) -> tuple[Value, Value, Value]:
    """The inputs of the activations of z and r together, and of h, and z and r themselves; `before` is X Wᵀ + Wb."""
    _, for_zr, for_h = biases or (None, None, None)
    Rzr, Rh = weights
    before_zr, before_h = _gates_and_candidate(o, before, splits)
    inner_zr = plus(before_zr + state @ transposed(o, Rzr), for_zr)
    zr = apply(o, given.direction.activations[0], clipped(o, inner_zr, given.clip))
    _, r = _z_and_r(o, zr, splits)
    if given.linear_before_reset:
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
    directions, limit = settings(DEFAULTS, direction, activations, activation_alpha, activation_beta, clip)
    each = [Settings(of, limit, linear_before_reset) for of in directions]

    def compute(work: Cast) -> list[Value]:
        results = of_directions(o, work, 3, each, _forward, X, SL, W=W, R=R, B=B, Ht0=Ht0)
        HAll, HFinal, ZRH = zip(*results, strict=True)
        return [o.Concat(*HAll, axis=1), o.Concat(*HFinal, axis=0), o.Concat(*ZRH, axis=1)]

    return o.in_work_type(X, compute)


def _forward(
    o: Body, inputs: Sequence[Value | None], alive: Value, d: int, sizes: Sizes, given: Settings
) -> tuple[Value, Value, Value]:
    """One direction's HAll [S,1,N,H], HFinal [1,N,H] and ZRH [S,1,N,3H]."""
    X, W, R, B, Ht0 = inputs
    assert X and W and R
    x = padded(o, X)
    backwards, (_, g) = given.direction
    splits = _splits(o, sizes.hidden)
    weights, biases = _weights(o, R, d, splits), _biases(o, B, d, splits)
    before = plus(x @ transposed(o, pick(o, W, d)), for_all_steps(o, biases[0]) if biases else None)
    state = o.fill(0, o.dims(sizes.rows, sizes.hidden), x) if Ht0 is None else pick(o, Ht0, d)

    def step(state: Value, before: Value, alive: Value) -> list[Value]:
        _, inner_h, zr = _preactivations(o, before, state, weights, biases, splits, given)
        z, _ = _z_and_r(o, zr, splits)
        h = apply(o, g, clipped(o, inner_h, given.clip))
        new, zero = (1.0 - z) * h + z * state, o.like(0.0, h)
        zrh = o.Concat(zr, h, axis=-1)
        return [o.Where(alive, new, state), o.Where(alive, new, zero), o.Where(alive, zrh, zero)]

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
    directions, limit = settings(DEFAULTS, direction, activations, activation_alpha, activation_beta, clip)
    each = [Settings(of, limit, linear_before_reset) for of in directions]

    def compute(work: Cast) -> list[Value]:
        given = {"W": W, "R": R, "B": B, "Ht0": Ht0, "HAll": HAll, "ZRH": ZRH, "dHAll": dHAll, "dHFinal": dHFinal}
        return joined(o, of_directions(o, work, 3, each, _backward, X, SL, **given))

    return o.in_work_type(X, compute)


def _backward(
    o: Body, inputs: Sequence[Value | None], alive: Value, d: int, sizes: Sizes, given: Settings
) -> list[Value]:
    """dX of one direction, and its dW, dR, dB and dH0."""
    X, W, R, B, Ht0, HAll, ZRH, dHAll, dHFinal = inputs
    assert X and W and R and HAll and ZRH
    (backwards, (f, g)), clip, linear = given
    splits, steps = _splits(o, sizes.hidden), BackwardSteps(o, d, backwards, alive, sizes, X)
    x = steps.living(steps.in_order(padded(o, X)))
    zr, h = _gates_and_candidate(o, steps.living(steps.of(ZRH)), splits)
    z, r = _z_and_r(o, zr, splits)
    state = steps.previous(steps.of(HAll), Ht0)
    Wd, (Rzr, Rh) = pick(o, W, d), _weights(o, R, d, splits)
    biases = tuple(for_all_steps(o, b) for b in _biases(o, B, d, splits))
    # δz = G∘of_z, δh = G∘of_h, δr = δh∘of_r or (δh Rh)∘of_r: the loop computes only the products with G.
    of_z, of_h = (state - h) * derivative(o, f, z), (1.0 - z) * derivative(o, g, h)
    candidate = plus(state @ transposed(o, Rh), biases[2] if biases else None) if linear else state
    of_r = candidate * derivative(o, f, r)
    if clip is not None:
        before = plus(x @ transposed(o, Wd), biases[0] if biases else None)
        inner_zr, inner_h, _ = _preactivations(o, before, state, (Rzr, Rh), biases, splits, given)
        within_zr, within_h = (o.CastLike(o.Abs(v) <= clip, x) for v in (inner_zr, inner_h))
        within_z, within_r = _z_and_r(o, within_zr, splits)
        of_z, of_r, of_h = of_z * within_z, of_r * within_r, of_h * within_h

    def step(G: Value, alive: Value, z: Value, r: Value, *rest: Value) -> list[Value]:
        of_z, of_r, of_h, *gradient = rest
        through = o.Where(alive, G + gradient[0] if gradient else G, steps.zero)
        δz, δh = through * of_z, through * of_h
        if linear:
            δr, from_h = δh * of_r, (δh * r) @ Rh
        else:
            from_h = δh @ Rh
            δr, from_h = from_h * of_r, from_h * r
        back = through * z + o.Concat(δz, δr, axis=-1) @ Rzr + from_h
        return [o.Where(alive, back, G), *(o.Where(alive, δ, steps.zero) for δ in (δz, δr, δh))]

    gradients = [] if dHAll is None else [steps.of(dHAll)]
    scanned = [steps.alive, z, r, of_z, of_r, of_h, *gradients]
    dH0, δz, δr, δh = o.scan([steps.state(dHFinal)], scanned, step, rank=2)
    δzr, δhr = o.Concat(δz, δr, axis=-1), δh * r if linear else δh
    δ = o.Concat(δzr, δh, axis=-1)
    dRzr = steps.weight_gradient(δzr, state)
    dRh = steps.weight_gradient(δhr, state if linear else r * state)
    sums = o.ReduceSum(o.Concat(δ, δzr, δhr, axis=-1), [0, 1], keepdims=0)
    return [steps.input_gradient(δ, Wd), steps.weight_gradient(δ, x), o.Concat(dRzr, dRh, axis=0), sums, dH0]
