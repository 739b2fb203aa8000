"""GRUTraining and GRUGrad as ONNX functions: Scan over time, everything else in large matrix products.

Both run one step more than there are, in which no row is alive: Scan wants at least one step, and S may be 0.

A length outside 0 to S is an error of Gather's when the model runs. onnxruntime's CPU provider and onnx.reference raise
it; the standard leaves it open, and a runtime that does not check indices goes on with whatever its Gather gives.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from onnx import TensorProto

from onnxgrad.activations import Chosen, choose
from onnxgrad.function_body import Body, Value

BACKWARDS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
Cast = Callable[[Value], Value]


def _sigmoid(o: Body, x: Value) -> Value:
    """Written out, since onnxruntime's Sigmoid in float32 is off by some per cent where it is next to 0."""
    e = o.Exp(-o.Abs(x))
    return o.Where(x < 0.0, e, o.like(1.0, x)) / (e + 1.0)


def _softplus(o: Body, x: Value) -> Value:
    e = o.Exp(-o.Abs(x))  # never overflows
    u = e + 1.0
    # log1p(e): what adding 1 rounded off is put right again by a factor near 1.
    log1p = o.Where(u.equals(1.0), e, o.Log(u) * e / o.Where(u.equals(1.0), u, u - 1.0))
    return o.Relu(x) + log1p


def _expm1(o: Body, x: Value) -> Value:
    """exp(x) - 1 for x ≤ 0, exact also near 0."""
    t = o.Tanh(x * 0.5)
    return t * 2.0 / (1.0 - t)


# The functions of activations.ACTIVATIONS, x and what comes out of them, y, in the words of ONNX.
FUNCTIONS: dict[str, Callable[[Body, Value, float, float], Value]] = {
    "Sigmoid": lambda o, x, a, b: _sigmoid(o, x),
    "Tanh": lambda o, x, a, b: o.Tanh(x),
    "Relu": lambda o, x, a, b: o.Relu(x),
    "HardSigmoid": lambda o, x, a, b: _clamp(o, x * a + b, 0.0, 1.0),
    "LeakyRelu": lambda o, x, a, b: o.Where(x > 0.0, x, x * a),
    "ScaledTanh": lambda o, x, a, b: o.Tanh(x * b) * a,
    "Elu": lambda o, x, a, b: o.Where(x > 0.0, x, _expm1(o, -o.Relu(-x)) * a),
    "Softsign": lambda o, x, a, b: x / (o.Abs(x) + 1.0),
    "Softplus": lambda o, x, a, b: _softplus(o, x),
    "ThresholdedRelu": lambda o, x, a, b: o.Where(x > a, x, o.like(0.0, x)),
    "Affine": lambda o, x, a, b: x * a + b,
}
SLOPES: dict[str, Callable[[Body, Value, float, float], Value]] = {
    "Sigmoid": lambda o, y, a, b: y * (1.0 - y),
    "Tanh": lambda o, y, a, b: 1.0 - y * y,
    "Relu": lambda o, y, a, b: o.CastLike(y > 0.0, y),
    "HardSigmoid": lambda o, y, a, b: o.CastLike((y > 0.0) & (y < 1.0), y) * a,
    "LeakyRelu": lambda o, y, a, b: o.Where(y > 0.0, o.like(1.0, y), o.like(a, y)),
    "ScaledTanh": lambda o, y, a, b: (-(y * y / a) + a) * b if a != 0 else y * 0.0,
    "Elu": lambda o, y, a, b: o.Where(y > 0.0, o.like(1.0, y), y + a),
    "Softsign": lambda o, y, a, b: (1.0 - o.Abs(y)) * (1.0 - o.Abs(y)),
    "Softplus": lambda o, y, a, b: -_expm1(o, -y),
    "ThresholdedRelu": lambda o, y, a, b: o.CastLike((y > a) & ~y.equals(0.0), y),
    "Affine": lambda o, y, a, b: o.fill(a, o.Shape(y), y),
}


class Settings(NamedTuple):
    """What the body's structure depends on."""

    linear_before_reset: int
    clip: float | None
    activations: list[Chosen]
    backwards: tuple[bool, ...]

    def clamp(self, o: Body, x: Value) -> Value:
        return x if self.clip is None else _clamp(o, x, -self.clip, self.clip)


