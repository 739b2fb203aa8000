"""MaxPoolGrad: the gradient of MaxPool."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxgrad.op import op
from onnxgrad.ops.families.windows import check_windows, pool_axes, pool_settings
from onnxgrad.schema import OWN, Dim, Known
from onnxgrad.tensor_types import T, accumulator


def _shape_rule(dY: Known, X: Known, **attributes: Any) -> tuple[Dim, ...] | None:
    check_windows(dY.dims, X.dims, "X", pool_settings(**attributes))
    return X.dims


@op("MaxPoolGrad", domain=OWN, outputs="dX", shape=_shape_rule)
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
    given = pool_settings(auto_pad, ceil_mode, dilations, kernel_shape, pads, strides)
    axes = pool_axes(X.shape[2:], given)
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
