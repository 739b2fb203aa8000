"""Pools: maxima go back to where they came from, means and norms are spread over their windows."""

from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.builder import builder_at_work
from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import nondiff, op, vjp
from onnxgrad.rules.convolution import Windows, integers, known, spatial, spread, windows_of
from onnxgrad.schema import OWN

PART = 2**16  # of the numbers in _max_unpool
FIRST = "Where several elements of a window tie, the first gets the gradient, as in PyTorch's pools."


def _attributes(n: NodeView, *more: str) -> dict[str, Any]:
    """Those that say how windows lie; AveragePool has dilations from opset 19 on."""
    names = ["auto_pad", "ceil_mode", "kernel_shape", "pads", "strides", "dilations", *more]
    found = {name: getattr(n, name, None) for name in names}
    if found["auto_pad"] != "NOTSET":
        found["pads"] = None
    # Nodes that share a function have all their attributes written out, empty ones, too.
    return {name: value for name, value in found.items() if value is not None and value != []}


def _has_dilated_same_pads(n: NodeView) -> bool:
    return n.auto_pad.startswith("SAME") and max(getattr(n, "dilations", None) or [1]) > 1


def _max_pool(g: Tensor, n: NodeView) -> Tensor:
    # onnxruntime's pads are not ONNX's there, but it can say where its maxima were.
    return _by_indices(g, n) if _has_dilated_same_pads(n) else op.MaxPoolGrad(g, n.X, **_attributes(n))


def _by_indices(g: Tensor, n: NodeView) -> Tensor:
    X = n.X
    size = op.ReduceProd(op.Shape(X), keepdims=1)
    dX = op.GatherElementsGrad(op.Reshape(g, [-1]), size, op.Reshape(n.Indices, [-1]), axis=0)
    if not n.storage_order or X.rank == 3:
        return op.Reshape(dX, op.Shape(X))
    # Indices count along the first spatial axis first, as if the axes stood in reverse.
    axes = [0, 1, *reversed(range(2, X.rank))]
    return op.Transpose(op.Reshape(dX, op.Gather(op.Shape(X), axes)), perm=axes)


def _at_maxima(g: Tensor, n: NodeView) -> Tensor:
    """What stands in `g` where MaxPool found its maxima in X."""
    _, indices = op.MaxPool(n.X, outputs=2, **_attributes(n))
    return op.Reshape(op.GatherElements(op.Reshape(g, [-1]), op.Reshape(indices, [-1]), axis=0), op.Shape(n.dY))


def _pool_windows(n: NodeView) -> Windows:
    windows = windows_of(n, n.X, integers(n.kernel_shape))
    if _has_dilated_same_pads(n):
        raise ValueError(_dilated_same_pads(n))
    return windows


def _dilated_same_pads(n: NodeView) -> str:
    return (
        f"auto_pad {n.auto_pad} with dilations {n.dilations} means different pads in ONNX and in onnxruntime: "
        "set pads instead"
    )


def _over_windows(g: Tensor, n: NodeView, windows: Windows) -> Tensor:
    """For each element of the image the sum of `g` over the windows it is in."""
    X = n.X
    ones = builder_at_work().constant(np.ones([1, 1, *n.kernel_shape]), g.dtype)
    alone = op.Reshape(g, op.Concat([-1, 1], spatial(g), axis=0))  # one convolution for all channels
    return op.Reshape(spread(alone, ones, windows, X), op.Shape(X))


def _average_pool(g: Tensor, n: NodeView) -> Tensor:
    if _has_dilated_same_pads(n):
        raise ValueError(_dilated_same_pads(n))
    return op.AveragePoolGrad(g, op.Shape(n.X), **_attributes(n, "count_include_pad"))


def _norm_derivative(X: Tensor, p: int) -> Tensor:
    """The derivative of |x|^p / p."""
    if p == 1:
        return op.Sign(X)
    if p == 2:
        return X
    power = op.Abs(X) ** (p - 1)
    return X ** (p - 1) if p % 2 == 0 else power * op.Sign(X)


def _over_norm(g: Tensor, Y: Tensor, p: int) -> Tensor:
    """g · Y^(1 - p); where the norm is zero, so are all of its elements, and the gradient is taken to be zero."""
    if p == 1:
        return g
    zero = Y.equals(0)
    return op.Where(zero, 0, g / op.Where(zero, 1, Y) ** (p - 1))


vjp("MaxPool", doc=FIRST, X=_max_pool)
vjp("MaxPoolGrad", domain=OWN, dY=_at_maxima, X=nondiff)
vjp("AveragePool", X=_average_pool)
vjp(
    "AveragePoolGrad",
    domain=OWN,
    dY=lambda g, n: op.AveragePool(g, **_attributes(n, "count_include_pad")),
    shape=nondiff,
)
vjp("LpPool", X=lambda g, n: _norm_derivative(n.X, n.p) * _over_windows(_over_norm(g, n.Y, n.p), n, _pool_windows(n)))


def _global_average(g: Tensor, n: NodeView) -> Tensor:
    size = known(spatial(n.X))
    mean = g / prod(size) if size is not None else g / op.CastLike(op.ReduceProd(spatial(n.X), keepdims=0), g)
    return op.Expand(mean, op.Shape(n.X))


def _global_max(g: Tensor, n: NodeView) -> Tensor:
    rows = op.Reshape(n.X, [0, 0, -1])
    chosen = op.ArgMax(rows, axis=2, keepdims=1)
    dX = op.GatherElementsGrad(op.Reshape(g, [0, 0, -1]), op.Shape(rows), chosen, axis=2)
    return op.Reshape(dX, op.Shape(n.X))


vjp("GlobalAveragePool", X=_global_average)
vjp("GlobalMaxPool", doc=FIRST, X=_global_max)
vjp("GlobalLpPool", X=lambda g, n: _norm_derivative(n.X, n.p) * _over_norm(g, n.Y, n.p))


def _max_unpool(g: Tensor, n: NodeView) -> Tensor:
    strides = n.strides or [1] * len(n.kernel_shape)
    if n.output_shape is None and all(k <= s for k, s in zip(n.kernel_shape, strides, strict=True)):
        # The maxima of windows apart from each other are, too: each element has a place to itself.
        return op.Gather(op.Reshape(g, [-1]), n.I)
    return _by_numbers(g, n)


def _by_numbers(g: Tensor, n: NodeView) -> Tensor:
    """Unpools the numbers of the elements, counted from 1, to see where each went, and which came last.

    onnxruntime's indices count in output_shape, those of onnx.reference in the shape without it. The numbers go in two
    parts, since float32 counts to 2**24.
    """
    X = n.X
    size = op.Reshape(op.Size(X), [1])
    numbers = op.Reshape(op.Range(0, op.Squeeze(size, [0]), 1), op.Shape(X))
    attributes = {"kernel_shape": n.kernel_shape, "pads": n.pads, "strides": n.strides}

    def unpooled(part: Tensor) -> Tensor:
        moved = op.MaxUnpool(op.Cast(part, to=ir.DataType.FLOAT), n.I, n.output_shape, **attributes)
        return op.Cast(moved, to=ir.DataType.INT64)

    element = op.Reshape(unpooled(numbers / PART) * PART + unpooled(op.Mod(numbers, PART) + 1), [-1])
    dX = op.GatherElementsGrad(op.Reshape(g, [-1]), size + 1, element, axis=0)
    return op.Reshape(op.Slice(dX, [1], size + 1, [0]), op.Shape(X))


vjp("MaxUnpool", X=_max_unpool, I=nondiff, output_shape=nondiff)
