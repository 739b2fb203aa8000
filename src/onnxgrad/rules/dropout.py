"""Dropout: the gradient passes where a number did, scaled as it was."""

from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import nondiff, op, vjp
from onnxgrad.rules.normalization import in_type


def _dropout(g: Tensor, n: NodeView) -> Tensor:
    training = n.training_mode
    fixed = None if training is None else training.constant
    if training is None or (fixed is not None and not fixed.item()):
        return g
    ratio = 0.5 if n.ratio is None else n.ratio.constant
    if ratio is not None and float(ratio) == 0:
        return g
    if ratio is not None and fixed is not None:
        # With all dropped nothing is left to scale.
        return op.Where(n.mask, g * (0 if float(ratio) == 1 else 1 / (1 - float(ratio))), 0)
    keep = 0.5 if n.ratio is None else 1 - in_type(n.ratio, g.dtype)
    scale = 1 / keep if isinstance(keep, float) else op.Where(keep.equals(0), 0, op.Reciprocal(keep))
    if fixed is None:
        one = op.CastLike(1.0, g)
        scale = op.Where(training, scale, one)
    return op.Where(n.mask, g * scale, 0)


vjp("Dropout", data=_dropout, ratio=nondiff, training_mode=nondiff)
