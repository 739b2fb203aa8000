"""Normalizations over the last axes or over axes of one's choice, and LRN."""

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.backward import sum_to_shape
from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Number, Tensor
from onnxgrad.rules import op, vjp


def in_type(x: Tensor, dtype: ir.DataType) -> Tensor:
    """The numbers in another type, if it is another."""
    return x if x.dtype == dtype else op.Cast(x, to=dtype.value)


def wide_type(*tensors: Tensor) -> ir.DataType:
    """The type to compute statistics in: float32 for half numbers, as the operators themselves do."""
    return ir.DataType.DOUBLE if any(x.dtype == ir.DataType.DOUBLE for x in tensors) else ir.DataType.FLOAT


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
        # One kernel does it. Its InvStdDev is float32, so that float64 goes the long way.
        ones = op.Expand(np.ones(1, np.float32), op.Gather(op.Shape(x), list(axes)))
        xhat, _, inv = op.LayerNormalization(x, ones, axis=axes[0], epsilon=epsilon, outputs=3)
        return xhat, inv
    centred = x - op.ReduceMean(x, list(axes), keepdims=1)
    inv = inverse_rms(centred, axes, epsilon)
    return centred * inv, inv


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


class Layer:
    """What the gradients of one LayerNormalization, with or without a mean, share."""

    def __init__(self, n: NodeView, scale: Tensor, *, mean: Tensor | None, inv: Tensor | None, centred: bool) -> None:
        self.axes = last_axes(n.axis, n.X)
        self.dtype = wide_type(n.X, scale)
        self.scale, self.centred, X = scale, centred, in_type(n.X, self.dtype)
        if inv is not None:
            self.inv = in_type(inv, self.dtype)
            self.xhat = (X if mean is None else X - in_type(mean, self.dtype)) * self.inv
        elif centred:
            self.xhat, self.inv = standardized(X, [X.rank + k for k in self.axes], n.epsilon)
        else:
            self.inv = inverse_rms(X, self.axes, n.epsilon)
            self.xhat = X * self.inv

    def of_input(self, g: Tensor | None, x: Tensor, g_mean: Tensor | None, g_inv: Tensor | None) -> Tensor:
        """The gradient of X."""
        scaled = None if g is None else in_type(g, self.dtype) * in_type(self.scale, self.dtype)
        dX = through_statistics(
            scaled, self.xhat, self.inv, self.axes, centred=self.centred, g_mean=g_mean, g_inv=g_inv
        )
        return in_type(dX, x.dtype)

    def of_scale(self, g: Tensor | None) -> Tensor | None:
        """The gradient of the scale, which may have been broadcast."""
        if g is None:
            return None
        return in_type(sum_to_shape(in_type(g, self.dtype) * self.xhat, self.scale), self.scale.dtype)


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
    X=lambda g, n: _layer(n).of_input(g, n.X, n.grad(1), n.grad(2)),
    Scale=lambda g, n: _layer(n).of_scale(g),
    B=lambda g, n: of_shift(g, n.B),
)


def _rms(n: NodeView) -> Layer:
    return Layer(n, n.scale, mean=None, inv=None, centred=False)


vjp(
    "RMSNormalization",
    X=lambda g, n: _rms(n).of_input(g, n.X, None, None),
    scale=lambda g, n: _rms(n).of_scale(g),
)


def _lp(g: Tensor, n: NodeView) -> Tensor:
    X, axes = n.input, [n.axis]
    norm = op.ReduceL1(X, axes, keepdims=1) if n.p == 1 else op.ReduceL2(X, axes, keepdims=1)
    slope = op.Sign(X) if n.p == 1 else n.output
    inverse = op.Reciprocal(op.Where(norm.equals(0), np.inf, norm))
    return (g - slope * op.ReduceSum(g * n.output, axes, keepdims=1)) * inverse


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
