"""Dropout: the gradient passes where a number did, scaled as it was."""

from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import nondiff, op, vjp
from onnxgrad.schema import MICROSOFT, OWN


def _dropout(g: Tensor, n: NodeView) -> Tensor:
    training = n.training_mode
    fixed = None if training is None else training.constant
    if training is None or (fixed is not None and not fixed.item()):
        return g
    # Both are always given: nodes that share an ONNX function must agree on what they have.
    ratio = n.builder.constant(0.5, g.dtype) if n.ratio is None else n.ratio
    return op.DropoutGrad(g, n.mask, ratio, training)


vjp("Dropout", data=_dropout, ratio=nondiff, training_mode=nondiff)
vjp(
    "DropoutGrad",
    domain=MICROSOFT,
    dy=lambda g, n: op.DropoutGrad(g, n.mask, n.ratio, n.training_mode),
    mask=nondiff,
    ratio=nondiff,
    training_mode=nondiff,
)
vjp(
    "SeededDropout",
    domain=OWN,
    data=lambda g, n: op.SeededDropout(g, n.seed, ratio=n.ratio),
    seed=nondiff,
)
