"""Pools: maxima go back to where they came from, means and norms are spread over their windows."""

from math import prod

import numpy as np

from onnxgrad.graph.builder import builder_at_work
from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import op, vjp
from onnxgrad.rules.convolution import Windows, integers, known, spatial, spread, windows_of

FIRST = "Where several elements of a window tie, the first gets the gradient, as in PyTorch's pools."


def _max_pool(g: Tensor, n: NodeView) -> Tensor:
    X = n.X
    size = op.ReduceProd(op.Shape(X), keepdims=1)
    dX = op.GatherElementsGrad(op.Reshape(g, [-1]), size, op.Reshape(n.Indices, [-1]), axis=0)
    if not n.storage_order or X.rank == 3:
        return op.Reshape(dX, op.Shape(X))
    # Indices count along the first spatial axis first, as if the axes stood in reverse.
    axes = [0, 1, *reversed(range(2, X.rank))]
    return op.Transpose(op.Reshape(dX, op.Gather(op.Shape(X), axes)), perm=axes)


def _pool_windows(n: NodeView) -> Windows:
    windows = windows_of(n, n.X, integers(n.kernel_shape))
    if n.auto_pad.startswith("SAME") and max(windows.dilations) > 1:
        raise ValueError(
            f"auto_pad {n.auto_pad} with dilations {windows.dilations} is not the same in ONNX and in onnxruntime: "
            "write the pads instead"
        )
    return windows


def _over_windows(g: Tensor, n: NodeView, windows: Windows) -> Tensor:
    """For each element of the image the sum of `g` over the windows it is in."""
    X = n.X
    ones = builder_at_work().constant(np.ones([1, 1, *n.kernel_shape]), g.dtype)
    alone = op.Reshape(g, op.Concat([-1, 1], spatial(g), axis=0))  # one convolution for all channels
    return op.Reshape(spread(alone, ones, windows, X), op.Shape(X))


def _counts(g: Tensor, n: NodeView, windows: Windows) -> list[Tensor]:
    """How many elements each window counts along each axis: those in the image, or in the image and its pads."""
    rank = windows.rank
    found = []
    for axis in range(rank):
        stride, dilation = windows.strides[axis], windows.dilations[axis]
        count, size = op.Gather(op.Shape(g), 2 + axis), op.Gather(op.Shape(n.X), 2 + axis)
        before, after = op.Gather(windows.pads, axis), op.Gather(windows.pads, rank + axis)
        start = op.Range(0, count, 1) * stride - before
        # The first that does not count is the smallest k with start + k · dilation at the limit or past it.
        limit = size + after if n.count_include_pad else size
        end = op.Min((limit - start + (dilation - 1)) / dilation, n.kernel_shape[axis])
        if not n.count_include_pad:
            end = end - op.Max((dilation - 1 - start) / dilation, 0)
        found.append(op.Reshape(end, [-1] + [1] * (rank - 1 - axis)))
    return found


def _average_pool(g: Tensor, n: NodeView) -> Tensor:
    windows = _pool_windows(n)
    pads = known(windows.pads)
    if not n.ceil_mode and (n.count_include_pad or (pads is not None and not any(pads))):
        return _over_windows(g / prod(n.kernel_shape), n, windows)
    first, *others = _counts(g, n, windows)
    for count in others:
        first = first * count
    return _over_windows(g / op.CastLike(first, g), n, windows)


def _norm_slope(X: Tensor, p: int) -> Tensor:
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
vjp("AveragePool", X=_average_pool)
vjp("LpPool", X=lambda g, n: _norm_slope(n.X, n.p) * _over_windows(_over_norm(g, n.Y, n.p), n, _pool_windows(n)))


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
vjp("GlobalLpPool", X=lambda g, n: _norm_slope(n.X, n.p) * _over_norm(g, n.Y, n.p))
