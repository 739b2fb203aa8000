"""GRU, LSTM and RNN as ONNX functions: activations, sizes, rows that have ended, and the order of backward steps.

Scans run one step more than there are, in which no row is alive: Scan wants at least one step, and S may be 0.

A length outside 0 to S makes Gather fail when the model runs: onnxruntime's CPU provider and onnx.reference raise an
error. The standard leaves it open, and a runtime that does not check indices computes with whatever its Gather gives.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from onnx import TensorProto

from onnxgrad.functions.body import Body, Value
from onnxgrad.ops.families.activations import Chosen

Cast = Callable[[Value], Value]
R = TypeVar("R")


def _sigmoid(o: Body, x: Value) -> Value:
    """Written out, since onnxruntime's Sigmoid in float32 is off by some per cent where it is next to 0."""
    e = o.Exp(-o.Abs(x))
    return o.Where(x < 0.0, e, o.like(1.0, x)) / (e + 1.0)


def _softplus(o: Body, x: Value) -> Value:
    e = o.Exp(-o.Abs(x))  # never overflows
    u = e + 1.0
    # log1p(e): a factor near 1 corrects the rounding of 1 + e.
    log1p = o.Where(u.equals(1.0), e, o.Log(u) * e / o.Where(u.equals(1.0), u, u - 1.0))
    return o.Relu(x) + log1p


def _expm1(o: Body, x: Value) -> Value:
    """exp(x) - 1 for x ≤ 0, exact also near 0."""
    t = o.Tanh(x * 0.5)
    return t * 2.0 / (1.0 - t)


