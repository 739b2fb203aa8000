"""GridSample: every place of the grid reads a few elements of X along each axis, and adds them up with weights.

The weights are polynomials of how far the place is from the first of them. Rows of channels are read by Gather; so the
gradient of X is that of Gather. Nearest, linear and cubic differ in nothing but their table of coefficients.
"""

from typing import NamedTuple

import numpy as np

from onnxgrad.graph.cast import in_type, wide_type
from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import op, vjp

A = -0.75  # Keys' parameter, as PyTorch has it
WEIGHTS = {  # a row for each power of the distance, a column for each element that is read
    "nearest": [[1.0]],
    "linear": [[1.0, 0.0], [-1.0, 1.0]],
    "cubic": [[0.0, 1.0, 0.0, 0.0], [A, 0.0, -A, 0.0], [-2 * A, -A - 3, 2 * A + 3, A], [A, A + 2, -A - 2, -A]],
}


class Samples(NamedTuple):
    """What the gradients share; the axes of `rows` and `numbers` are those of the grid, then one per spatial axis."""

    rows: Tensor  # X with a row for each place, its channels
    numbers: Tensor  # of the rows that are read
    weights: list[Tensor]  # along each spatial axis
    derivatives: list[Tensor]  # of the weights, by the grid's coordinate


def _samples(n: NodeView) -> Samples:
    grid = in_type(n.grid, wide_type(n.grid))
    count = op.Cast(_sizes(n.X), to=grid.dtype)
    scale = (count - 1 if n.align_corners else count) / 2
    places = (grid + 1) * scale - (0 if n.align_corners else 0.5)
    mode = n.mode.removeprefix("bi")  # it was bilinear and bicubic until opset 20
    return samples(n.X, places, scale, mode, n.padding_mode, n.align_corners)


def samples(
    X: Tensor,
    places: Tensor,
    slopes: Tensor | None = None,
    mode: str = "linear",
    padding_mode: str = "zeros",
    align_corners: int = 0,
) -> Samples:
    """What is read at places given in elements of X, the last axis first; `slopes` is how coordinates move them."""
    rank, sizes = X.rank - 2, _sizes(X)
    count = op.Cast(sizes, to=places.dtype)
    if mode == "linear" and padding_mode != "zeros":
        places, signs = _padded(places, count, padding_mode, align_corners)
        slopes = signs if slopes is None else slopes * signs
    first = op.Round(places) if mode == "nearest" else op.Floor(places)
    table = np.array(WEIGHTS[mode])
    taps = table.shape[1]
    distance = op.Unsqueeze(places - first, [-1])
    read = op.Unsqueeze(first, [-1]) + np.arange(taps) - (taps - 1) // 2
    weights = _polynomial(table, distance, read)
    derivatives = _polynomial(table[1:] * np.arange(1, len(table))[:, None], distance, read)
    derivatives = derivatives if slopes is None else derivatives * op.Unsqueeze(slopes, [-1])
    count = op.Unsqueeze(count, [-1])
    if padding_mode == "zeros":
        inside = op.Cast((read >= 0) & (read <= count - 1), to=places.dtype)
        weights, derivatives = weights * inside, derivatives * inside
    elif mode != "linear":
        read = _padded(read, count, padding_mode, align_corners)[0]
    index = op.Max(op.Min(op.Cast(read, to=sizes.dtype), op.Unsqueeze(sizes, [-1]) - 1), 0)
    each = range(rank - 1, -1, -1)  # of the coordinates, in the order of X's axes
    numbers = op.Reshape(op.Range(0, op.Squeeze(op.Shape(X, end=1)), 1), [-1] + [1] * rank)
    for k in each:
        numbers = op.Unsqueeze(numbers, [-1]) * op.Gather(sizes, k) + _along(index, k, rank - 1 - k)
    return Samples(
        rows_of(X),
        numbers,
        [_along(weights, k, rank - 1 - k) for k in each],
        [_along(derivatives, k, rank - 1 - k) for k in each],
    )


def _sizes(X: Tensor) -> Tensor:
    """Of the spatial axes, the last one first, as coordinates have them."""
    return op.Gather(op.Shape(X), [*range(X.rank - 1, 1, -1)])


