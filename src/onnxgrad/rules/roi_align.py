"""RoiAlign: pools what it reads at places between elements, a few of them in each bin of each region of an image.

Rows and columns are chosen apart from each other: along each axis, a bin has indices and weights, two for every place.
MaxRoiPool is its ancestor: it takes the largest of whole elements.
"""

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.cast import in_type, wide_type
from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import nondiff, op, vjp

ROWS, COLUMNS = [2, 4], [1, 3]  # axes, in [regions, bins, bins, reads, reads], that the other direction has to itself


def _rows_of(X: Tensor) -> Tensor:
    """An image as a matrix, with the channels of each element in a row."""
    return op.Reshape(op.Transpose(X, perm=[0, 2, 3, 1]), op.Concat([-1], op.Shape(X, start=1, end=2), axis=0))


def _summed_rows(g: Tensor, rows: Tensor, numbers: Tensor, X: Tensor) -> Tensor:
    """The gradient of an image whose rows were read by their numbers."""
    shape = op.Gather(op.Shape(X), [0, 2, 3, 1])
    summed = op.Reshape(op.GatherGrad(op.Shape(rows), numbers, g), shape, allowzero=1)
    return op.Transpose(summed, perm=[0, 3, 1, 2])


class Reads(NamedTuple):
    """What the bins of all regions read along one axis: [regions, bins, reads]."""

    at: Tensor  # positions of elements
    weights: Tensor
    of_start: Tensor  # derivatives of the weights, by where the region begins
    of_end: Tensor
    exist: Tensor  # whether a region has as many places in a bin as the one with the most


def _reads(n: NodeView, axis: int) -> Reads:
    """Along the rows, which are axis 0, or the columns."""
    rois = in_type(n.rois, wide_type(n.rois))
    half_pixel = getattr(n, "coordinate_transformation_mode", "output_half_pixel") == "half_pixel"  # new in opset 16
    start, end = (
        op.Unsqueeze(op.Gather(rois, k, axis=1), [1, 2]) * n.spatial_scale - (0.5 if half_pixel else 0)
        for k in (1 - axis, 3 - axis)
    )
    bins = n.output_width if axis else n.output_height
    size = end - start
    extends = size > (-np.inf if half_pixel else 1.0)  # a smaller region counts as one element
    size = size if half_pixel else op.Where(extends, size, 1)
    if n.sampling_ratio > 0:
        places = n.builder.constant(np.full((1, 1, 1), n.sampling_ratio), rois.dtype)
        most = n.builder.constant(n.sampling_ratio, rois.dtype)
    else:
        places = op.Ceil(size / bins)
        most = op.ReduceMax(op.Concat([1.0], op.Reshape(places, [-1]), axis=0), keepdims=0)
    number = op.Range(n.builder.constant(0, rois.dtype), most, n.builder.constant(1, rois.dtype))
    count = op.Max(places, 1)
    part = (op.Unsqueeze((number + 0.5), [0, 1]) / count + np.arange(bins)[None, :, None]) / bins  # of the region
    at = start + part * size
    exist = op.Expand(op.Unsqueeze(number, [0, 1]) < places, op.Shape(at))
    length = op.Shape(n.X, start=2 + axis, end=3 + axis)
    last = op.Cast(length, to=rois.dtype) - 1
    counted = op.Cast((at >= -1) & (at <= last + 1) & exist, to=rois.dtype)
    counted = counted / count if n.mode == "avg" else counted
    inside = (at > 0) & (at < last)
    at = op.Where(inside, at, op.Where(at < last, 0, last))
    first = op.Floor(at)
    distance = at - first
    changed = counted * op.Cast(inside, to=rois.dtype)
    to_end = part * op.Cast(extends, to=rois.dtype)
    to_start = 1 - to_end

    def pairs(low: Tensor, high: Tensor) -> Tensor:
        return op.Concat(low, high, axis=2)

    below = op.Cast(first, to=length.dtype)
    return Reads(
        pairs(below, op.Min(below + 1, length - 1)),
        pairs(counted * (1 - distance), counted * distance),
        pairs(-changed * to_start, changed * to_start),
        pairs(-changed * to_end, changed * to_end),
        pairs(exist, exist),
    )


