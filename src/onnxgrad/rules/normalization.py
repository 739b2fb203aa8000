"""Normalizations over the last axes or over axes of one's choice, and LRN."""

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.broadcast import sum_to_shape
from onnxgrad.graph.cast import in_type, wide_type
from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Dim, Number, Tensor
from onnxgrad.rules import op, vjp


def share_along(x: Tensor, axes: Sequence[int], dtype: ir.DataType) -> Number:
    """1 over the number of elements along the axes, which a half number could not hold: computed if not known."""
    shape = x.shape
    dims = [None if shape is None else shape[k] for k in axes]
    if all(isinstance(d, int) for d in dims):
        return 1 / max(1, math.prod(d for d in dims if isinstance(d, int)))
    count = op.ReduceProd(op.Gather(op.Shape(x), list(axes)), keepdims=0)
    return in_type(op.Reciprocal(op.Cast(count, to=ir.DataType.DOUBLE.value)), dtype)


def last_axes(axis: int, x: Tensor) -> list[int]:
    """The axis and all after it, counted from the end."""
    return list(range(axis if axis < 0 else axis - x.rank, 0))


def standardized(x: Tensor, axes: Sequence[int], epsilon: float) -> tuple[Tensor, Tensor]:
    """x with mean 0 and variance 1 along the axes, and the factor that made it so."""
    if x.dtype == ir.DataType.FLOAT and list(axes) == list(range(axes[0], x.rank)):
        xhat, _, inv = _standardized_by_one_kernel(x, axes, epsilon)
        return xhat, inv
    centred = x - op.ReduceMean(x, list(axes), keepdims=1)
    inv = inverse_rms(centred, axes, epsilon)
    return centred * inv, inv


