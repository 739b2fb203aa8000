"""What the ONNX functions of pools share: where windows begin and end."""

from onnxgrad.functions.body import Body, Value
from onnxgrad.ops.families.windows import PoolSettings


def shape_of(o: Body, shape: Value, given: PoolSettings) -> Value:
    """A shape, with as many dimensions as the pool has, which inference sees also in branches that are not taken."""
    rank = len(given.kernel)
    return o.slice(o.Concat(shape, o.ints(*[1] * (2 + rank)), axis=0), 0, 2 + rank)


def starts(o: Body, image: Value, windows: Value, a: int, given: PoolSettings) -> tuple[Value, Value, Value]:
    """In an ONNX function, along one axis: the image's size, where windows begin, and where the pads end."""
    rank = len(given.kernel)
    size, count = (o.Squeeze(o.slice(shape, 2 + a, 3 + a)) for shape in (image, windows))
    stride, extent = given.strides[a], given.extents[a]
    before, after = o.like(given.pads[a], size), o.like(given.pads[rank + a], size)
    if given.auto_pad.startswith("SAME"):
        needed = ((size + (stride - 1)) / stride - 1) * stride + extent - size
        total = o.Max(needed, o.like(0, size))
        smaller = total / 2
        before, after = (smaller, total - smaller) if given.auto_pad == "SAME_UPPER" else (total - smaller, smaller)
    begin = o.Range(o.like(0, size), count, o.like(1, size)) * stride - before
    return size, begin, size + after
