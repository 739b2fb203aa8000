"""Operators that pick elements by position, or put them there."""

import re
from typing import NamedTuple

from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import nondiff, op, vjp
from onnxgrad.rules.shape import filled_like, reshaped_like, size_along
from onnxgrad.schema import MICROSOFT

INT64_MAX = 2**63 - 1

_PADDED = re.compile(r"aten\.embedding\.default\]\(args = \(%\w+, %\w+, (\d+)")


def _gather(g: Tensor, n: NodeView) -> Tensor:
    if (padded := _PADDED.match(n.torch_call)) is not None:
        # PyTorch does not train the row that an embedding has for padding.
        g = op.Where(op.Unsqueeze(n.indices.equals(int(padded[1])), [-1]), 0, g)
    return op.GatherGrad(op.Shape(n.data), n.indices, g, axis=n.axis)


vjp("Gather", data=_gather, indices=nondiff)
vjp(
    "GatherElements",
    data=lambda g, n: op.GatherElementsGrad(g, op.Shape(n.data), n.indices, axis=n.axis),
    indices=nondiff,
)
vjp(
    "Slice",
    data=lambda g, n: op.SliceGrad(g, op.Shape(n.data), n.starts, n.ends, n.axes, n.steps),
    starts=nondiff,
    ends=nondiff,
    axes=nondiff,
    steps=nondiff,
)
vjp(
    "GatherGrad",
    domain=MICROSOFT,
    shape=nondiff,
    indices=nondiff,
    dY=lambda g, n: op.Gather(g, n.indices, axis=n.axis),
)
vjp(
    "GatherElementsGrad",
    domain=MICROSOFT,
    dY=lambda g, n: op.GatherElements(g, n.indices, axis=n.axis),
    shape=nondiff,
    indices=nondiff,
)
vjp(
    "SliceGrad",
    domain=MICROSOFT,
    dY=lambda g, n: op.Slice(g, n.starts, n.ends, n.axes, n.steps),
    shape=nondiff,
    starts=nondiff,
    ends=nondiff,
    axes=nondiff,
    steps=nondiff,
)
vjp("BroadcastGradientArgs", domain=MICROSOFT, a_shape=nondiff, b_shape=nondiff)
vjp(
    "TopK",
    X=lambda g, n: op.GatherElementsGrad(g, op.Shape(n.X), n.Indices, axis=n.axis),
    K=nondiff,
)


def _gathered_first(g: Tensor, x: Tensor, indices: Tensor, axis: int | None) -> Tensor:
    """The gradient of Gather, of all elements in a row where there is no axis."""
    if axis is not None:
        return op.GatherGrad(op.Shape(x), indices, g, axis=axis)
    flat = op.GatherGrad(op.Reshape(op.Size(x), [1]), indices, g)
    return reshaped_like(flat, x)


vjp(
    "Compress",
    input=lambda g, n: _gathered_first(g, n.input, op.Squeeze(op.NonZero(n.condition), [0]), n.axis),
    condition=nondiff,
)
vjp(
    "Unique",
    doc="The gradient of an element that occurs several times goes to the first of them.",
    X=lambda g, n: _gathered_first(g, n.X, n.indices, n.axis),
)


def _one_hot_values(g: Tensor, n: NodeView) -> Tensor:
    on = op.OneHot(n.indices, n.depth, n.builder.constant([0, 1], n.values.dtype), axis=n.axis)
    sums = [op.Reshape(op.ReduceSum(g * here, keepdims=0), [1]) for here in (1 - on, on)]
    return op.Concat(*sums, axis=0)


vjp("OneHot", indices=nondiff, depth=nondiff, values=_one_hot_values)


# Positions of several coordinates, as GatherND and ScatterND have them, are numbers of rows of a matrix.


class Rows(NamedTuple):
    """The data seen as a matrix, and the rows that are read or written."""

    shape: Tensor  # of the matrix
    numbers: Tensor  # of the rows, one after the other
    chosen_shape: Tensor  # of the matrix of these rows


