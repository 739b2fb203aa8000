"""AveragePoolGrad: the gradient of AveragePool."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxgrad.op import op
from onnxgrad.ops.families.windows import Axis, check_windows, pool_axes, pool_settings
from onnxgrad.schema import OWN, Dim, Known
from onnxgrad.tensor_types import Array, Shape, T, accumulator


def _shape_rule(
    dY: Known, shape: Known, auto_pad: str, ceil_mode: int, count_include_pad: int, dilations: Any, kernel_shape: Any,
    pads: Any, strides: Any,
) -> tuple[Dim, ...] | None:  # fmt: skip
    given = pool_settings(auto_pad, ceil_mode, dilations, kernel_shape, pads, strides)
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


@op("AveragePoolGrad", domain=OWN, outputs="dX", shape=_shape_rule)
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
    given = pool_settings(auto_pad, ceil_mode, dilations, kernel_shape, pads, strides)
    axes = pool_axes(shape[2:].tolist(), given)
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