def _settings(
    linear_before_reset: int,
    direction: str,
    activations: Sequence[str] | None,
    activation_alpha: Sequence[float] | None,
    activation_beta: Sequence[float] | None,
    clip: float | None,
) -> Settings:
    backwards = BACKWARDS[direction]
    chosen = choose(activations, activation_alpha, activation_beta, ("Sigmoid", "Tanh"), len(backwards))
    return Settings(linear_before_reset, None if clip == float("inf") else clip, chosen, backwards)


def _clamp(o: Body, x: Value, low: float, high: float) -> Value:
    """As np.clip does it, NaN stays NaN."""
    return o.Where(x > high, o.like(high, x), o.Where(x < low, o.like(low, x), x))


def _apply(o: Body, chosen: Chosen, x: Value) -> Value:
    return FUNCTIONS[chosen.name](o, x, chosen.alpha, chosen.beta)


def _slope(o: Body, chosen: Chosen, y: Value) -> Value:
    return SLOPES[chosen.name](o, y, chosen.alpha, chosen.beta)


def _pick(o: Body, x: Value, d: int, axis: int = 0) -> Value:
    """Direction d of a tensor, by an operator that no check stops in a branch for more directions than there are."""
    return o.ReduceSum(o.slice(x, d, d + 1, axis), [axis], keepdims=0)


def _padded(o: Body, x: Value) -> Value:
    """One step of zeros more."""
    return o.Concat(x, o.fill(0, o.dims(1, o.slice(o.Shape(x), 1)), x), axis=0)


def _reversed(o: Body, x: Value) -> Value:
    return o.Slice(x, [-1], [-(2**63 - 1)], [0], [-1])


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


def _alive(o: Body, sizes: Sizes, SL: Value | None) -> Value:
    """[S + 1, N, 1]: whether a row still runs in a step."""
    zero, one = o.like(0, sizes.steps), o.like(1, sizes.steps)
    times = o.Range(zero, o.Squeeze(sizes.steps + 1), one)
    if SL is None:
        lengths = o.Expand(sizes.steps, sizes.rows)
    else:
        there = o.given(SL, o.Cast(sizes.rows, to=TensorProto.INT32), o.ints(0))
        lengths = o.Cast(there, to=TensorProto.INT64)
        # times[length] is the length again, and an error for all but 0 to S; Gather would take -1 for the last one.
        lengths = o.Gather(times, o.Where(lengths < 0, sizes.steps + 1, lengths))
    return o.Unsqueeze(times, [1, 2]) < o.Unsqueeze(lengths, [0, 2])


def _weights(o: Body, R: Value, d: int, sizes: Sizes) -> tuple[Value, Value]:
    """R of the gates z and r, and of the candidate."""
    zr, h = o.nodes("Split", 2, _pick(o, R, d), sizes.gates, axis=0)
    return zr, h


def _biases(o: Body, B: Value | None, d: int, sizes: Sizes) -> tuple[Value, ...]:
    """What is added to X Wᵀ, and to the state's part of z and r, and of h; nothing without B."""
    if B is None:
        return ()
    return tuple(o.nodes("Split", 3, _pick(o, B, d), o.dims(sizes.hidden * 3, sizes.gates), axis=0))


def _for_all_steps(o: Body, bias: Value) -> Value:
    """A bias in three dimensions: one added in a single one would make a Gemm of MatMul, which cannot be empty."""
    return o.Unsqueeze(bias, [0, 1])


def _z_and_r(o: Body, x: Value, sizes: Sizes) -> tuple[Value, Value]:
    z, r = o.nodes("Split", 2, x, sizes.two, axis=-1)
    return z, r


def _gates_and_candidate(o: Body, x: Value, sizes: Sizes) -> tuple[Value, Value]:
    zr, h = o.nodes("Split", 2, x, sizes.gates, axis=-1)
    return zr, h


def _t(o: Body, x: Value) -> Value:
    return o.Transpose(x, perm=[1, 0])


def _plus(x: Value, bias: Value | None) -> Value:
    return x if bias is None else x + bias


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
    inner_zr = _plus(before_zr + state @ _t(o, Rzr), for_zr)
    zr = _apply(o, f, settings.clamp(o, inner_zr))
    _, r = _z_and_r(o, zr, sizes)
    if settings.linear_before_reset:
        inner_h = before_h + r * _plus(state @ _t(o, Rh), for_h)
    else:
        inner_h = _plus(before_h + (r * state) @ _t(o, Rh), for_h)
    return inner_zr, inner_h, zr


