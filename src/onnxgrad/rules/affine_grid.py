"""AffineGrid: a product of theta with the places of the grid, which are what theta makes of them where it is one."""

from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import nondiff, op, vjp
from onnxgrad.rules.shape import filled_like, size_along


def _theta(g: Tensor, n: NodeView) -> Tensor:
    rank = size_along(n.theta, 1)
    at = [op.Range(0, op.Squeeze(size, [0]), 1) for size in (rank, rank + 1)]
    one = op.Unsqueeze(op.CastLike(op.Unsqueeze(at[0], [1]).equals(at[1]), g), [0])
    size = op.Concat([1], op.Slice(n.size, [1], op.Shape(n.size), [0]), axis=0)
    places = op.Reshape(op.AffineGrid(one, size, align_corners=n.align_corners), op.Concat([-1], rank, axis=0))
    column = filled_like(op.Slice(places, [0], [1], [1]), 1)
    rows = op.Reshape(g, op.Concat(size_along(n.theta, 0), [-1], rank, axis=0))
    return op.Transpose(rows, perm=[0, 2, 1]) @ op.Concat(places, column, axis=1)


vjp("AffineGrid", theta=_theta, size=nondiff)
