"""AveragePoolGrad as an ONNX function."""

from collections.abc import Callable
from typing import Any

from onnxgrad.functions.body import Body, Value
from onnxgrad.functions.windows import shape_of, starts
from onnxgrad.ops.families.windows import PoolSettings, pool_settings


def _shares(
    o: Body, image: Value, windows: Value, a: int, given: PoolSettings, count_include_pad: int, typed: Value
) -> Value:
    """A matrix: the share that each element of the image has of each window, along one axis."""
    size, begin, padded = starts(o, image, windows, a, given)
    kernel, dilation = given.kernel[a], given.dilations[a]
    begin = o.Unsqueeze(begin, [1])
    distance = o.Range(o.like(0, size), size, o.like(1, size)) - begin
    inside = (distance > -1) & (distance < given.extents[a])
    if dilation > 1:
        inside = inside & o.Mod(distance, o.like(dilation, size)).equals(0)
    counted = begin + o.Range(o.like(0, size), o.like(kernel * dilation, size), o.like(dilation, size))
    counted = counted < padded if count_include_pad else (counted > -1) & (counted < size)
    count = o.ReduceSum(o.CastLike(counted, typed), [1], keepdims=1)
    return o.CastLike(inside, typed) / o.Max(count, o.like(1, typed))


def average_pool_grad(
    o: Body, dY: Value, shape: Value, auto_pad: str, ceil_mode: int, count_include_pad: int, dilations: Any,
    kernel_shape: Any, pads: Any, strides: Any,
) -> list[Value]:  # fmt: skip
    """One product for each axis, the last one first, which then becomes the first."""
    given = pool_settings(auto_pad, ceil_mode, dilations, kernel_shape, pads, strides)
    rank = len(given.kernel)

    def compute(work: Callable[[Value], Value]) -> list[Value]:
        windows, image = (shape_of(o, dims, given) for dims in (o.Shape(dY), shape))
        result = o.Reshape(work(dY), windows, allowzero=1)
        for a in reversed(range(rank)):
            result = result @ _shares(o, image, windows, a, given, count_include_pad, result)
            if rank > 1:
                result = o.Transpose(result, perm=[0, 1, rank + 1, *range(2, rank + 1)])
        return [result]

    return o.in_work_type(dY, compute)
