"""SeededDropout and DropoutGrad as ONNX functions."""

from collections.abc import Callable

from onnx import TensorProto

from onnxgrad.functions.body import Body, Value
from onnxgrad.ops.dropout import BITS, FIRST, GAMMA, SECOND, threshold


def seeded_dropout(o: Body, data: Value, seed: Value, ratio: float) -> list[Value]:
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


def dropout_grad(o: Body, dy: Value, mask: Value, ratio: Value | None, training_mode: Value | None) -> list[Value]:
    if any(given is not None and given.guarded for given in (ratio, training_mode)):
        raise ValueError(
            "DropoutGrad: some nodes of the model have ratio and training_mode, others have not; as a function it "
            "needs all of them to agree: give each node both"
        )
    dropped: Value | None = None if training_mode is None else o.Reshape(training_mode, [])
    if ratio is not None:
        some = ~o.Cast(o.Reshape(ratio, []), to=TensorProto.DOUBLE).equals(0)  # onnxruntime has no Equal for halves
        dropped = some if dropped is None else dropped & some

    def compute(work: Callable[[Value], Value]) -> list[Value]:
        g = work(dy)
        share = o.like(0.5, g) if ratio is None else o.CastLike(o.Reshape(ratio, []), g)
        return [g / (1 - share)]

    (scaled,) = o.in_work_type(dy, compute)
    passed = o.Where(mask, scaled, o.like(0, dy))
    return [passed if dropped is None else o.Where(dropped, passed, dy)]
