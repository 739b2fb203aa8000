"""MaxPoolGrad: the gradient of MaxPool."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnxgrad.function_body import Body, Value
from onnxgrad.op import op
from onnxgrad.pools import axes_of, check_windows, settings, shape_of
from onnxgrad.schema import Dim, Known
from onnxgrad.tensor_types import T, accumulator


def _shape_rule(dY: Known, X: Known, **attributes: Any) -> tuple[Dim, ...] | None:
    check_windows(dY.dims, X.dims, "X", settings(**attributes))
    return X.dims


def _function(
    o: Body, dY: Value, X: Value, auto_pad: str, ceil_mode: int, dilations: Any, kernel_shape: Any, pads: Any,
    strides: Any,
) -> list[Value]:  # fmt: skip
    given = settings(auto_pad, ceil_mode, dilations, kernel_shape, pads, strides)
    how: dict[str, Any] = {"kernel_shape": given.kernel, "strides": given.strides, "ceil_mode": ceil_mode}
    how |= {"pads": given.pads} if auto_pad == "NOTSET" else {"auto_pad": auto_pad}
    how |= {"dilations": given.dilations} if max(given.dilations) > 1 else {}

    def compute(work: Callable[[Value], Value]) -> list[Value]:
        image, g = o.Reshape(work(X), shape_of(o, o.Shape(X), given), allowzero=1), work(dY)
        _, indices = o.nodes("MaxPool", 2, image, **how)
        zeros = o.fill(0, o.Reshape(o.Size(image), [1]), g)
        dX = o.ScatterElements(zeros, o.Reshape(indices, [-1]), o.Reshape(g, [-1]), axis=0, reduction="add")
        return [o.Reshape(dX, o.Shape(X), allowzero=1)]

    return o.in_work_type(dY, compute)


@op("MaxPoolGrad", outputs="dX", shape=_shape_rule, function=_function)
def max_pool_grad(
    dY: T,
    X: T,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Sequence[int] | None = None,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> T:
    """Gradient of MaxPool: adds each element of dY to zeros where its window has its maximum, the first of equal ones.

    The maximum is found again in X, MaxPool's input. onnxruntime-training's operator of this name works from Indices
    instead, and onnxruntime's MaxPool takes about ten times as long when it is to tell them. NaN is passed over.
    Attributes are MaxPool's. float16 and bfloat16 add up in float32 and round once.
    """
    given = settings(auto_pad, ceil_mode, dilations, kernel_shape, pads, strides)
    axes = axes_of(X.shape[2:], given)
    dX = np.zeros(X.shape, accumulator(X.dtype))
    for at in np.ndindex(*dY.shape[2:]):
        begins = [o * axis.stride - axis.before for o, axis in zip(at, axes, strict=True)]
        lines = [
            [x for x in range(begin, begin + axis.kernel * axis.dilation, axis.dilation) if 0 <= x < axis.size]
            for begin, axis in zip(begins, axes, strict=True)
        ]
        places = np.array(list(itertools.product(*lines)), np.int64).reshape(-1, len(axes))
        if not len(places) or not dY.size:
            continue
        window = X[(slice(None), slice(None), *places.T)].astype(dX.dtype)
        chosen = places[np.argmax(np.where(np.isnan(window), -np.inf, window), axis=-1)]
        n, c = np.indices(chosen.shape[:2])
        np.add.at(dX, (n, c, *np.moveaxis(chosen, -1, 0)), dY[(slice(None), slice(None), *at)].astype(dX.dtype))
    return dX.astype(X.dtype)
