"""RoiAlignGrad as an ONNX function: rows of channels are gathered, and added up where they were gathered from.

Rows and columns are chosen apart from each other: along each axis, a bin has indices and weights, two for every place.
"""

from collections.abc import Callable
from typing import NamedTuple

from onnx import TensorProto

from onnxgrad.functions.body import Body, Value

ROWS, COLUMNS = [2, 4], [1, 3]  # axes, in [regions, bins, bins, reads, reads], that the other direction has to itself


class How(NamedTuple):
    """The attributes."""

    coordinate_transformation_mode: str
    output_height: int
    output_width: int
    sampling_ratio: int
    spatial_scale: float


class Reads(NamedTuple):
    """What the bins of all regions read along one axis: [regions, bins, reads]."""

    at: Value  # positions of elements
    weights: Value
    of_start: Value  # derivatives of the weights, by where the region begins
    of_end: Value
    exist: Value  # whether a region has as many places in a bin as the one with the most


def roi_align_grad(
    o: Body, dY: Value, X: Value, rois: Value, batch_indices: Value, coordinate_transformation_mode: str,
    output_height: int, output_width: int, sampling_ratio: int, spatial_scale: float,
) -> list[Value]:  # fmt: skip
    how = How(coordinate_transformation_mode, output_height, output_width, sampling_ratio, spatial_scale)

    def compute(work: Callable[[Value], Value]) -> list[Value]:
        down, across = (reads_along(o, X, work(rois), axis, "avg", how) for axis in (0, 1))
        bins = Bins(o, work(dY), work(X), down, across, batch_indices, "avg")
        return [bins.of_image(), bins.of_regions(spatial_scale)]

    return o.in_work_type(X, compute)


def reads_along(o: Body, X: Value, rois: Value, axis: int, mode: str, how: How) -> Reads:
    """Along the rows, which are axis 0, or the columns."""
    half_pixel = how.coordinate_transformation_mode == "half_pixel"

    def corner(k: int) -> Value:
        scaled = o.Unsqueeze(o.Gather(rois, [k], axis=1), [2]) * how.spatial_scale
        return scaled - 0.5 if half_pixel else scaled

    start, end = corner(1 - axis), corner(3 - axis)
    bins = how.output_width if axis else how.output_height
    extent, one, none = end - start, o.like(1, rois), o.like(0, rois)
    moves = one
    if not half_pixel:  # a smaller region counts as one element
        moves = o.CastLike(extent > 1, rois)
        extent = o.Where(extent > 1, extent, one)
    if how.sampling_ratio > 0:
        places = most = o.like(how.sampling_ratio, rois)
    else:
        places = o.Ceil(extent / bins)
        most = o.ReduceMax(o.Concat(o.numbers([1.0], rois), o.Reshape(places, [-1]), axis=0), keepdims=0)
    steps = o.Cast(most, to=TensorProto.INT64)
    number = o.Unsqueeze(o.CastLike(o.Range(o.like(0, steps), steps, o.like(1, steps)), rois), [0, 1])
    count = o.Max(places, one)
    part = ((number + 0.5) / count + o.Unsqueeze(o.numbers([*range(bins)], rois), [0, 2])) / bins  # of the region
    at = start + part * extent
    exist = o.Expand(number < places, o.Shape(at))
    length = o.slice(o.Shape(X), 2 + axis, 3 + axis)
    last = o.CastLike(length, rois) - 1
    counted = o.CastLike((at > -1.0) | at.equals(-1.0), rois) * o.CastLike((at < last + 1) | at.equals(last + 1), rois)
    counted = counted * o.CastLike(exist, rois)
    counted = counted / count if mode == "avg" else counted
    inside = (at > 0) & (at < last)
    at = o.Where(inside, at, o.Where(at < last, none, last))
    first = o.Floor(at)
    distance = at - first
    changed = counted * o.CastLike(inside, rois)
    to_end = part * moves
    to_start = 1 - to_end

    def pairs(low: Value, high: Value) -> Value:
        return o.Concat(low, high, axis=2)

    below = o.Cast(first, to=TensorProto.INT64)
    return Reads(
        pairs(below, o.Min(below + 1, length - 1)),
        pairs(counted * (1 - distance), counted * distance),
        pairs(-changed * to_start, changed * to_start),
        pairs(-changed * to_end, changed * to_end),
        pairs(exist, exist),
    )


def _outer(o: Body, x: Value, axis: int) -> Value:
    return o.Unsqueeze(x, COLUMNS if axis else ROWS)


class Bins:
    """What the gradients share, [regions, bins, bins, reads, reads], and channels at the end."""

    def __init__(self, o: Body, dY: Value, X: Value, down: Reads, across: Reads, images: Value, mode: str) -> None:
        self.o, self.shape, self.down, self.across = o, o.Shape(X), down, across
        self.channels, height, width = (o.slice(self.shape, k, k + 1) for k in (1, 2, 3))
        self.rows = o.Reshape(o.Transpose(X, perm=[0, 2, 3, 1]), o.dims(-1, self.channels))
        image = o.Unsqueeze(o.Cast(images, to=TensorProto.INT64), [1, 2, 3, 4])
        self.numbers = (image * height + _outer(o, self.down.at, 0)) * width + _outer(o, self.across.at, 1)
        self.weights = o.Unsqueeze(_outer(o, self.down.weights, 0) * _outer(o, self.across.weights, 1), [5])
        self.g = o.Unsqueeze(o.Transpose(dY, perm=[0, 2, 3, 1]), [3, 4])
        if mode == "max":
            self.g = self.g * self.shares()

    def shares(self) -> Value:
        """1 at the largest of the weighted elements of a bin, which are what onnxruntime takes the maximum of."""
        o = self.o
        values = o.Gather(self.rows, self.numbers) * self.weights
        exist = _outer(o, self.down.exist, 0) & _outer(o, self.across.exist, 1)
        values = o.Where(o.Unsqueeze(exist, [5]), values, o.like(float("-inf"), values))
        largest = o.CastLike(values.equals(o.ReduceMax(values, [3, 4])), values)
        return largest / o.ReduceSum(largest, [3, 4])

    def of_image(self) -> Value:
        o = self.o
        terms = o.Reshape(self.weights * self.g, o.dims(-1, self.channels))
        summed = o.add_rows(terms, self.numbers, o.Shape(self.rows))
        return o.Transpose(o.Reshape(summed, o.Gather(self.shape, [0, 2, 3, 1]), allowzero=1), perm=[0, 3, 1, 2])

    def of_regions(self, spatial_scale: float) -> Value:
        o = self.o
        of_weights = o.ReduceSum(o.Gather(self.rows, self.numbers) * self.g, [5], keepdims=0)
        by_column = of_weights * _outer(o, self.down.weights, 0)
        by_row = of_weights * _outer(o, self.across.weights, 1)
        parts = [
            by_column * _outer(o, self.across.of_start, 1),
            by_row * _outer(o, self.down.of_start, 0),
            by_column * _outer(o, self.across.of_end, 1),
            by_row * _outer(o, self.down.of_end, 0),
        ]
        sums = [o.Unsqueeze(o.ReduceSum(part, [1, 2, 3, 4], keepdims=0), [1]) for part in parts]
        return o.Concat(*sums, axis=1) * spatial_scale
