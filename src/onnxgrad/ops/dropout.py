"""SeededDropout: Dropout whose choice follows from a seed alone, so that its gradient is itself."""

from typing import Annotated

import numpy as np
from onnx import TensorProto

from onnxgrad.function_body import Body, Value
from onnxgrad.op import op
from onnxgrad.schema import Dim, Known
from onnxgrad.tensor_types import Array, T, TypeConstraint, accumulator

Seed = Annotated[Array, TypeConstraint("Tseed", ("int64",))]

# The generator is splitmix64: a counter, multiplied and mixed. It has no state, so any element can be drawn alone.
GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
BITS = 24  # of a draw that are compared with the ratio


def threshold(ratio: float) -> int:
    """Draws below it are dropped."""
    return int(ratio * 2**BITS + 0.5)


def _shape_rule(data: Known, seed: Known, ratio: float) -> tuple[Dim, ...] | None:
    if not 0 <= ratio < 1:
        raise ValueError(f"ratio is {ratio}, expected a number of at least 0 and under 1")
    if seed.dims is not None and len(seed.dims) != 0 and seed.dims != (1,):
        raise ValueError(f"seed has shape {list(seed.dims)}, expected a single number")
    return data.dims


def _function(o: Body, data: Value, seed: Value, ratio: float) -> list[Value]:
    """The same numbers by int64, which wraps around as the machine's do; only shifting asks for uint64."""

    def signed(number: int) -> Value:
        return o.node("Constant", value_int=number - 2**64 if number >= 2**63 else number)

    def shifted(x: Value, by: int) -> Value:
        unsigned = o.Cast(x, to=TensorProto.UINT64)
        distance = o.Cast(o.node("Constant", value_int=by), to=TensorProto.UINT64)
        return o.Cast(o.node("BitShift", unsigned, distance, direction="RIGHT"), to=TensorProto.INT64)

    def mixed(x: Value, by: int) -> Value:
        return o.node("BitwiseXor", x, shifted(x, by))

    count = o.Size(data)
    index = o.node("Range", signed(1), count + 1, signed(1))
    z = (index + o.Reshape(seed, [])) * signed(GAMMA)
    z = mixed(mixed(z, 30) * signed(FIRST), 27) * signed(SECOND)
    kept = shifted(mixed(z, 31), 64 - BITS) > threshold(ratio) - 1
    kept = o.Reshape(kept, o.Shape(data), allowzero=1)

    (scaled,) = o.in_work_type(data, lambda work: [work(data) * (1 / (1 - ratio))])
    return [o.Where(kept, scaled, o.like(0, data))]


@op("SeededDropout", outputs="output", shape=_shape_rule, function=_function)
def seeded_dropout(data: T, seed: Seed, ratio: float = 0.5) -> T:
    """Zeroes about `ratio` of the numbers and multiplies the others by 1 / (1 - ratio).

    Which ones depends on `seed`, one number, and on their positions: the same seed makes the same choice, on any device
    and in any order. So the gradient is the operator itself, applied to the gradient of the output.
    """
    with np.errstate(over="ignore"):
        z = np.arange(1, data.size + 1, dtype=np.uint64) + seed.reshape(-1)[:1].astype(np.uint64)
        z *= np.uint64(GAMMA)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND)
        z ^= z >> np.uint64(31)
    kept = (z >> np.uint64(64 - BITS)) >= threshold(ratio)
    work = accumulator(data.dtype)
    scaled = data.astype(work) * work.type(1 / (1 - ratio))
    dropped: Array = np.where(kept.reshape(data.shape), scaled, work.type(0))
    return dropped.astype(data.dtype)
