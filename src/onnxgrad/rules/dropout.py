"""Dropout: the gradient passes where a number did, scaled as it was."""

from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Number, Tensor
from onnxgrad.rules import nondiff, op, vjp
from onnxgrad.rules.normalization import in_type


def _dropout(g: Tensor, n: NodeView) -> Tensor:
    training = n.training_mode
    fixed = None if training is None else training.constant
    if training is None or (fixed is not None and not fixed.item()):
        return g
    scale = _scale(g, n)
    if fixed is None:  # without training the mask keeps all
        one, scaled = (x if isinstance(x, Tensor) else n.builder.constant(x, g.dtype) for x in (1, scale))
        scale = op.Where(training, scaled, one)
    return op.Where(n.mask, g * scale, 0)


def _scale(g: Tensor, n: NodeView) -> Number:
    """What numbers that are kept were multiplied by."""
    if n.ratio is None:
        return 2.0
    number = n.ratio.constant
    if number is not None:
        return 1 / (1 - float(number.item()))
    return op.Reciprocal(1 - in_type(n.ratio, g.dtype))


vjp("Dropout", data=_dropout, ratio=nondiff, training_mode=nondiff)


vjp(
    "SeededDropout",
    domain="com.microsoft",
    data=lambda g, n: op.SeededDropout(g, n.seed, ratio=n.ratio),
    seed=nondiff,
)
