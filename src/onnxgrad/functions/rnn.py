"""RNNGrad as an ONNX function: Scan over time, everything else in large matrix products."""

from collections.abc import Sequence

from onnxgrad.functions.body import Body, Value
from onnxgrad.functions.recurrent import (
    BackwardSteps,
    Cast,
    Sizes,
    both_biases,
    derivative,
    joined,
    of_directions,
    padded,
    pick,
    plus,
    transposed,
)
from onnxgrad.ops.families.recurrent import Direction, settings
from onnxgrad.ops.rnn import DEFAULTS


def rnn_grad(
    o: Body,
    X: Value,
    W: Value,
    R: Value,
    B: Value | None,
    SL: Value | None,
    Ht0: Value | None,
    HAll: Value,
    dHAll: Value | None,
    dHFinal: Value | None,
    direction: str,
    activations: Sequence[str] | None,
    activation_alpha: Sequence[float] | None,
    activation_beta: Sequence[float] | None,
    clip: float | None,
) -> list[Value]:
    """dX, dW, dR, dB and dH0.

    Everything is computed in the branch that in_work_type makes, so that Scan reads from no further out: see
    Body.choose.
    """
    directions, limit = settings(DEFAULTS, direction, activations, activation_alpha, activation_beta, clip)

    def compute(work: Cast) -> list[Value]:
        given = {"W": W, "R": R, "B": B, "Ht0": Ht0, "HAll": HAll, "dHAll": dHAll, "dHFinal": dHFinal}
        each = [(of, limit) for of in directions]
        return joined(o, of_directions(o, work, 1, each, _backward, X, SL, **given))

    return o.in_work_type(X, compute)


def _backward(
    o: Body,
    inputs: Sequence[Value | None],
    alive: Value,
    d: int,
    sizes: Sizes,
    given: tuple[Direction, float | None],
) -> list[Value]:
    """dX of one direction, and its dW, dR, dB and dH0."""
    X, W, R, B, Ht0, HAll, dHAll, dHFinal = inputs
    assert X and W and R and HAll
    (backwards, (f,)), clip = given
    steps = BackwardSteps(o, d, backwards, alive, sizes, X)
    x, states = steps.living(steps.in_order(padded(o, X))), steps.of(HAll)
    state = steps.previous(states, Ht0)
    Wd, Rd = pick(o, W, d), pick(o, R, d)
    factor = derivative(o, f, steps.living(states))
    if clip is not None:
        inner = plus(x @ transposed(o, Wd), both_biases(o, B, d, sizes.hidden)) + state @ transposed(o, Rd)
        factor = factor * o.CastLike(o.Abs(inner) <= clip, x)

    def step(G: Value, alive: Value, factor: Value, *gradient: Value) -> list[Value]:
        δ = o.Where(alive, (G + gradient[0] if gradient else G) * factor, steps.zero)
        return [o.Where(alive, δ @ Rd, G), δ]

    gradients = [] if dHAll is None else [steps.of(dHAll)]
    dH0, δ = o.scan([steps.state(dHFinal)], [steps.alive, factor, *gradients], step, rank=2)
    dW, dR = (steps.weight_gradient(δ, v) for v in (x, state))
    sums = o.ReduceSum(o.Concat(δ, δ, axis=-1), [0, 1], keepdims=0)
    return [steps.input_gradient(δ, Wd), dW, dR, sums, dH0]