# ops.families.activations.ACTIVATIONS in ONNX operators: y = function(x), and dy/dx from y.
FUNCTIONS: dict[str, Callable[[Body, Value, float, float], Value]] = {
    "Sigmoid": lambda o, x, a, b: _sigmoid(o, x),
    "Tanh": lambda o, x, a, b: o.Tanh(x),
    "Relu": lambda o, x, a, b: o.Relu(x),
    "HardSigmoid": lambda o, x, a, b: clamp(o, x * a + b, 0.0, 1.0),
    "LeakyRelu": lambda o, x, a, b: o.Where(x > 0.0, x, x * a),
    "ScaledTanh": lambda o, x, a, b: o.Tanh(x * b) * a,
    "Elu": lambda o, x, a, b: o.Where(x > 0.0, x, _expm1(o, -o.Relu(-x)) * a),
    "Softsign": lambda o, x, a, b: x / (o.Abs(x) + 1.0),
    "Softplus": lambda o, x, a, b: _softplus(o, x),
    "ThresholdedRelu": lambda o, x, a, b: o.Where(x > a, x, o.like(0.0, x)),
    "Affine": lambda o, x, a, b: x * a + b,
}
DERIVATIVES: dict[str, Callable[[Body, Value, float, float], Value]] = {
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


def clamp(o: Body, x: Value, low: float, high: float) -> Value:
    """As np.clip does it, NaN stays NaN."""
    return o.Where(x > high, o.like(high, x), o.Where(x < low, o.like(low, x), x))


def clipped(o: Body, x: Value, clip: float | None) -> Value:
    """x within ±clip, if there is one."""
    return x if clip is None else clamp(o, x, -clip, clip)


def apply(o: Body, chosen: Chosen, x: Value) -> Value:
    """The activation of x."""
    return FUNCTIONS[chosen.name](o, x, chosen.alpha, chosen.beta)


def derivative(o: Body, chosen: Chosen, y: Value) -> Value:
    """The activation's derivative where its result is y."""
    return DERIVATIVES[chosen.name](o, y, chosen.alpha, chosen.beta)


class Sizes(NamedTuple):
    """S, N and H, each as a vector of one element."""

    steps: Value
    rows: Value
    hidden: Value


def sizes_of(o: Body, X: Value, R: Value) -> Sizes:
    """Read off the shapes."""
    shape = o.Shape(X)
    return Sizes(o.slice(shape, 0, 1), o.slice(shape, 1, 2), o.slice(o.Shape(R), 2, 3))


def split(o: Body, x: Value, count: int, sizes: Sizes) -> list[Value]:
    """`count` slices of H along the last axis."""
    return o.nodes("Split", count, x, o.dims(*[sizes.hidden] * count), axis=-1)


def of_directions(
    o: Body, work: Cast, gates: int, each: Sequence[Any], one: Callable[..., R], X: Value, SL: Value | None, **more: Any
) -> list[R]:
    """What `one` gives for the settings of each direction, and for inputs in the type of the computation."""
    sizes = sizes_of(o, X, more["R"])
    alive = alive_rows(o, sizes.steps, sizes.rows, SL)
    inputs = inputs_of(o, work, gates, sizes, X, **more)
    return [one(o, inputs, alive, d, sizes, of) for d, of in enumerate(each)]


def inputs_of(o: Body, work: Cast, gates: int, sizes: Sizes, X: Value, **more: Value | None) -> list[Value | None]:
    """The inputs in the type of the computation, None where absent; an input that may be absent is made empty."""

    def tail(name: str) -> list[Value]:
        if name == "dHAll":
            return [o.slice(o.Shape(more["HAll"]), 1)]
        wide = {"B": 2 * gates, "P": 3}.get(name)
        return [sizes.rows, sizes.hidden] if wide is None else [sizes.hidden * wide]

    def given(name: str, value: Value) -> Value:
        return o.given(value, X, o.dims(0, *tail(name))) if value.guarded else value

    return [work(X), *(None if value is None else work(given(name, value)) for name, value in more.items())]


def both_biases(o: Body, B: Value | None, d: int, width: Value) -> Value | None:
    """The sum of both biases of width `width`, for all steps."""
    if B is None:
        return None
    of_input, of_state = o.nodes("Split", 2, pick(o, B, d), o.dims(width, width), axis=0)
    return for_all_steps(o, of_input + of_state)


def pick(o: Body, x: Value, d: int, axis: int = 0) -> Value:
    """Direction d of a tensor, by an operator that no check stops in a branch for more directions than there are."""
    return o.ReduceSum(o.slice(x, d, d + 1, axis), [axis], keepdims=0)


def padded(o: Body, x: Value) -> Value:
    """One step of zeros more."""
    return o.Concat(x, o.fill(0, o.dims(1, o.slice(o.Shape(x), 1)), x), axis=0)


def in_reverse(o: Body, x: Value) -> Value:
    """The last step first."""
    return o.Slice(x, [-1], [-(2**63 - 1)], [0], [-1])


def alive_rows(o: Body, steps: Value, rows: Value, SL: Value | None) -> Value:
    """[S + 1, N, 1]: whether a row still runs in a step."""
    zero, one = o.like(0, steps), o.like(1, steps)
    times = o.Range(zero, o.Squeeze(steps + 1), one)
    if SL is None:
        lengths = o.Expand(steps, rows)
    else:
        there = o.given(SL, o.Cast(rows, to=TensorProto.INT32), o.ints(0))
        lengths = o.Cast(there, to=TensorProto.INT64)
        # times[length] is the length again, and an error for all but 0 to S; Gather would take -1 for the last one.
        lengths = o.Gather(times, o.Where(lengths < 0, steps + 1, lengths))
    return o.Unsqueeze(times, [1, 2]) < o.Unsqueeze(lengths, [0, 2])


def for_all_steps(o: Body, bias: Value) -> Value:
    """A bias in three dimensions: one added in a single one would make a Gemm of MatMul, which cannot be empty."""
    return o.Unsqueeze(bias, [0, 1])


def transposed(o: Body, x: Value) -> Value:
    """Of a matrix."""
    return o.Transpose(x, perm=[1, 0])


def plus(x: Value, bias: Value | None) -> Value:
    """x + bias, if there is one."""
    return x if bias is None else x + bias


class BackwardSteps:
    """The steps of one direction as its gradient takes them: from its last one, which in reverse is the first in time.

    `like` has the type of the computation.
    """

    def __init__(self, o: Body, d: int, backwards: bool, alive: Value, sizes: Sizes, like: Value) -> None:
        self._o, self._d, self._backwards, self._sizes = o, d, backwards, sizes
        self.zero = o.like(0.0, like)
        self._zeros = o.fill(0, o.dims(sizes.rows, sizes.hidden), like)
        self.alive = self.in_order(alive)
        ran = o.slice(padded(o, o.Cast(self.alive, to=TensorProto.INT32)), 1)
        self._ran_before = o.Cast(ran, to=TensorProto.BOOL)

    def in_order(self, x: Value) -> Value:
        """From the order of time to that of the gradient, and back again."""
        return x if self._backwards else in_reverse(self._o, x)

    def of(self, x: Value) -> Value:
        """This direction of a tensor [S,D,N,…], in order."""
        return self.in_order(padded(self._o, pick(self._o, x, self._d, 1)))

    def living(self, x: Value) -> Value:
        """Zeros past a row's length: there may be anything, NaN too, and nothing of it may get through."""
        return self._o.Where(self.alive, x, self.zero)

    def state(self, x: Value | None) -> Value:
        """This direction of a state [D,N,H], zeros if absent."""
        return self._zeros if x is None else pick(self._o, x, self._d)

    def previous(self, states: Value, first: Value | None) -> Value:
        """The states before each step: those after the step that follows here, if the row ran then, or the first."""
        follows = self._o.slice(padded(self._o, states), 1)
        return self.living(self._o.Where(self._ran_before, follows, self.state(first)))

    def matrix(self, x: Value) -> Value:
        """All steps and rows as one matrix."""
        rows = (self._sizes.steps + 1) * self._sizes.rows
        return self._o.Reshape(x, self._o.dims(rows, self._o.slice(self._o.Shape(x), 2)), allowzero=1)

    def weight_gradient(self, δ: Value, x: Value) -> Value:
        """Σ δᵀ · x over all steps and rows."""
        return transposed(self._o, self.matrix(δ)) @ self.matrix(x)

    def input_gradient(self, δ: Value, W: Value) -> Value:
        """δ · W, in the order of time."""
        return self._o.slice(self.in_order(δ @ W), 0, -1)


def joined(o: Body, results: Sequence[Sequence[Value]]) -> list[Value]:
    """The gradients of all directions: the sum of their dX, and the others one after the other."""
    dX, *others = zip(*results, strict=True)
    total = dX[0] if len(dX) == 1 else dX[0] + dX[1]
    return [total, *(o.Concat(*(o.Unsqueeze(v, [0]) for v in values), axis=0) for values in others)]
