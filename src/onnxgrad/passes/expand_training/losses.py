"""Cross entropies: of one-hot labels, of scores whose last axis is that of the classes, of results in another type."""

import onnx_ir as ir

from onnxgrad.graph.builder import op
from onnxgrad.graph.cast import in_type
from onnxgrad.graph.tensor import Tensor
from onnxgrad.ops.softmax_cross_entropy_loss import NEVER_COUNTED
from onnxgrad.passes.expand_training.registry import expands, scalar
from onnxgrad.rules.normalization import share_along

REDUCTIONS = ("none", "mean", "sum")


def _expect_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}, expected one of {', '.join(map(repr, REDUCTIONS))}")


def _share(x: Tensor, weight: Tensor | None) -> Tensor | float:
    """What a mean multiplies a sum by: 1 over the number of samples, or over the sum of their weights."""
    if weight is not None:
        return op.Reciprocal(op.ReduceSum(weight, keepdims=0))  # type: ignore[no-any-return]
    return share_along(x, range(x.rank - 1), x.dtype)  # type: ignore[return-value]


def _reduced(losses: Tensor, reduction: str, x: Tensor, weight: Tensor | None) -> Tensor:
    _expect_reduction(reduction)
    if reduction == "none":
        return losses
    total: Tensor = op.ReduceSum(losses, keepdims=0)
    return total * _share(x, weight) if reduction == "mean" else total


def _each(dY: Tensor, reduction: str, x: Tensor, weight: Tensor | None) -> Tensor:
    """The gradient of the loss of each sample, with an axis for the classes."""
    _expect_reduction(reduction)
    if reduction == "none":
        return op.Unsqueeze(dY if weight is None else dY * weight, [-1])  # type: ignore[no-any-return]
    each = scalar(dY) * _share(x, weight) if reduction == "mean" else scalar(dY)
    return each if weight is None else op.Unsqueeze(weight, [-1]) * each


@expands("SoftmaxCrossEntropy")
def _cross_entropy(logits: Tensor, label: Tensor, *, reduction: str = "mean") -> list[Tensor]:
    log_prob = op.LogSoftmax(logits, axis=-1)
    losses = -op.ReduceSum(log_prob * label, [-1], keepdims=0)
    return [_reduced(losses, reduction, logits, None), log_prob]


@expands("SoftmaxCrossEntropyGrad")
def _cross_entropy_grad(dY: Tensor, log_prob: Tensor, label: Tensor, *, reduction: str = "mean") -> Tensor:
    return (op.Exp(log_prob) - label) * _each(dY, reduction, log_prob, None)  # type: ignore[no-any-return]


@expands("SparseSoftmaxCrossEntropy")
def _sparse_cross_entropy(
    logits: Tensor, label: Tensor, weight: Tensor | None = None, *, reduction: str = "mean"
) -> list[Tensor]:
    log_prob = op.LogSoftmax(logits, axis=-1)
    losses = -op.Squeeze(op.GatherElements(log_prob, op.Unsqueeze(label, [-1]), axis=-1), [-1])
    return [_reduced(losses if weight is None else losses * weight, reduction, logits, weight), log_prob]


@expands("SparseSoftmaxCrossEntropyGrad")
def _sparse_cross_entropy_grad(
    dY: Tensor, log_prob: Tensor, label: Tensor, weight: Tensor | None = None, *, reduction: str = "mean"
) -> Tensor:
    numbers = op.Range(0, op.Squeeze(op.Shape(log_prob, start=-1)), 1)
    here = op.Unsqueeze(op.Cast(label, to=ir.DataType.INT64.value), [-1]).equals(numbers)
    error = op.Exp(log_prob) - op.CastLike(here, log_prob)
    return error * _each(dY, reduction, log_prob, weight)  # type: ignore[no-any-return]


def _with_attribute(labels: Tensor, ignore_index: Tensor | None) -> tuple[Tensor, int]:
    """Labels, and which of them counts for nothing, as an attribute has to say it."""
    if ignore_index is None:
        return labels, NEVER_COUNTED
    if ignore_index.constant is not None:
        return labels, int(ignore_index.constant.item())
    ignored = labels.equals(in_type(scalar(ignore_index), labels.dtype))
    return op.Where(ignored, NEVER_COUNTED, labels), NEVER_COUNTED


def _wider(dtype: ir.DataType, output_type: int | None) -> ir.DataType:
    """The type to compute in, of two."""
    result = dtype if output_type is None else ir.DataType(output_type)
    return max(dtype, result, key=lambda d: d.itemsize)


@expands("SoftmaxCrossEntropyLossInternal")
def _loss_of_other_type(
    scores: Tensor, labels: Tensor, weights: Tensor | None = None, ignore_index: Tensor | None = None, *,
    reduction: str = "mean", output_type: int | None = None,
) -> list[Tensor] | None:  # fmt: skip
    if output_type is None or output_type == scores.dtype.value:
        return None  # which is an operator of ours
    dtype = _wider(scores.dtype, output_type)
    results = op.SoftmaxCrossEntropyLossInternal(
        in_type(scores, dtype), labels, None if weights is None else in_type(weights, dtype), ignore_index,
        reduction=reduction, outputs=2,
    )  # fmt: skip
    return [in_type(r, ir.DataType(output_type)) for r in results]


@expands("SoftmaxCrossEntropyLossInternalGrad")
def _loss_grad(
    dY: Tensor, log_prob: Tensor, label: Tensor, weight: Tensor | None = None, ignore_index: Tensor | None = None,
    bias: Tensor | None = None, *, reduction: str = "mean", output_type: int | None = None,
) -> Tensor:  # fmt: skip
    dtype = _wider(log_prob.dtype, output_type)
    labels, ignored = _with_attribute(label, ignore_index)
    gradient = op.SoftmaxCrossEntropyLossGrad(
        in_type(dY, dtype), in_type(log_prob, dtype), labels, None if weight is None else in_type(weight, dtype),
        reduction=reduction, ignore_index=ignored,
    )  # fmt: skip
    if bias is not None:
        gradient = gradient + op.Reshape(in_type(bias, dtype), op.Shape(log_prob), allowzero=1)
    return in_type(gradient, log_prob.dtype if output_type is None else ir.DataType(output_type))


@expands("NegativeLogLikelihoodLossInternal", "NegativeLogLikelihoodLossInternal2")
def _likelihood(
    input: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: Tensor | None = None, *,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    labels, ignored = _with_attribute(target, ignore_index)
    attributes = {} if ignore_index is None else {"ignore_index": ignored}
    return op.NegativeLogLikelihoodLoss(input, labels, weight, reduction=reduction, **attributes)  # type: ignore[no-any-return]
