"""BroadcastGradientArgs as an ONNX function."""

from onnx import TensorProto

from onnxgrad.functions.body import INT64_MAX, Body, Value


def broadcast_gradient_args(o: Body, a_shape: Value, b_shape: Value) -> list[Value]:
    lengths = [o.Shape(s) for s in (a_shape, b_shape)]
    rank = o.Max(*lengths)
    a, b = (  # -1: no such dimension
        o.Concat(o.fill(-1, rank - length, s), s, axis=0) for s, length in zip((a_shape, b_shape), lengths, strict=True)
    )
    a_stretched = ~a.equals(b) & (a.equals(-1) | (a.equals(1) & ~b.equals(-1)))
    b_stretched = ~a.equals(b) & ~a_stretched
    fits = o.Cast(~b_stretched | b.equals(1) | b.equals(-1), to=TensorProto.INT64)
    # Index 1 of one element is what stops a model whose shapes do not broadcast.
    start = o.Gather([-1], 1 - o.ReduceMin(o.dims(1, fits), keepdims=1))
    return [
        o.Slice(o.Reshape(o.NonZero(stretched), [-1]), start, [-INT64_MAX], [0], [-1])
        for stretched in (a_stretched, b_stretched)
    ]