def _rows(data: Tensor, indices: Tensor, batch_dims: int = 0) -> Rows:
    shape, coordinates = op.Shape(data), op.Shape(indices, start=-1)
    end = coordinates + batch_dims
    dims = op.Slice(shape, [batch_dims], end, [0])
    order = op.Range(0, op.Squeeze(coordinates), 1)
    steps = op.ReduceProd(op.Where(op.Unsqueeze(order, [1]) < order, dims, 1), [1], keepdims=0)
    numbers = op.ReduceSum(op.Mod(indices, dims) * steps, [-1], keepdims=0)
    if batch_dims:
        batches = _product(op.Shape(data, end=batch_dims))
        before = op.Range(0, op.Squeeze(batches), 1) * _product(dims)
        each = op.Reshape(numbers, op.Concat(batches, [-1], axis=0))
        numbers = each + op.Unsqueeze(before, [1])
    numbers = op.Reshape(numbers, [-1])
    width = _product(op.Slice(shape, end, [INT64_MAX], [0]))
    count = _product(op.Slice(shape, [0], end, [0]))
    return Rows(op.Concat(count, width, axis=0), numbers, op.Concat(op.Shape(numbers), width, axis=0))


def _product(dims: Tensor) -> Tensor:
    return op.ReduceProd(op.Concat([1], dims, axis=0), keepdims=1)  # the 1: of nothing


def _gather_nd(g: Tensor, n: NodeView) -> Tensor:
    rows = _rows(n.data, n.indices, n.batch_dims)
    summed = op.GatherGrad(rows.shape, rows.numbers, op.Reshape(g, rows.chosen_shape, allowzero=1))
    return reshaped_like(summed, n.data)


vjp("GatherND", data=_gather_nd, indices=nondiff)


class Scatter(NamedTuple):
    """A ScatterElements that reduces."""

    data: Tensor
    indices: Tensor
    updates: Tensor
    result: Tensor
    axis: int
    reduction: str

    def read(self, x: Tensor) -> Tensor:
        """What x has where the updates went."""
        return op.GatherElements(x, self.indices, axis=self.axis)

    def number_of(self, condition: Tensor, like: Tensor) -> Tensor:
        """How many of the updates that went to an element meet the condition."""
        return op.GatherElementsGrad(op.CastLike(condition, like), op.Shape(self.data), self.indices, axis=self.axis)

    def write(self, data: Tensor, updates: Tensor) -> Tensor:
        """The same on other numbers."""
        return op.ScatterElements(data, self.indices, updates, axis=self.axis, reduction=self.reduction)

    def shared(self, g: Tensor) -> Tensor:
        """For max and min: the gradient, divided by the number of those that are it."""
        mine = op.CastLike(self.data.equals(self.result), g)
        return g / (mine + self.number_of(self.updates.equals(self.read(self.result)), g))

    def to_data(self, g: Tensor) -> Tensor:
        if self.reduction == "mul":
            return g * self.write(filled_like(self.data, 1), self.updates)
        return op.Where(self.data.equals(self.result), self.shared(g), 0)

    def to_updates(self, g: Tensor) -> Tensor:
        if self.reduction != "mul":
            return op.Where(self.updates.equals(self.read(self.result)), self.read(self.shared(g)), 0)
        # The product of the others: with zeros left out, it is right for those that no other zero is with.
        is_zero = self.updates.equals(0)
        factors = op.Where(is_zero, 1, self.updates)
        others = self.read(g * self.write(self.data, factors)) / factors
        alone = self.read(self.number_of(is_zero, g)).equals(op.CastLike(is_zero, g))
        return op.Where(alone, others, 0)


def _scatter(n: NodeView) -> Scatter:
    return Scatter(n.data, n.indices, n.updates, n.output, n.axis, n.reduction)


def _scatter_data(g: Tensor, n: NodeView) -> Tensor:
    if n.reduction == "none":
        return op.ScatterElements(g, n.indices, filled_like(n.updates, 0), axis=n.axis)
    return g if n.reduction == "add" else _scatter(n).to_data(g)


