"""Losses of class labels: NegativeLogLikelihoodLoss, SoftmaxCrossEntropyLoss, and forms of that as one operator.

And the gradient of their gradient.
"""

from onnxgrad.graph.builder import builder_at_work
from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.ops.softmax_cross_entropy_loss import NEVER_COUNTED
from onnxgrad.rules import nondiff, op, todo, vjp
from onnxgrad.rules.normalization import share_along
from onnxgrad.schema import MICROSOFT, OWN


class Samples:
    """For each sample its class and what its loss counts for; classes stand in an axis of their own, the second."""

    def __init__(self, n: NodeView, scores: Tensor, labels: Tensor, weights: Tensor | None) -> None:
        self.reduction, self.dtype = n.reduction, scores.dtype
        ignored_label = _ignored_label(n)
        ignored = None if ignored_label is None else labels.equals(ignored_label)
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
        total = op.ReduceSum(self.weight, keepdims=0)
        return g / op.Where(total.equals(0), 1, total)  # where nothing counts, nothing has a gradient

    def shares(self) -> Tensor:
        """What each loss counts for in the result."""
        one = builder_at_work().constant(1, self.dtype)
        weight = op.Expand(one, op.Shape(self.labels)) if self.weight is None else self.weight
        return self.averaged(weight)

    def gradients(self, g: Tensor) -> Tensor:
        """The gradient of each chosen log-probability, but for its sign."""
        each = self.averaged(g)
        if self.weight is not None:
            each = each * self.weight
        return op.Unsqueeze(each, [1]) if each.rank else each

    def chosen(self, x: Tensor) -> Tensor:
        """For each sample the element of its class."""
        return op.Squeeze(op.GatherElements(x, self.classes, axis=1), [1])

    def of_weights(self, g: Tensor, losses: Tensor, mean: Tensor | None, weights: Tensor) -> Tensor:
        """The gradient of the classes' weights, given the loss of each sample, and their mean where that counts."""
        if mean is not None:
            losses = losses - mean
        each = losses * self.averaged(g)
        each = each if self.counted is None else each * self.counted
        return op.GatherGrad(op.Shape(weights), self.labels, each, axis=0)


def _ignored_label(n: NodeView) -> int | None:
    """The attribute ignore_index, or the input, which SoftmaxCrossEntropyLossGrad takes as an attribute."""
    given = n.ignore_index
    if n.node.op_type != "SoftmaxCrossEntropyLossInternal":
        return None if given is None else int(given)
    if given is None:
        return NEVER_COUNTED
    if given.constant is None:
        raise ValueError("ignore_index is computed by the model, expected a constant")
    return int(given.constant.item())


def _likelihood(n: NodeView) -> Samples:
    return Samples(n, n.input, n.target, n.weight)


def _log_probabilities(g: Tensor, n: NodeView) -> Tensor:
    samples = _likelihood(n)
    each = -op.Expand(samples.gradients(g), op.Shape(samples.classes))
    return op.GatherElementsGrad(each, op.Shape(n.input), samples.classes, axis=1)


def _mean(n: NodeView, loss: Tensor) -> Tensor | None:
    return loss if n.reduction == "mean" else None


def _likelihood_weights(g: Tensor, n: NodeView) -> Tensor:
    samples = _likelihood(n)
    return samples.of_weights(g, -samples.chosen(n.input), _mean(n, n.loss), n.weight)


vjp(
    "NegativeLogLikelihoodLoss",
    input=_log_probabilities,
    target=nondiff,
    weight=_likelihood_weights,
)


def _cross_entropy(n: NodeView) -> Samples:
    return Samples(n, n.scores, n.labels, n.weights)


def _scores(g: Tensor | None, n: NodeView) -> Tensor | None:
    """Probabilities minus 1 at the right class; log_prob, where it is used, adds what LogSoftmax would."""
    g_log_prob, total = n.grad(1), None
    if g is not None:
        ignored = _ignored_label(n)
        ignored = NEVER_COUNTED if ignored is None else ignored  # as in onnxruntime
        total = op.SoftmaxCrossEntropyLossGrad(
            g, n.log_prob, n.labels, n.weights, reduction=n.reduction, ignore_index=ignored
        )
    if g_log_prob is not None:
        part = op.LogSoftmaxGrad_13(g_log_prob, n.log_prob, axis=1)
        total = part if total is None else total + part
    return total


