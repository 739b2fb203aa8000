"""GridSampleGrad as an ONNX function: rows of channels are gathered, and added up where they were gathered from.

Nearest, linear and cubic differ in nothing but their table of coefficients.
"""

from collections.abc import Callable
from typing import NamedTuple

from onnx import TensorProto

from onnxgrad.functions.body import Body, Value
from onnxgrad.ops.grid_sample import MOST_AXES, WEIGHTS, weight_tables
from onnxgrad.tensor_types import Array


class How(NamedTuple):
    """The attributes."""

    align_corners: int
    mode: str
    normalized: int
    padding_mode: str


class Reads(NamedTuple):
    """What places read along one axis: [images, places, reads]."""

    at: Value
    weights: Value
    derivatives: Value  # of the weights, by the grid's coordinate


def grid_sample_grad(
    o: Body, dY: Value, X: Value, grid: Value, align_corners: int, mode: str, normalized: int, padding_mode: str
) -> list[Value]:
    how, rank = How(align_corners, mode, normalized, padding_mode), o.declared(X).rank

    def of_axes(axes: int, work: Callable[[Value], Value]) -> list[Value]:
        def write() -> list[Value]:
            return Samples(o, work(X), work(grid), axes, how).gradients(work(dY))

        if axes == MOST_AXES or rank is not None:
            return write()
        return o.choose(o.Size(o.Shape(X)).equals(axes + 2), write, lambda: of_axes(axes + 1, work))

    return o.in_work_type(X, lambda work: of_axes(1 if rank is None else rank - 2, work))


class Samples:
    """What the places of a grid read of an image with that many spatial axes."""

    def __init__(self, o: Body, X: Value, grid: Value, axes: int, how: How) -> None:
        self.o, self.shape, self.grid_shape = o, o.Shape(X), o.Shape(grid)
        self.images, self.channels = o.slice(self.shape, 0, 1), o.slice(self.shape, 1, 2)
        self.places_shape = o.slice(self.grid_shape, 1, -1)
        self.size, self.places = (
            o.ReduceProd(part, keepdims=1) for part in (o.slice(self.shape, 2), self.places_shape)
        )
        coordinates = o.Reshape(grid, o.dims(self.images, self.places, o.slice(self.grid_shape, -1)), allowzero=1)
        sizes = o.dims(o.slice(self.shape, 2), *[1] * axes)  # where there are fewer axes, this branch is not taken
        self.along = [
            _reads(o, o.Gather(coordinates, [axes - 1 - a], axis=2), o.Gather(sizes, [a]), how) for a in range(axes)
        ]
        self.reads = len(WEIGHTS[how.mode][0])
        self.weights = self._product([reads.weights for reads in self.along])
        rows = o.dims(self.images * self.size, self.channels)
        self.rows = o.Reshape(self._channels_last(X, self.size), rows, allowzero=1)
        numbers = self.along[0].at
        for a in range(1, axes):
            numbers = self._pairs(numbers * o.Gather(sizes, [a]), self.along[a].at, a + 1, add=True)
        image = o.Range(o.like(0, self.size), o.Squeeze(self.images, [0]), o.like(1, self.size)) * self.size
        self.numbers = numbers + o.Reshape(image, [-1, 1, 1])  # of the rows that are read

    def _pairs(self, first: Value, second: Value, axes: int, add: bool = False) -> Value:
        """Products, or sums, for every pair of reads, which are then those of so many axes."""
        a, b = self.o.Unsqueeze(first, [3]), self.o.Unsqueeze(second, [2])
        shape = self.o.dims(self.images, self.places, self.reads**axes)
        return self.o.Reshape(a + b if add else a * b, shape, allowzero=1)

    def _product(self, parts: list[Value]) -> Value:
        total = parts[0]
        for a, part in enumerate(parts[1:], 1):
            total = self._pairs(total, part, a + 1)
        return total

    def _channels_last(self, x: Value, length: Value) -> Value:
        shape = self.o.dims(self.images, self.channels, length)
        return self.o.Transpose(self.o.Reshape(x, shape, allowzero=1), perm=[0, 2, 1])

    def image(self) -> Value:
        """What is read: GridSample itself."""
        o = self.o
        each = o.Gather(self.rows, self.numbers) * o.Unsqueeze(self.weights, [3])
        read = o.Transpose(o.ReduceSum(each, [2], keepdims=0), perm=[0, 2, 1])
        return o.Reshape(read, o.dims(self.images, self.channels, self.places_shape), allowzero=1)

    def gradients(self, dY: Value) -> list[Value]:
        """dX and dgrid."""
        o, g = self.o, self.o.Unsqueeze(self._channels_last(dY, self.places), [2])
        reads = o.dims(self.images * self.places * self.reads ** len(self.along), self.channels)
        terms = o.Reshape(o.Unsqueeze(self.weights, [3]) * g, reads, allowzero=1)
        summed = o.add_rows(terms, self.numbers, o.dims(self.images * self.size, self.channels))
        summed = o.Reshape(summed, o.dims(self.images, self.size, self.channels), allowzero=1)
        dX = o.Reshape(o.Transpose(summed, perm=[0, 2, 1]), self.shape, allowzero=1)
        of_weights = o.ReduceSum(o.Gather(self.rows, self.numbers) * g, [3], keepdims=0)
        parts = []
        for axis in reversed(range(len(self.along))):
            change = self._product([r.derivatives if a == axis else r.weights for a, r in enumerate(self.along)])
            parts.append(o.ReduceSum(of_weights * change, [2], keepdims=1))
        return [dX, o.Reshape(o.Concat(*parts, axis=2), self.grid_shape, allowzero=1)]