def gru_training_function(
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
        alive = _alive(o, sizes, SL)
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
    x = _padded(o, X)
    f, g = settings.activations[2 * d : 2 * d + 2]
    weights, biases = _weights(o, R, d, sizes), _biases(o, B, d, sizes)
    before = _plus(x @ _t(o, _pick(o, W, d)), _for_all_steps(o, biases[0]) if biases else None)
    state = o.fill(0, o.dims(sizes.rows, sizes.hidden), x) if Ht0 is None else _pick(o, Ht0, d)

    def step(state: Value, before: Value, alive: Value) -> list[Value]:
        _, inner_h, zr = _preactivations(o, before, state, weights, biases, f, sizes, settings)
        z, _ = _z_and_r(o, zr, sizes)
        h = _apply(o, g, settings.clamp(o, inner_h))
        new, zero = (1.0 - z) * h + z * state, o.like(0.0, h)
        zrh = o.Concat(zr, h, axis=-1)
        return [o.Where(alive, new, state), o.Where(alive, new, zero), o.Where(alive, zrh, zero)]

    backwards = settings.backwards[d]
    in_order = [_reversed(o, v) if backwards else v for v in (before, alive)]
    last, *stacked = o.scan([state], in_order, step, rank=2)
    HAll, ZRH = (o.slice(_reversed(o, v), 0, -1) if backwards else o.slice(v, 0, -1) for v in stacked)
    return o.Unsqueeze(HAll, [1]), o.Unsqueeze(last, [0]), o.Unsqueeze(ZRH, [1])


def gru_grad_function(
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
        alive = _alive(o, sizes, SL)
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
        return x if backwards else _reversed(o, x)

    alive = from_last(alive)
    # Past a row's length there may be anything, NaN too, and nothing of it may get through.
    x = o.Where(alive, from_last(_padded(o, X)), zero)
    zrh = o.Where(alive, from_last(_padded(o, _pick(o, ZRH, d, 1))), zero)
    zr, h = _gates_and_candidate(o, zrh, sizes)
    z, r = _z_and_r(o, zr, sizes)
    # The state before a step is the one after the step that follows here, if the row ran then, or the first one.
    first = zeros if Ht0 is None else _pick(o, Ht0, d)
    states = from_last(_padded(o, _pick(o, HAll, d, 1)))
    ran = o.slice(_padded(o, o.Cast(alive, to=TensorProto.INT32)), 1)
    state = o.Where(o.Cast(ran, to=TensorProto.BOOL), o.slice(_padded(o, states), 1), first)
    state = o.Where(alive, state, zero)

    Wd, (Rzr, Rh) = _pick(o, W, d), _weights(o, R, d, sizes)
    biases = tuple(_for_all_steps(o, b) for b in _biases(o, B, d, sizes))
    # δz = G∘of_z, δh = G∘of_h, δr = δh∘of_r or (δh Rh)∘of_r: only what needs G is left for the loop.
    of_z, of_h = (state - h) * _slope(o, f, z), (1.0 - z) * _slope(o, g, h)
    candidate = _plus(state @ _t(o, Rh), biases[2] if biases else None) if linear else state
    of_r = candidate * _slope(o, f, r)
    if settings.clip is not None:
        before = _plus(x @ _t(o, Wd), biases[0] if biases else None)
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

    gradients = [] if dHAll is None else [from_last(_padded(o, _pick(o, dHAll, d, 1)))]
    G = zeros if dHFinal is None else _pick(o, dHFinal, d)
    dH0, δz, δr, δh = o.scan([G], [alive, z, r, of_z, of_r, of_h, *gradients], step, rank=2)
    δzr, δhr = o.Concat(δz, δr, axis=-1), δh * r if linear else δh
    δ = o.Concat(δzr, δh, axis=-1)

    def rows(x: Value) -> Value:
        """All steps and rows as one matrix."""
        return o.Reshape(x, o.dims((sizes.steps + 1) * sizes.rows, o.slice(o.Shape(x), 2)), allowzero=1)

    dX = o.slice(from_last(δ @ Wd), 0, -1)  # the order of time again
    dW = _t(o, rows(δ)) @ rows(x)
    dRzr = _t(o, rows(δzr)) @ rows(state)
    dRh = _t(o, rows(δhr)) @ rows(state if linear else r * state)
    sums = o.ReduceSum(o.Concat(δ, δzr, δhr, axis=-1), [0, 1], keepdims=0)
    return [dX, dW, o.Concat(dRzr, dRh, axis=0), sums, dH0]