def _weights(g: Tensor | None, n: NodeView) -> Tensor | None:
    if g is None:
        return None
    samples = _cross_entropy(n)
    return samples.of_weights(g, -samples.chosen(n.log_prob), _mean(n, n.output), n.weights)


vjp(
    "SoftmaxCrossEntropyLoss",
    outputs=("output", "log_prob"),
    scores=_scores,
    labels=nondiff,
    weights=_weights,
)
vjp(
    "SoftmaxCrossEntropyLossInternal",
    domain=MICROSOFT,
    outputs=("output", "log_prob"),
    scores=_scores,
    labels=nondiff,
    weights=_weights,
    ignore_index=nondiff,
)


# d_logits = (exp(log_prob) - 1 at the label) · each, where each is dY times what the sample counts for.


def _of_gradient(n: NodeView) -> Samples:
    return Samples(n, n.log_prob, n.label, n.weight)


def _errors(g: Tensor, n: NodeView, samples: Samples) -> Tensor:
    """For each sample the sum over classes of `g` times the probability minus 1 at the label."""
    return op.ReduceSum(g * op.Exp(n.log_prob), [1], keepdims=0) - samples.chosen(g)


def _seeds(g: Tensor, n: NodeView) -> Tensor:
    samples = _of_gradient(n)
    each = _errors(g, n, samples) * samples.shares()
    if n.reduction == "none":
        return each
    return op.Reshape(op.ReduceSum(each, keepdims=0), op.Shape(n.dY))


def _logarithms(g: Tensor, n: NodeView) -> Tensor:
    return g * op.Exp(n.log_prob) * _of_gradient(n).gradients(_seed(n))


def _seed(n: NodeView) -> Tensor:
    """dY as the loss had it: a scalar, unless there is no reduction."""
    seed: Tensor = n.dY if n.reduction == "none" or n.dY.rank == 0 else op.Reshape(n.dY, [])
    return seed


def _gradient_weights(g: Tensor, n: NodeView) -> Tensor:
    samples = _of_gradient(n)
    errors = _errors(g, n, samples)
    mean = op.ReduceSum(errors * samples.shares(), keepdims=0) if n.reduction == "mean" else None
    return samples.of_weights(_seed(n), errors, mean, n.weight)


vjp(
    "SoftmaxCrossEntropyLossGrad",
    domain=MICROSOFT,
    dY=_seeds,
    log_prob=_logarithms,
    label=nondiff,
    weight=_gradient_weights,
)


# The operator has computed the gradients already: they are multiplied with that of the loss, if that is not 1.


def _times(g: Tensor, n: NodeView, gradient: Tensor) -> Tensor:
    node = g.value.producer()
    if node is not None and node.op_type == "Mul":  # that of a product with a scale: 1 · scale
        factors = [g.builder.tensor(v) for v in node.inputs if v is not None]
        others = [f for f in factors if not _is_one(f)]
        g = others[0] if len(others) == 1 else g
    if n.scale is not None:
        if g.value is n.scale.value:
            return gradient
        g = g / op.Reshape(n.scale, [])
    if _is_one(g):
        return gradient
    product: Tensor = op.CastLike(op.CastLike(gradient, g) * g, gradient)  # g is not rounded to a half type
    return product


def _is_one(tensor: Tensor) -> bool:
    return tensor.constant is not None and tensor.constant.size == 1 and tensor.constant.item() == 1


vjp(
    "LinearCrossEntropy",
    domain=OWN,
    X=lambda g, n: _times(g, n, n.dX),
    W=lambda g, n: _times(g, n, n.dW),
    labels=nondiff,
    bias=lambda g, n: _times(g, n, n.dB),
    weights=todo,
    scale=nondiff,
)
