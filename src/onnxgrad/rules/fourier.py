"""The discrete Fourier transform: its gradient is a transform in the other direction."""

from typing import Any

from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import nondiff, op, vjp
from onnxgrad.rules.shape import size_along

AXIS_IS_INPUT = 20  # from this opset on


def _dft(g: Tensor, n: NodeView) -> Tensor:
    """The conjugate transpose, which is the other direction but for the factor of 1/N that the inverse has."""
    x, dft, axis = n.input, *_transform(n)
    size = op.Gather(op.Shape(x), axis)
    if n.inverse and n.onesided:
        # All frequencies but the first and the middle one stand for two.
        back = dft(g, onesided=1)
        count = op.Gather(op.Shape(g), axis)
        at = op.Range(0, op.Squeeze(op.Gather(op.Shape(back), axis), [0]), 1)
        weight = op.CastLike(op.Where(at.equals(0) | (at * 2).equals(count), 1, 2), g) / op.CastLike(count, g)
        along = op.Where(op.Range(0, x.rank, 1).equals(axis), -1, 1)
        return _resized(back * op.Reshape(weight, along), axis, size)
    length = size if n.dft_length is None else op.Reshape(n.dft_length, [1])
    if n.onesided:  # nothing depends on the other half
        g = _resized(g, axis, length)
    back, scale = dft(g, inverse=1 - n.inverse), op.CastLike(length, g)
    back = back / scale if n.inverse else back * scale
    if x.shape is None or x.shape[-1] != 2:  # of real numbers
        back = op.Slice(back, [0], size_along(x, -1), [-1])
    return back if n.dft_length is None else _resized(back, axis, size)


def _transform(n: NodeView) -> tuple[Any, Tensor]:
    """A transform along the axis of the node's, and the axis, from 0 on, as a vector of one element."""
    if n.builder.opsets[""] >= AXIS_IS_INPUT:
        axis = -2 if n.axis is None else n.axis
        return lambda x, **options: op.DFT(x, None, axis, **options), op.Mod(op.Reshape(axis, [1]), [n.input.rank])
    given = n.node.attributes.get("axis")
    axis = 1 if given is None else given.as_int()
    return lambda x, **options: op.DFT(x, None, axis=axis, **options), op.Mod([axis], [n.input.rank])


def _resized(x: Tensor, axis: Tensor, size: Tensor) -> Tensor:
    """With zeros at the end of an axis, or without what is there."""
    return op.Pad(x, op.Concat([0], size - op.Gather(op.Shape(x), axis), axis=0), None, axis)


vjp("DFT", input=_dft, dft_length=nondiff, axis=nondiff)
