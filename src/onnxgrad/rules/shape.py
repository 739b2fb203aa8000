"""Operators that move numbers without changing them: shapes, types, copies."""

from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import no_gradient, nondiff, op, vjp

vjp("Identity", input=lambda g, n: g)
vjp("Cast", input=lambda g, n: op.CastLike(g, n.input))
vjp("CastLike", input=lambda g, n: op.CastLike(g, n.input), target_type=nondiff)


def _as_before(g: Tensor, n: NodeView) -> Tensor:
    return op.Reshape(g, op.Shape(n.data))


vjp("Reshape", data=_as_before, shape=nondiff)
vjp("Squeeze", data=_as_before, axes=nondiff)
vjp("Unsqueeze", data=_as_before, axes=nondiff)
vjp("Flatten", input=lambda g, n: op.Reshape(g, op.Shape(n.input)))
vjp("Expand", broadcast=True, input=lambda g, n: g, shape=nondiff)

no_gradient("Shape", "Size", "ConstantOfShape", "NonZero", "Range", "EyeLike")