def _whole_reads(n: NodeView, axis: int) -> Reads:
    """Those of MaxRoiPool, whose regions and bins begin and end with elements."""
    start, end = (
        op.Floor(op.Unsqueeze(op.Gather(n.rois, k, axis=1), [1]) * n.spatial_scale + 0.5) for k in (2 - axis, 4 - axis)
    )
    bins = n.pooled_shape[axis]
    step = op.Max(end - start + 1, 1) / bins
    length = op.Cast(op.Shape(n.X, start=2 + axis, end=3 + axis), to=n.rois.dtype)
    first, last = (
        op.Min(op.Max(edge + start, 0), length)
        for edge in (op.Floor(step * np.arange(bins)), op.Ceil(step * np.arange(1, bins + 1)))
    )  # [regions, bins]
    most = op.ReduceMax(op.Concat([1.0], op.Reshape(last - first, [-1]), axis=0), keepdims=0)
    constant = n.builder.constant
    at = op.Unsqueeze(first, [2]) + op.Range(constant(0, n.rois.dtype), most, constant(1, n.rois.dtype))
    exist = at < op.Unsqueeze(last, [2])
    counted = op.Cast(exist, to=n.rois.dtype)
    fixed = op.Mul(counted, 0)  # a region that moves by less than an element changes nothing
    return Reads(op.Cast(op.Min(at, length - 1), to=ir.DataType.INT64), counted, fixed, fixed, exist)


class Bins:
    """What the gradients share, [regions, bins, bins, reads, reads], and channels at the end."""

    def __init__(self, g: Tensor, n: NodeView, down: Reads, across: Reads, images: Tensor, mode: str) -> None:
        self.n, self.rows = n, _rows_of(n.X)
        self.down, self.across = down, across
        image = op.Unsqueeze(in_type(images, self.down.at.dtype), [1, 2, 3, 4])
        height, width = (op.Shape(n.X, start=k, end=k + 1) for k in (2, 3))
        self.numbers = (image * height + self.outer(self.down.at, 0)) * width + self.outer(self.across.at, 1)
        weights = self.outer(self.down.weights, 0) * self.outer(self.across.weights, 1)
        self.weights = op.Unsqueeze(in_type(weights, g.dtype), [-1])
        self.g = op.Unsqueeze(op.Transpose(g, perm=[0, 2, 3, 1]), [3, 4])
        if mode == "max":
            self.g = self.g * self.shares()

    @staticmethod
    def outer(x: Tensor, axis: int) -> Tensor:
        return op.Unsqueeze(x, COLUMNS if axis else ROWS)

    def shares(self) -> Tensor:
        """1 at the largest of the weighted elements of a bin, which are what onnxruntime takes the maximum of."""
        values = op.Gather(self.rows, self.numbers) * self.weights
        exist = self.outer(self.down.exist, 0) & self.outer(self.across.exist, 1)
        values = op.Where(op.Unsqueeze(exist, [-1]), values, -np.inf)
        largest = op.CastLike(values.equals(op.ReduceMax(values, [3, 4])), values)
        return largest / op.ReduceSum(largest, [3, 4])

    def of_image(self) -> Tensor:
        return _summed_rows(self.weights * self.g, self.rows, self.numbers, self.n.X)

    def of_regions(self) -> Tensor:
        n = self.n
        products = in_type(op.Gather(self.rows, self.numbers) * self.g, wide_type(n.rois))
        of_weights = op.ReduceSum(products, [5], keepdims=0)
        by_column = of_weights * self.outer(self.down.weights, 0)
        by_row = of_weights * self.outer(self.across.weights, 1)
        parts = [
            by_column * self.outer(self.across.of_start, 1),
            by_row * self.outer(self.down.of_start, 0),
            by_column * self.outer(self.across.of_end, 1),
            by_row * self.outer(self.down.of_end, 0),
        ]
        sums = [op.Unsqueeze(op.ReduceSum(p, [1, 2, 3, 4], keepdims=0), [1]) for p in parts]
        return in_type(op.Concat(*sums, axis=1) * n.spatial_scale, n.rois.dtype)


def _align(g: Tensor, n: NodeView) -> Bins:
    return Bins(g, n, _reads(n, 0), _reads(n, 1), n.batch_indices, n.mode)


def _pool(g: Tensor, n: NodeView) -> Tensor:
    images = op.Gather(n.rois, 0, axis=1)
    return Bins(g, n, _whole_reads(n, 0), _whole_reads(n, 1), images, "max").of_image()


vjp(
    "RoiAlign",
    doc="With max, where several tie, each gets an equal share. torchvision has no gradient of the regions.",
    X=lambda g, n: _align(g, n).of_image(),
    rois=lambda g, n: _align(g, n).of_regions(),
    batch_indices=nondiff,
)
vjp("MaxRoiPool", doc="Where several tie, each gets an equal share.", X=_pool, rois=nondiff)
