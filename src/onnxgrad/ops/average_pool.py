"""AveragePoolGrad: the gradient of AveragePool."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnxgrad.function_body import Body, Value
from onnxgrad.op import op
from onnxgrad.pools import Axis, Settings, axes_of, check_windows, settings, shape_of, starts
from onnxgrad.schema import Dim, Known
from onnxgrad.tensor_types import Array, Shape, T, accumulator


def _shape_rule(
    dY: Known, shape: Known, auto_pad: str, ceil_mode: int, count_include_pad: int, dilations: Any, kernel_shape: Any,
    pads: Any, strides: Any,
) -> tuple[Dim, ...] | None:  # fmt: skip
    given = settings(auto_pad, ceil_mode, dilations, kernel_shape, pads, strides)
    dims = shape.as_shape
    check_windows(dY.dims, dims, "shape", given)
    return dims


def counts_of(axis: Axis, windows: int, count_include_pad: int) -> Array:
    """How many elements each window counts along an axis: those in the image, or in the image and its pads."""
    begin = np.arange(windows)[:, None] * axis.stride - axis.before
    places = begin + np.arange(axis.kernel) * axis.dilation
    inside = places < axis.size + axis.after if count_include_pad else (places >= 0) & (places < axis.size)
    counts: Array = inside.sum(1)
    return counts


def _shares(
    o: Body, image: Value, windows: Value, a: int, given: Settings, count_include_pad: int, typed: Value
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


def _function(
    o: Body, dY: Value, shape: Value, auto_pad: str, ceil_mode: int, count_include_pad: int, dilations: Any,
    kernel_shape: Any, pads: Any, strides: Any,
) -> list[Value]:  # fmt: skip
    """One product for each axis, the last one first, which then becomes the first."""
    given = settings(auto_pad, ceil_mode, dilations, kernel_shape, pads, strides)
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


@op("AveragePoolGrad", outputs="dX", shape=_shape_rule, function=_function)
def average_pool_grad(
    dY: T,
    shape: Shape,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Sequence[int] | None = None,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> T:
    """Gradient of AveragePool: spreads each element of dY evenly over its window, in zeros of `shape`, which is X's.

    Attributes are AveragePool's. onnxruntime-training's operator of this name takes the shape from its graph, where it
    must be known. float16 and bfloat16 add up in float32 and round once.
    """
    given = settings(auto_pad, ceil_mode, dilations, kernel_shape, pads, strides)
    axes = axes_of(shape[2:].tolist(), given)
    rank = len(axes)
    dX = np.zeros(shape, accumulator(dY.dtype))
    g = dY.astype(dX.dtype)
    for a, axis in enumerate(axes):
        counts = counts_of(axis, dY.shape[2 + a], count_include_pad)
        g = g / np.maximum(counts, 1).astype(g.dtype).reshape(-1, *[1] * (rank - 1 - a))
    for at in np.ndindex(*dY.shape[2:]):
        lines = []
        for o, axis in zip(at, axes, strict=True):
            places = o * axis.stride - axis.before + np.arange(axis.kernel) * axis.dilation
            lines.append(places[(places >= 0) & (places < axis.size)])
        dX[(slice(None), slice(None), *np.ix_(*lines))] += g[(slice(None), slice(None), *at)].reshape(
            *dY.shape[:2], *[1] * rank
        )
    return dX.astype(dY.dtype)
