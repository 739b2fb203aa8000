"""What the ONNX functions of recurrent operators share: activations, rows that have ended, and the order of steps.

Scans run one step more than there are, in which no row is alive: Scan wants at least one step, and S may be 0.

A length outside 0 to S is an error of Gather's when the model runs. onnxruntime's CPU provider and onnx.reference raise
it; the standard leaves it open, and a runtime that does not check indices goes on with whatever its Gather gives.
"""

from collections.abc import Callable

from onnx import TensorProto

from onnxgrad.functions.body import Body, Value
from onnxgrad.ops.families.activations import Chosen

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


def apply(o: Body, chosen: Chosen, x: Value) -> Value:
    """The activation of x."""
    return FUNCTIONS[chosen.name](o, x, chosen.alpha, chosen.beta)


def derivative(o: Body, chosen: Chosen, y: Value) -> Value:
    """The activation's derivative where it gave y."""
    return DERIVATIVES[chosen.name](o, y, chosen.alpha, chosen.beta)


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