def _standardized_by_one_kernel(x: Tensor, axes: Sequence[int], epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Standardized along its last axes, mean, and factor, which are float32: float64 goes the long way."""
    ones = op.Expand(np.ones(1, np.float32), op.Gather(op.Shape(x), list(axes)))
    return op.LayerNormalization(x, ones, axis=axes[0], epsilon=epsilon, outputs=3)


def inverse_rms(x: Tensor, axes: Sequence[int], epsilon: float) -> Tensor:
    """1 over the root of the mean square along the axes."""
    return op.Reciprocal(op.Sqrt(op.ReduceMean(x * x, list(axes), keepdims=1) + epsilon))


def through_statistics(
    g: Tensor | None,
    xhat: Tensor,
    inv: Tensor,
    axes: Sequence[int],
    *,
    centred: bool = True,
    g_mean: Tensor | None = None,
    g_inv: Tensor | None = None,
) -> Tensor:
    """The gradient of x where xhat = (x - mean) · inv along the axes, given those of xhat, mean and inv.

    dx = inv · (g - a - xhat · b): a is the mean of g, b that of g · xhat; mean and inv only add to a and b.
    """
    a = op.ReduceMean(g, list(axes), keepdims=1) if g is not None and centred else None
    b = op.ReduceMean(g * xhat, list(axes), keepdims=1) if g is not None else None
    if g_mean is not None or g_inv is not None:
        share = share_along(xhat, axes, xhat.dtype)
        if g_mean is not None:
            part = -in_type(g_mean, xhat.dtype) / inv * share
            a = part if a is None else a + part
        if g_inv is not None:
            part = in_type(g_inv, xhat.dtype) * inv * share
            b = part if b is None else b + part
    total = g
    if a is not None:
        total = -a if total is None else total - a
    if b is not None:
        total = -(xhat * b) if total is None else total - xhat * b
    assert total is not None
    return (total if total.shape == xhat.shape else op.Expand(total, op.Shape(xhat))) * inv


def statistics(x: Tensor, axes: Sequence[int], epsilon: float, *, centred: bool = True) -> tuple[Tensor | None, Tensor]:
    """The mean of x along the last axes, if it is to be centred, and the factor that then gives it variance 1."""
    if not centred:
        return None, inverse_rms(x, axes, epsilon)
    if x.dtype == ir.DataType.FLOAT:
        return _standardized_by_one_kernel(x, axes, epsilon)[1:]
    mean = op.ReduceMean(x, list(axes), keepdims=1)
    return mean, inverse_rms(x - mean, axes, epsilon)


def _is_whole(dim: Dim, of_x: Dim) -> bool:
    """Whether a dimension of the scale is known to be that of x: it is, unless it is 1."""
    return dim is not None and (dim == of_x or (isinstance(dim, int) and dim != 1))


def gradients_of_layer(
    g: Tensor, x: Tensor, scale: Tensor, mean: Tensor | None, inv: Tensor, axis: int
) -> tuple[Tensor, ...] | None:
    """Those of x, of the scale as if it were not broadcast, and, with a mean, of the bias: one node computes them.

    None where it cannot, since the scale differs from row to row.
    """
    axes = last_axes(axis, x)
    if scale.shape is None or len(scale.shape) > len(axes):
        return None
    if not x.dtype == scale.dtype == g.dtype:
        dtype = wide_type(x, scale)
        g, x, scale = in_type(g, dtype), in_type(x, dtype), in_type(scale, dtype)
    assert scale.shape is not None
    of_x = [None] * len(axes) if x.shape is None else x.shape[axes[0] :]
    if len(scale.shape) < len(axes) or not all(map(_is_whole, scale.shape, of_x)):
        scale = op.Expand(scale, op.Shape(x, start=axes[0]))
    if mean is None:
        return op.SimplifiedLayerNormalizationGrad(g, x, scale, inv, axis=axes[0], outputs=2)
    return op.LayerNormalizationGrad(g, x, scale, mean, inv, axis=axes[0], outputs=3)


class Layer:
    """What the gradients of one LayerNormalization, with or without a mean, share."""

    def __init__(self, n: NodeView, scale: Tensor, *, mean: Tensor | None, inv: Tensor | None, centred: bool) -> None:
        self.x, self.scale, self.axis, self.axes = n.X, scale, n.axis, last_axes(n.axis, n.X)
        self.centred, self.dtype = centred, wide_type(n.X, scale)
        if inv is None:
            axes = [n.X.rank + k for k in self.axes]
            mean, inv = statistics(in_type(n.X, self.dtype), axes, n.epsilon, centred=centred)
        self.mean, self.inv = mean, inv

    def by_one_node(self, g: Tensor) -> tuple[Tensor, ...] | None:
        """The gradients of X, of the scale and of the bias, if one node can compute them."""
        return gradients_of_layer(g, self.x, self.scale, self.mean, self.inv, self.axis)

    def standardized(self) -> tuple[Tensor, Tensor]:
        """X with mean 0 and variance 1, and the factor that made it so."""
        x, inv = in_type(self.x, self.dtype), in_type(self.inv, self.dtype)
        return (x if self.mean is None else x - in_type(self.mean, self.dtype)) * inv, inv

    def of_input(self, g: Tensor | None, g_mean: Tensor | None, g_inv: Tensor | None) -> Tensor:
        """The gradient of X."""
        if g is not None and g_mean is None and g_inv is None and (found := self.by_one_node(g)) is not None:
            return in_type(found[0], self.x.dtype)
        scaled = None if g is None else in_type(g, self.dtype) * in_type(self.scale, self.dtype)
        xhat, inv = self.standardized()
        dX = through_statistics(scaled, xhat, inv, self.axes, centred=self.centred, g_mean=g_mean, g_inv=g_inv)
        return in_type(dX, self.x.dtype)

    def of_scale(self, g: Tensor | None) -> Tensor | None:
        """The gradient of the scale, which may have been broadcast."""
        if g is None:
            return None
        if (found := self.by_one_node(g)) is not None:
            return in_type(sum_to_shape(found[1], self.scale), self.scale.dtype)
        xhat, _ = self.standardized()
        return in_type(sum_to_shape(in_type(g, self.dtype) * xhat, self.scale), self.scale.dtype)

    def of_shift(self, g: Tensor | None, B: Tensor) -> Tensor | None:
        """The gradient of what was added to the result, which may have been broadcast."""
        if g is not None and B.shape is not None and len(B.shape) <= len(self.axes):
            found = self.by_one_node(g)
            if found is not None:
                return in_type(sum_to_shape(found[2], B), B.dtype)
        return of_shift(g, B)


def of_shift(g: Tensor | None, B: Tensor) -> Tensor | None:
    """The gradient of what was added to the result, which may have been broadcast."""
    return None if g is None else in_type(sum_to_shape(in_type(g, wide_type(g)), B), B.dtype)


def _layer(n: NodeView) -> Layer:
    # The node has mean and deviation in the type it computed them in; it is asked for them unless they are narrow.
    kept = n.stash_type == wide_type(n.X).value
    mean, inv = (n.Mean, n.InvStdDev) if kept else (None, None)
    return Layer(n, n.Scale, mean=mean, inv=inv, centred=True)


vjp(
    "LayerNormalization",
    outputs=("Y", "Mean", "InvStdDev"),
    X=lambda g, n: _layer(n).of_input(g, n.grad(1), n.grad(2)),
    Scale=lambda g, n: _layer(n).of_scale(g),
    B=lambda g, n: _layer(n).of_shift(g, n.B),
)


def _rms(n: NodeView) -> Layer:
    return Layer(n, n.scale, mean=None, inv=None, centred=False)


vjp(
    "RMSNormalization",
    X=lambda g, n: _rms(n).of_input(g, None, None),
    scale=lambda g, n: _rms(n).of_scale(g),
)


def _lp(g: Tensor, n: NodeView) -> Tensor:
    X, axes = n.input, [n.axis]
    norm = op.ReduceL1(X, axes, keepdims=1) if n.p == 1 else op.ReduceL2(X, axes, keepdims=1)
    derivative = op.Sign(X) if n.p == 1 else n.output
    inverse = op.Reciprocal(op.Where(norm.equals(0), np.inf, norm))
    return (g - derivative * op.ReduceSum(g * n.output, axes, keepdims=1)) * inverse


vjp("LpNormalization", doc="The gradient is zero where the norm is.", input=_lp)


def _mean_variance(g: Tensor, n: NodeView) -> Tensor:
    axes, dtype = list(n.axes), wide_type(n.X)
    X, Y, g = in_type(n.X, dtype), in_type(n.Y, dtype), in_type(g, dtype)
    centred = X - op.ReduceMean(X, axes, keepdims=1)
    deviation = op.Sqrt(op.ReduceMean(centred * centred, axes, keepdims=1)) + 1e-9
    a, b = op.ReduceMean(g, axes, keepdims=1), op.ReduceMean(g * Y, axes, keepdims=1)
    return in_type((g - a - Y * b) / deviation, n.X.dtype)


vjp("MeanVarianceNormalization", X=_mean_variance)


def _mean_of_channels(x: Tensor, size: int, before: int, shape: Tensor) -> Tensor:
    """The mean of `size` neighbouring channels, `before` of them in front; zeros beyond the ends."""
    flat = op.Reshape(op.Unsqueeze(x, [1]), [0, 0, 0, -1])
    pads = [before, 0, size - 1 - before, 0]
    return op.Reshape(op.AveragePool(flat, kernel_shape=[size, 1], pads=pads, count_include_pad=1), shape)


def _lrn(g: Tensor, n: NodeView) -> Tensor:
    X, size, before, shape = n.X, n.size, (n.size - 1) // 2, op.Shape(n.X)
    total = _mean_of_channels(X * X, size, before, shape) * n.alpha + n.bias
    back = _mean_of_channels(g * n.Y / total, size, size - 1 - before, shape)
    return g * total ** (-n.beta) - X * back * (2 * n.alpha * n.beta)


vjp("LRN", X=_lrn)
