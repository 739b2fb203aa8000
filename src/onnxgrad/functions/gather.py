"""GatherGrad as an ONNX function."""

from collections.abc import Callable

from onnx import TensorProto

from onnxgrad.functions.body import INT64_MAX, Body, Value


def gather_grad(o: Body, shape: Value, indices: Value, dY: Value, axis: int) -> list[Value]:
    """ScatterElements on [outer, size, inner]; ScatterND would lose repeats, onnxruntime runs it on many threads."""
    dims = o.Cast(shape, to=TensorProto.INT64)
    before, after = o.slice(dims, 0, axis), o.slice(dims, axis + 1 if axis != -1 else INT64_MAX)
    size = o.Gather(dims, [axis])
    # The 1 is for products of nothing.
    outer, inner = (o.ReduceProd(o.dims(1, part), keepdims=1) for part in (before, after))
    count = o.Reshape(o.Size(indices), [1])
    each = o.Reshape(o.Cast(indices, to=TensorProto.INT64), o.dims(1, count, 1), allowzero=1)
    everywhere = o.Expand(each, o.dims(outer, count, inner))

    def add_up(work: Callable[[Value], Value]) -> list[Value]:
        rows = work(o.Reshape(dY, o.dims(outer, count, inner), allowzero=1))
        zeros = o.fill(0, o.dims(outer, size, inner), rows)
        return [o.ScatterElements(zeros, everywhere, rows, axis=1, reduction="add")]

    return [o.Reshape(dX, dims, allowzero=1) for dX in o.in_work_type(dY, add_up)]