def _scatter_updates(g: Tensor, n: NodeView) -> Tensor:
    return _scatter(n).read(g) if n.reduction in ("none", "add") else _scatter(n).to_updates(g)


TIES = "With max and min, where several tie, each gets an equal share, as in PyTorch."
vjp("ScatterElements", doc=TIES, data=_scatter_data, indices=nondiff, updates=_scatter_updates)


def _scatter_rows(n: NodeView) -> tuple[Rows, Scatter]:
    """ScatterND as ScatterElements on a matrix; onnxruntime's ScatterND loses some of what has the same position."""
    rows = _rows(n.data, n.indices)
    data, result = (op.Reshape(x, rows.shape, allowzero=1) for x in (n.data, n.output))
    updates = op.Reshape(n.updates, rows.chosen_shape, allowzero=1)
    indices = op.Expand(op.Unsqueeze(rows.numbers, [1]), rows.chosen_shape)
    return rows, Scatter(data, indices, updates, result, 0, n.reduction)


def _scatter_nd_data(g: Tensor, n: NodeView) -> Tensor:
    if n.reduction == "none":
        return op.ScatterND(g, n.indices, filled_like(n.updates, 0))
    if n.reduction == "add":
        return g
    rows, scatter = _scatter_rows(n)
    return reshaped_like(scatter.to_data(op.Reshape(g, rows.shape, allowzero=1)), n.data)


def _scatter_nd_updates(g: Tensor, n: NodeView) -> Tensor:
    if n.reduction in ("none", "add"):
        return op.GatherND(g, n.indices)
    rows, scatter = _scatter_rows(n)
    return reshaped_like(scatter.to_updates(op.Reshape(g, rows.shape, allowzero=1)), n.updates)


vjp("ScatterND", doc=TIES, data=_scatter_nd_data, indices=nondiff, updates=_scatter_nd_updates)


# Sums and products along an axis.

vjp(
    "CumSum",
    x=lambda g, n: op.CumSum(g, n.axis, exclusive=n.exclusive, reverse=1 - n.reverse),
    axis=nondiff,
)


def _cum_prod(g: Tensor, n: NodeView) -> Tensor:
    """The sum of what comes after, divided by x; at the first zero that x is left out, past it nothing is left."""
    x = n.x

    def sum_after(products: Tensor) -> Tensor:
        return op.CumSum(g * products, n.axis, exclusive=n.exclusive, reverse=1 - n.reverse)

    is_zero = x.equals(0)
    zeros_so_far = op.CumSum(op.CastLike(is_zero, g), n.axis, reverse=n.reverse)
    is_first = is_zero & zeros_so_far.equals(1)
    without = op.CumProd(op.Where(is_first, 1, x), n.axis, exclusive=n.exclusive, reverse=n.reverse)
    return op.Where(is_first, sum_after(without), sum_after(n.y) / op.Where(is_zero, 1, x))


vjp("CumProd", x=_cum_prod, axis=nondiff)


def _written(g: Tensor, n: NodeView) -> Tensor:
    """What stands in `g` where TensorScatter wrote."""
    axis = n.axis % n.update.rank
    if n.write_indices is None:
        return op.Slice(g, [0], size_along(n.update, axis), [axis])
    at = op.Unsqueeze(n.write_indices, [1]) + op.Range(0, op.Squeeze(size_along(n.update, axis), [0]), 1)
    if n.mode == "circular":
        at = op.Mod(at, size_along(g, axis))
    ones = [k for k in range(1, n.update.rank) if k != axis]
    return op.GatherElements(g, op.Expand(op.Unsqueeze(at, ones), op.Shape(n.update)), axis=axis)


vjp(
    "TensorScatter",
    past_cache=lambda g, n: op.TensorScatter(g, filled_like(n.update, 0), n.write_indices, axis=n.axis, mode=n.mode),
    update=_written,
    write_indices=nondiff,
)