def _reads(o: Body, coordinates: Value, size: Value, how: How) -> Reads:
    count = o.CastLike(size, coordinates)
    places, slopes = coordinates, None  # how coordinates move places, None for as much
    if how.normalized:
        slopes = (count - 1 if how.align_corners else count) / 2
        places = (coordinates + 1) * slopes if how.align_corners else (coordinates + 1) * slopes - 0.5
    if how.mode == "linear" and how.padding_mode != "zeros":
        places, signs = _padded(o, places, count, how)
        slopes = signs if slopes is None else signs * slopes
    first = o.Round(places) if how.mode == "nearest" else o.Floor(places)
    table, slope_table = weight_tables(how.mode)
    reads = table.shape[1]
    distance = places - first
    at = first + o.numbers([k - (reads - 1) // 2 for k in range(reads)], places)
    weights, derivatives = (_polynomial(o, rows, distance, at) for rows in (table, slope_table))
    if slopes is not None:
        derivatives = derivatives * slopes
    if how.padding_mode == "zeros":
        inside = (at > -1) & (at < count)  # which what is no number is not
        none = o.like(0, places)
        weights, derivatives, at = (o.Where(inside, x, none) for x in (weights, derivatives, at))
    elif how.mode != "linear":
        at, _ = _padded(o, at, count, how)
    at = o.Min(o.Cast(at, to=TensorProto.INT64), size - 1)  # one behind the last has no weight
    return Reads(at, weights, derivatives)


def _padded(o: Body, x: Value, count: Value, how: How) -> tuple[Value, Value]:
    """Coordinates brought into the image, and how they change with those given: at the border not at all."""
    last, sign = count - 1, o.like(1, x)
    if how.padding_mode == "reflection":
        low, span = (0.0, o.Max(last, o.like(1, last))) if how.align_corners else (-0.5, count)
        beyond = x - low
        far = o.Abs(beyond)
        turns = o.Floor(far / span)
        rest, is_odd = far - turns * span, o.Mod(turns, o.like(2, turns), fmod=1) > 0
        sign = o.Where(o.Xor(is_odd, beyond < 0), -sign, sign)
        x = o.Where(is_odd, span - rest, rest) + low
    inside = (x > 0) & (x < last)
    none = o.like(0, x)
    return o.Where(inside, x, o.Where(x < last, none, last)), o.Where(inside, sign, none)


def _polynomial(o: Body, table: Array, x: Value, like: Value) -> Value:
    """By Horner's rule, of each column of coefficients."""
    total = o.numbers(table[-1].tolist(), x)
    for row in table[-2::-1]:
        total = total * x + o.numbers(row.tolist(), x)
    return total if len(table) > 1 else o.Expand(total, o.Shape(like))