def _padded(x: Tensor, count: Tensor, padding_mode: str, align_corners: int) -> tuple[Tensor, Tensor]:
    """Coordinates brought into the image, and how they change with those given: at the border not at all."""
    last, sign = count - 1, None
    if padding_mode == "reflection":
        low, span = (0, op.Max(last, 1)) if align_corners else (-0.5, count)
        beyond = x - low
        far = op.Abs(beyond)
        turns = op.Floor(far / span)
        rest = far - turns * span
        is_odd = op.Mod(turns, 2, fmod=1) > 0
        x = op.Where(is_odd, span - rest, rest) + low
        sign = op.Where(op.Xor(is_odd, beyond < 0), x.builder.constant(-1, x.dtype), 1)
    inside = (x > 0) & (x < last)
    slope = op.Cast(inside, to=x.dtype)
    x = op.Where(inside, x, op.Where(x < last, 0, last))
    return x, slope if sign is None else slope * sign


def _polynomial(table: np.ndarray, x: Tensor, like: Tensor) -> Tensor:
    """By Horner's rule, of each column of coefficients."""
    total = like.builder.constant(table[-1] if len(table) else np.zeros(1), x.dtype)
    for row in table[-2::-1]:
        total = total * x + row
    return total if len(table) > 1 else op.Expand(total, op.Shape(like))


def _along(x: Tensor, coordinate: int, before: int) -> Tensor:
    """What one coordinate has, on an axis of its own behind those of `before` others."""
    one = op.Gather(x, coordinate, axis=-2)
    return op.Unsqueeze(one, [*range(-2, -2 - before, -1)]) if before else one


def _product(factors: list[Tensor]) -> Tensor:
    total = factors[0]
    for factor in factors[1:]:
        total = op.Unsqueeze(total, [-1]) * factor
    return total


def rows_of(X: Tensor) -> Tensor:
    """An image as a matrix, with the channels of each element in a row."""
    channels_last = op.Transpose(X, perm=[0, *range(2, X.rank), 1])
    return op.Reshape(channels_last, op.Concat([-1], op.Shape(X, start=1, end=2), axis=0))


def summed_rows(g: Tensor, rows: Tensor, numbers: Tensor, X: Tensor) -> Tensor:
    """The gradient of an image whose rows were read by their numbers."""
    shape = op.Gather(op.Shape(X), [0, *range(2, X.rank), 1])
    summed = op.Reshape(op.GatherGrad(op.Shape(rows), numbers, g), shape, allowzero=1)
    return op.Transpose(summed, perm=[0, X.rank - 1, *range(1, X.rank - 1)])


def of_image(g: Tensor, X: Tensor, s: Samples) -> Tensor:
    """The gradient of an image that is read."""
    each = op.Unsqueeze(in_type(_product(s.weights), g.dtype), [-1]) * _channels_last(g, X.rank - 2)
    return summed_rows(each, s.rows, s.numbers, X)


def _taps(rank: int) -> list[int]:
    """The axes of what one place reads; onnxruntime sums an empty tensor only along axes counted from the beginning."""
    return [*range(rank + 1, 2 * rank + 1)]


def image_at(s: Samples) -> Tensor:
    """What is read: channels behind the batch, then the axes of the places."""
    rank = len(s.weights)
    each = op.Gather(s.rows, s.numbers) * op.Unsqueeze(in_type(_product(s.weights), s.rows.dtype), [-1])
    summed = op.ReduceSum(each, _taps(rank), keepdims=0)
    return op.Transpose(summed, perm=[0, rank + 1, *range(1, rank + 1)])


def of_places(g: Tensor, s: Samples) -> Tensor:
    """The gradient of the coordinates at which it is read, in the type of the weights."""
    rank = len(s.weights)
    products = op.Gather(s.rows, s.numbers) * _channels_last(g, rank)
    of_weights = op.ReduceSum(in_type(products, s.weights[0].dtype), [2 * rank + 1], keepdims=0)
    parts = []
    for k in range(rank):
        change = _product([s.derivatives[j] if j == k else w for j, w in enumerate(s.weights)])
        parts.append(op.Unsqueeze(op.ReduceSum(of_weights * change, _taps(rank), keepdims=0), [-1]))
    return op.Concat(*parts[::-1], axis=-1)


def _channels_last(g: Tensor, rank: int) -> Tensor:
    """With an axis of 1 for every axis along which elements are read, before the channels."""
    return op.Unsqueeze(op.Transpose(g, perm=[0, *range(2, rank + 2), 1]), [*range(-1 - rank, -1)])


def _of_grid(g: Tensor, n: NodeView) -> Tensor | None:
    return None if n.mode == "nearest" else in_type(of_places(g, _samples(n)), n.grid.dtype)


vjp(
    "GridSample",
    doc="As in PyTorch: where the mode is nearest, and at a border that clips, the grid gets 0.",
    X=lambda g, n: of_image(g, n.X, _samples(n)),
    grid=_of_grid,
)
