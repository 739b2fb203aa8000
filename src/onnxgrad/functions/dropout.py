"""SeededDropout and DropoutGrad as ONNX functions."""

from collections.abc import Callable
from typing import Any

from onnx import TensorProto

from onnxgrad.functions.body import Body, Value
from onnxgrad.ops.dropout import BITS, FIRST, GAMMA, SECOND, threshold


def signed(o: Any, number: int) -> Any:
    """A constant of 64 bits. `o` writes nodes, as those of functions and of graphs do."""
    return o.Constant(value_int=number - 2**64 if number >= 2**63 else number)


def shifted(o: Any, x: Any, by: int) -> Any:
    """The bits of int64 numbers moved to the right; only this asks for uint64."""
    unsigned = o.Cast(x, to=TensorProto.UINT64)
    distance = o.Cast(signed(o, by), to=TensorProto.UINT64)
    return o.Cast(o.BitShift(unsigned, distance, direction="RIGHT"), to=TensorProto.INT64)


def splitmix(o: Any, z: Any) -> Any:
    """Mixes int64 numbers, which wrap around as the machine's do."""
    z = o.BitwiseXor(z, shifted(o, z, 30)) * signed(o, FIRST)
    z = o.BitwiseXor(z, shifted(o, z, 27)) * signed(o, SECOND)
    return o.BitwiseXor(z, shifted(o, z, 31))


def batch_seed(o: Any, seed: int, batch: Any) -> Any:
    """What the choices in a batch depend on, as ops/dropout.py has it."""
    return shifted(o, splitmix(o, (batch + 1) * signed(o, GAMMA) + signed(o, seed)), 1)


def seeded_dropout(o: Body, data: Value, seed: Value, ratio: float) -> list[Value]:
    """The same numbers."""
    index = o.Range(signed(o, 1), o.Size(data) + 1, signed(o, 1))
    drawn = splitmix(o, (index + o.Reshape(seed, [])) * signed(o, GAMMA))
    kept = shifted(o, drawn, 64 - BITS) > threshold(ratio) - 1
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
