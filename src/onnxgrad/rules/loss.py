"""Losses of class labels: NegativeLogLikelihoodLoss and SoftmaxCrossEntropyLoss."""

from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import nondiff, op, vjp
from onnxgrad.rules.normalization import in_type, share_along, wide_type


class Samples:
    """For each sample its class and what its loss counts for; classes stand in an axis of their own, the second."""

    def __init__(self, n: NodeView, scores: Tensor, labels: Tensor, weights: Tensor | None) -> None:
        self.reduction, self.dtype = n.reduction, scores.dtype
        ignored = None if n.ignore_index is None else labels.equals(n.ignore_index)
        # An ignored sample may name a class that is none: it gets the first one, and counts for nothing.
        self.labels = labels if ignored is None else op.Where(ignored, 0, labels)
        self.counted = None if ignored is None else op.CastLike(~ignored, scores)
        self.weight = self.counted  # None: 1 for all
        if weights is not None:
            self.weight = op.Gather(weights, self.labels, axis=0)
            self.weight = self.weight if self.counted is None else self.weight * self.counted
        self.classes = op.Unsqueeze(self.labels, [1])

    def averaged(self, g: Tensor) -> Tensor:
        """The gradient of a sum of all losses, given that of the result; of each loss if there is no reduction."""
        if self.reduction != "mean":
            return g
        if self.weight is None:
            return g * share_along(self.labels, range(self.labels.rank), self.dtype)
        return g / op.ReduceSum(self.weight, keepdims=0)

    def gradients(self, g: Tensor) -> Tensor:
        """The gradient of each chosen log-probability, but for its sign."""
        each = self.averaged(g)
        if self.weight is not None:
            each = each * self.weight
        return op.Unsqueeze(each, [1]) if each.rank else each

    def of_weights(self, g: Tensor, log_prob: Tensor, loss: Tensor, weights: Tensor) -> Tensor:
        """The gradient of the classes' weights."""
        losses = -op.Squeeze(op.GatherElements(log_prob, self.classes, axis=1), [1])
        if self.reduction == "mean":
            losses = losses - loss
        each = losses * self.averaged(g)
        each = each if self.counted is None else each * self.counted
        return op.GatherGrad(op.Shape(weights), self.labels, each, axis=0)


def _likelihood(n: NodeView) -> Samples:
    return Samples(n, n.input, n.target, n.weight)


def _log_probabilities(g: Tensor, n: NodeView) -> Tensor:
    samples = _likelihood(n)
    each = -op.Expand(samples.gradients(g), op.Shape(samples.classes))
    return op.GatherElementsGrad(each, op.Shape(n.input), samples.classes, axis=1)


vjp(
    "NegativeLogLikelihoodLoss",
    input=_log_probabilities,
    target=nondiff,
    weight=lambda g, n: _likelihood(n).of_weights(g, n.input, n.loss, n.weight),
)


def _cross_entropy(n: NodeView) -> Samples:
    return Samples(n, n.scores, n.labels, n.weights)


def _scores(g: Tensor | None, n: NodeView) -> Tensor:
    """Probabilities minus 1 at the right class; log_prob, where it is used, adds what LogSoftmax would."""
    dtype = wide_type(n.scores)  # onnxruntime adds no half numbers in ScatterElements
    probability, g_log_prob, total = op.Exp(in_type(n.log_prob, dtype)), n.grad(1), None
    if g is not None:
        samples = _cross_entropy(n)
        each = in_type(samples.gradients(g), dtype)
        chosen = -op.Expand(each, op.Shape(samples.classes))
        total = op.ScatterElements(probability * each, samples.classes, chosen, axis=1, reduction="add")
    if g_log_prob is not None:
        g_log_prob = in_type(g_log_prob, dtype)
        part = g_log_prob - probability * op.ReduceSum(g_log_prob, [1], keepdims=1)
        total = part if total is None else total + part
    assert total is not None
    return in_type(total, n.scores.dtype)


vjp(
    "SoftmaxCrossEntropyLoss",
    outputs=("output", "log_prob"),
    scores=_scores,
    labels=nondiff,
    weights=lambda g, n: None if g is None else _cross_entropy(n).of_weights(g, n.log_prob, n.output, n.weights),
)
