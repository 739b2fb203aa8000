"""Reductions."""

import math

import onnx_ir as ir

from onnxgrad.graph.cast import in_type, wide_type
from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import nondiff, op, vjp


def _leaves_all(n: NodeView) -> bool:
    """Whether it is known that no axis is reduced."""
    return bool(n.noop_with_empty_axes) and (n.axes is None or n.axes.shape == (0,))


def with_reduced_axes(x: Tensor, n: NodeView) -> Tensor:
    """A result of a reduction in a shape that broadcasts to that of the data: axes that are gone are of size 1."""
    if n.keepdims or n.axes is None or n.axes.shape == (0,):
        return x  # of the right shape, or a scalar
    if n.axes.shape is None or not isinstance(n.axes.shape[0], int):
        # There may be no axes, which means all of them or none: the operator itself knows.
        kept = op.ReduceSum(n.data, n.axes, keepdims=1, noop_with_empty_axes=n.noop_with_empty_axes or None)
        return op.Reshape(x, op.Shape(kept))
    return op.Unsqueeze(x, n.axes)


def _reduced(op_type: str, x: Tensor, n: NodeView) -> Tensor:
    """Another reduction over the same axes, which stay."""
    return getattr(op, op_type)(x, n.axes, keepdims=1, noop_with_empty_axes=n.noop_with_empty_axes or None)


def _spread(g: Tensor, n: NodeView) -> Tensor:
    """The gradient, the same for every element that was summed."""
    return g if _leaves_all(n) else op.Expand(with_reduced_axes(g, n), op.Shape(n.data))


def _share(g: Tensor, n: NodeView) -> Tensor:
    """One over how many elements there are to a mean."""
    have, left = n.data.static_shape, n.reduced.static_shape
    if have is not None and left is not None and math.prod(have):
        return g * (math.prod(left) / math.prod(have))
    every = _count(n.data)
    if left is not None and math.prod(left) == 1:  # onnxruntime fails to fuse (1 · weight) · (1 / n)
        return g * op.CastLike(op.Reciprocal(every), g)
    return g * op.CastLike(_count(n.reduced) / every, g)


def _count(x: Tensor) -> Tensor:
    """The number of elements, from the shape: where that is known onnxruntime computes it ahead, unlike a Size."""
    return op.Cast(op.ReduceProd(op.Shape(x), keepdims=0), to=ir.DataType.DOUBLE)


vjp("ReduceSum", data=_spread, axes=nondiff)
vjp("ReduceMean", data=lambda g, n: _spread(_share(g, n), n), axes=nondiff)
vjp("ReduceSumSquare", data=lambda g, n: with_reduced_axes(g + g, n) * n.data, axes=nondiff)
vjp("ReduceL1", data=lambda g, n: with_reduced_axes(g, n) * op.Sign(n.data), axes=nondiff, doc="0 at 0.")
vjp("ReduceLogSum", data=lambda g, n: _spread(g * op.Exp(-n.reduced), n), axes=nondiff)


def _l2(g: Tensor, n: NodeView) -> Tensor:
    length = op.Where(n.reduced.equals(0), 1, n.reduced)
    return with_reduced_axes(g / length, n) * n.data


vjp("ReduceL2", data=_l2, axes=nondiff, doc="0 at 0.")


def _log_sum_exp(g: Tensor, n: NodeView) -> Tensor:
    return with_reduced_axes(g, n) * op.Exp(n.data - with_reduced_axes(n.reduced, n))


vjp("ReduceLogSumExp", data=_log_sum_exp, axes=nondiff)


def _extreme(g: Tensor, n: NodeView) -> Tensor:
    axis = _axis_with_index(n)
    if axis is not None:
        x = in_type(n.data, wide_type(n.data))
        index = (op.ArgMax if n.node.op_type == "ReduceMax" else op.ArgMin)(x, axis=axis, keepdims=1)
        return op.GatherElementsGrad(with_reduced_axes(g, n), op.Shape(x), index, axis=axis)
    winners = op.CastLike(n.data.equals(with_reduced_axes(n.reduced, n)), g)
    return with_reduced_axes(g, n) / _reduced("ReduceSum", winners, n) * winners


def _axis_with_index(n: NodeView) -> int | None:
    """The axis, if it is PyTorch's max or min along one, which also gives the index: the gradient goes there alone."""
    axes = None if n.axes is None else n.axes.constant
    if axes is None or axes.size != 1:
        return None
    axis, better = int(axes[0]), n.node.op_type.removeprefix("Reduce")
    if n.torch_op:
        return axis if n.torch_op == f"aten.{better.lower()}.dim" else None
    users = [user for user in n.data.value.consumers() if user.op_type == f"Arg{better}"]
    return axis if any(user.attributes.get_int("axis", 0) == axis for user in users) else None


TIES = (
    "Where several elements tie, each gets an equal share, as in PyTorch's amax; if it was torch.max(dim), all goes to "
    "its index."
)
vjp("ReduceMax", data=_extreme, axes=nondiff, doc=TIES)
vjp("ReduceMin", data=_extreme, axes=nondiff, doc=TIES)


def _prod(g: Tensor, n: NodeView) -> Tensor:
    """The product of all others: of those that are not 0, if there is no 0 among the others.

    If there is one, it stands as a factor of its own, so that a second derivative sees it.
    """
    x = n.data
    is_zero = x.equals(0)
    zero = op.CastLike(is_zero, x)
    zeros_elsewhere = _reduced("ReduceSum", zero, n) - zero
    factor = op.Where(is_zero, 1, x)
    others = _reduced("ReduceProd", factor, n) / factor
    zero_factor = op.Where(is_zero, x, 0)
    its_value = _reduced("ReduceSum", zero_factor, n) - zero_factor
    with_zero = op.Where(zeros_elsewhere.equals(1), its_value, 0)
    return with_reduced_axes(g, n) * others * op.Where(zeros_elsewhere.equals(0), 1, with_zero)


vjp(
    "ReduceProd",
    doc="Right for data with zeros, also in a second derivative; a third derivative leaves them out.",
    data=_prod,
    axes=nondiff,
)
