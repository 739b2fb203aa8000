"""SliceGrad as an ONNX function."""

from onnx import TensorProto

from onnxgrad.functions.body import Body, Value
from onnxgrad.ops.slice import TO_THE_END


def slice_grad(
    o: Body, dY: Value, shape: Value, starts: Value, ends: Value, axes: Value | None, steps: Value | None
) -> list[Value]:
    """dY goes where Slice finds its elements in a tensor that holds its own positions.

    Runtimes differ in what Slice does with starts and ends out of range, so they are clamped before.
    """
    start, end = (o.Cast(x, to=TensorProto.INT64) for x in (starts, ends))
    count = o.Shape(starts)

    def or_default(given: Value | None, default: Value) -> Value:
        if given is None:
            return default
        there: Value = o.Cast(o.given(given, starts, o.ints(0)), to=TensorProto.INT64)
        (chosen,) = o.choose(o.Size(there).equals(0), lambda: [default], lambda: [there])
        return chosen

    axis = or_default(axes, o.Range(o.like(0, start), o.Squeeze(count), o.like(1, start)))
    step = or_default(steps, o.fill(1, count, start))
    dim, backwards = o.Gather(shape, axis), step < 0
    start = o.Where(start < 0, start + dim, start)
    start = o.Min(o.Max(start, o.like(0, start)), o.Where(backwards, dim - 1, dim))
    to_the_end = end.equals(TO_THE_END[0]) | end.equals(TO_THE_END[1])
    end = o.Where(end < 0, end + dim, end)
    end = o.Min(o.Max(end, o.Where(backwards, o.like(-1, end), o.like(0, end))), dim)
    end = o.Where(to_the_end, o.Where(backwards, o.like(-1, end), dim), end)
    end = o.Where(end < 0, end - dim, end)  # in front of element 0, in Slice's words

    size = o.ReduceProd(shape, keepdims=0)
    positions = o.Reshape(o.Range(o.like(0, size), size, o.like(1, size)), shape, allowzero=1)
    taken = o.Slice(positions, start, end, axis, step)
    # dY takes the shape of what was read: another one is an error, though ScatterElements would not mind.
    elements = o.Reshape(dY, o.Shape(taken), allowzero=1)
    zeros = o.fill(0, o.Reshape(size, [1]), dY)
    dX = o.ScatterElements(zeros, o.Reshape(taken, [-1]), o.Reshape(elements, [-1]), axis=0)
    return [o.Reshape(dX, shape, allowzero=1)]
