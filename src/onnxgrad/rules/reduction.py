"""Reductions."""

from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import nondiff, op, vjp


def with_reduced_axes(x: Tensor, n: NodeView) -> Tensor:
    """A result of a reduction with the axes that are gone put back, of size 1."""
    if n.keepdims:
        return x
    if n.axes is None:
        return op.Reshape(x, [1] * n.data.rank)
    return op.Unsqueeze(x, n.axes)


vjp(
    "ReduceSum",
    data=lambda g, n: op.Expand(with_reduced_axes(g, n), op.Shape(n.data)),
    axes=nondiff,
)
