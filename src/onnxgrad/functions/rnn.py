"""RNNGrad as an ONNX function: Scan over time, everything else in large matrix products."""

from collections.abc import Sequence

from onnx import TensorProto

from onnxgrad.functions.body import Body, Value
from onnxgrad.functions.recurrent import (
    Cast,
    alive_rows,
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
    backwards = DIRECTIONS[direction]
    chosen = choose(activations, activation_alpha, activation_beta, ("Tanh",), len(backwards))
    limit = None if clip == float("inf") else clip

    def compute(work: Cast) -> list[Value]:
        shape, hidden = o.Shape(X), o.slice(o.Shape(R), 2, 3)
        steps, rows = o.slice(shape, 0, 1), o.slice(shape, 1, 2)

        def given(value: Value | None, *tail: Value) -> Value | None:
            if value is None:
                return None
            return work(o.given(value, X, o.dims(0, *tail)) if value.guarded else value)

        inputs = [
            *(work(v) for v in (X, W, R)),
            given(B, hidden * 2),
            given(Ht0, rows, hidden),
            work(HAll),
            given(dHAll, o.slice(o.Shape(HAll), 1)),
            given(dHFinal, rows, hidden),
        ]
        alive = alive_rows(o, steps, rows, SL)
        sizes = steps, rows, hidden
        results = [_backward(o, inputs, alive, d, sizes, chosen[d], limit, back) for d, back in enumerate(backwards)]
        dX, *others = zip(*results, strict=True)
        total = dX[0] if len(dX) == 1 else dX[0] + dX[1]
        return [total, *(o.Concat(*(o.Unsqueeze(v, [0]) for v in values), axis=0) for values in others)]

    return o.in_work_type(X, compute)


def _backward(
    o: Body,
    inputs: Sequence[Value | None],
    alive: Value,
    d: int,
    sizes: tuple[Value, Value, Value],  # S, N and H, each as a vector of one element
    activation: Chosen,
    clip: float | None,
    backwards: bool,
) -> list[Value]:
    """dX of one direction, and its dW, dR, dB and dH0."""
    X, W, R, B, Ht0, HAll, dHAll, dHFinal = inputs
    assert X and W and R and HAll
    steps, rows, hidden = sizes
    zero, zeros = o.like(0.0, X), o.fill(0, o.dims(rows, hidden), X)

    def from_last(x: Value) -> Value:
        """In the order in which the gradient comes through: a backward direction's last step is the first in time."""
        return x if backwards else in_reverse(o, x)

    alive = from_last(alive)
    # Past a row's length there may be anything, NaN too, and nothing of it may get through.
    x = o.Where(alive, from_last(padded(o, X)), zero)
    states = from_last(padded(o, pick(o, HAll, d, 1)))
    # The state before a step is the one after the step that follows here, if the row ran then, or the first one.
    ran = o.Cast(o.slice(padded(o, o.Cast(alive, to=TensorProto.INT32)), 1), to=TensorProto.BOOL)
    before = o.Where(ran, o.slice(padded(o, states), 1), zeros if Ht0 is None else pick(o, Ht0, d))
    state = o.Where(alive, before, zero)
    Wd, Rd = pick(o, W, d), pick(o, R, d)
    factor = derivative(o, activation, o.Where(alive, states, zero))
    if clip is not None:
        bias = None
        if B is not None:
            halves = o.nodes("Split", 2, pick(o, B, d), o.dims(hidden, hidden), axis=0)
            bias = for_all_steps(o, halves[0] + halves[1])
        inner = plus(x @ transposed(o, Wd), bias) + state @ transposed(o, Rd)
        factor = factor * o.CastLike(o.Abs(inner) <= clip, x)

    def step(G: Value, alive: Value, factor: Value, *gradient: Value) -> list[Value]:
        δ = o.Where(alive, (G + gradient[0] if gradient else G) * factor, zero)
        return [o.Where(alive, δ @ Rd, G), δ]

    gradients = [] if dHAll is None else [from_last(padded(o, pick(o, dHAll, d, 1)))]
    dH0, δ = o.scan([zeros if dHFinal is None else pick(o, dHFinal, d)], [alive, factor, *gradients], step, rank=2)

    def flat(x: Value) -> Value:
        """All steps and rows as one matrix."""
        return o.Reshape(x, o.dims((steps + 1) * rows, o.slice(o.Shape(x), 2)), allowzero=1)

    dX = o.slice(from_last(δ @ Wd), 0, -1)  # the order of time again
    dW, dR = (transposed(o, flat(δ)) @ flat(v) for v in (x, state))
    return [dX, dW, dR, o.ReduceSum(o.Concat(δ, δ, axis=-1), [0, 1], keepdims=0), dH0]
