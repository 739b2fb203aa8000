"""What programs of FusedElementwise mean, in NumPy: also as an operator for onnx's ReferenceEvaluator."""

import math

import ml_dtypes  # noqa: F401 - names bfloat16 to NumPy
import numpy as np
from onnx.reference.op_run import OpRun

from onnxgrad.op import OPERATORS
from onnxgrad.ops.dropout import BITS, FIRST, GAMMA, SECOND
from onnxgrad.ops.families.elementwise_program import NAME, by_program, parse_all
from onnxgrad.schema import OWN

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _drop(x, seed, scale, limit):
    z = np.arange(1, x.size + 1, dtype=np.uint64) + np.reshape(seed, -1)[:1].astype(np.uint64)
    z *= np.uint64(GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND)
    z ^= z >> np.uint64(31)
    return np.where(((z >> np.uint64(64 - BITS)) >= np.uint64(np.reshape(limit, -1)[0])).reshape(x.shape), x * scale, 0)


def _gradient(name):
    """The definition of an operator of ours; a number comes last if it has an attribute."""

    def formula(dY, X, alpha=None):
        both = np.broadcast_arrays(dY, X)
        return OPERATORS[name].definition(*both, **({} if alpha is None else {"alpha": float(alpha)}))

    return formula


MEANINGS = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Neg": np.negative, "Abs": np.abs,
    "Equal": np.equal, "Less": np.less, "Greater": np.greater, "LessOrEqual": np.less_equal,
    "GreaterOrEqual": np.greater_equal, "And": np.logical_and, "Or": np.logical_or, "Xor": np.logical_xor,
    "Not": np.logical_not, "IsNaN": np.isnan, "Where": np.where, "Min": np.minimum, "Max": np.maximum,
    "Sqrt": np.sqrt, "Reciprocal": np.reciprocal, "Exp": np.exp, "Log": np.log, "Sin": np.sin, "Cos": np.cos,
    "Erf": _erf, "Tanh": np.tanh, "Sigmoid": _sigmoid, "Relu": lambda x: np.where(x < 0, 0, x),
    "LeakyRelu": lambda x, alpha: np.where(x < 0, x * alpha, x),
    "Gelu": lambda x: x * (0.5 + 0.5 * _erf(x * math.sqrt(0.5))),
    "FastGelu": lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "QuickGelu": lambda x, alpha: x * _sigmoid(alpha * x),
    "HardSigmoid": lambda x, alpha, beta: np.clip(alpha * x + beta, 0, 1),
    "HardSwish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "Elu": lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(x)),
    "Softplus": lambda x: np.logaddexp(x, 0), "SeededDropout": _drop, "RowMean": lambda x: x.mean(-1, keepdims=True),
    **{
        name: _gradient(name)
        for name in (
            "ReluGrad", "LeakyReluGrad", "SigmoidGrad", "TanhGrad", "HardSwishGrad", "GeluGrad", "FastGeluGrad",
            "QuickGeluGrad",
        )
    },
}  # fmt: skip


def _work_type(dtype):
    return np.dtype(np.float32) if dtype in ("float16", "bfloat16") else np.dtype(dtype)


@np.errstate(all="ignore")
def evaluate(text, inputs):
    """The outputs of programs, given as text."""
    programs = parse_all(text)
    parts = zip(programs, by_program(programs, inputs), strict=True)
    return tuple(result for program, given in parts for result in _evaluate(program, given))


def _evaluate(program, inputs):
    shape = np.broadcast_shapes(*(x.shape for x in inputs))
    given, of_rows = iter(inputs), program.of_rows
    values = {}
    for line in program.lines:
        work = _work_type(line.dtype)
        if not line.operation:
            values[line.name] = np.broadcast_to(next(given).astype(work), shape)
        elif line.operation == "Constant":
            (number,) = line.arguments
            values[line.name] = np.array(number == "True" if line.dtype == "bool" else float(number), work)
        elif line.operation == "Cast":
            values[line.name] = values[line.arguments[0]].astype(work)
        else:
            values[line.name] = MEANINGS[line.operation](*(values[a] for a in line.arguments)).astype(work)
            if line.name not in of_rows:
                values[line.name] = np.broadcast_to(values[line.name], shape)
    dtypes, shapes = program.dtypes, program.shapes([x.shape for x in inputs])
    return tuple(
        np.broadcast_to(values[name], its).astype(np.dtype(dtypes[name]))
        for name, its in zip(program.results, shapes, strict=True)
    )


class Fused(OpRun):
    """For ReferenceEvaluator's `new_ops`."""

    op_domain = OWN

    def _run(self, *inputs, program=None):
        return evaluate(program, inputs)


Fused.__name__ = NAME
