"""SoftmaxCrossEntropyLossInternal, which keeps what the gradient needs, and SoftmaxCrossEntropyLossGrad."""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from onnx import helper

from onnxgrad.arguments import label_error
from onnxgrad.op import op
from onnxgrad.schema import Dim, Known, agree
from onnxgrad.tensor_types import Array, Index, T, TypeConstraint, accumulator

REDUCTIONS = ("none", "mean", "sum")
NEVER_COUNTED = -1  # the label that is ignored where nothing says which one is

IgnoredLabel = Annotated[Array, TypeConstraint("Tignored", ("int64",), on_host=True, single=True)]


def _check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}, expected one of {', '.join(map(repr, REDUCTIONS))}")


def _check_samples(
    scores: tuple[str, Known], labels: tuple[str, Known], weights: tuple[str, Known | None]
) -> tuple[Dim, ...] | None:
    """The shape that labels have, as far as it is known; each input comes with its name."""
    (name, given), (label_name, label), (weight_name, weight) = scores, labels, weights
    if given.dims is None:
        return label.dims
    if len(given.dims) < 2:
        raise ValueError(f"{name} has shape {list(given.dims)}, expected at least two dimensions")
    samples = (given.dims[0], *given.dims[2:])
    if label.dims is not None and not agree(label.dims, samples):
        raise ValueError(
            f"{label_name} has shape {list(label.dims)}, expected {list(samples)} for {name} of shape "
            f"{list(given.dims)}"
        )
    if weight is not None and weight.dims is not None and not agree(weight.dims, given.dims[1:2]):
        raise ValueError(
            f"{weight_name} has shape {list(weight.dims)}, expected {list(given.dims[1:2])}, one per class"
        )
    return samples if label.dims is None else label.dims


def counted(
    labels: Array, weights: Array | None, classes: int, ignored_label: int, dtype: np.dtype[np.generic]
) -> tuple[Array, Array, Array]:
    """Which samples are ignored, the classes of all (0 for these), and what each counts for."""
    ignored = labels == ignored_label
    bad = ~ignored & ((labels < 0) | (labels >= classes))
    if bad.any():
        position = int(np.argmax(bad))
        raise label_error(labels.shape, position, labels.reshape(-1)[position], classes, ignored_label)
    chosen = np.where(ignored, 0, labels)
    if weights is None or not classes:
        return ignored, chosen, (~ignored).astype(dtype)
    return ignored, chosen, np.where(ignored, 0, weights.astype(dtype)[chosen]).astype(dtype)


def _internal_shapes(
    scores: Known,
    labels: Known,
    weights: Known | None,
    ignore_index: Known | None,
    reduction: str,
    output_type: int | None,
) -> tuple[tuple[Dim, ...] | None, tuple[Dim, ...] | None]:
    _check_reduction(reduction)
    samples = _check_samples(("scores", scores), ("labels", labels), ("weights", weights))
    if ignore_index is not None and ignore_index.dims not in (None, (), (1,), (None,)):
        raise ValueError(f"ignore_index has shape {list(ignore_index.dims or ())}, expected a single number")
    return samples if reduction == "none" else (), scores.dims


def check_output_type(dtype: str, output_type: int | None) -> None:
    """Refuses a type of the results that is not that of the scores, given by NumPy's name."""
    expected = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    if output_type is not None and output_type != expected:
        raise ValueError(f"output_type is {output_type}, expected none or {expected}: {dtype} as scores are")


def ignored_label(ignore_index: Array | None) -> int:
    """The label that counts for nothing."""
    return NEVER_COUNTED if ignore_index is None else int(ignore_index.reshape(-1)[0])


@op(
    "SoftmaxCrossEntropyLossInternal",
    outputs=("output", "log_prob?"),
    shape=_internal_shapes,
)
def softmax_cross_entropy_loss_internal(
    scores: T,
    labels: Index,
    weights: T | None = None,
    ignore_index: IgnoredLabel | None = None,
    reduction: str = "mean",
    output_type: int | None = None,
    outputs: Sequence[str] | None = None,
) -> tuple[T | None, T | None]:
    """SoftmaxCrossEntropyLoss in one operator, with the logarithms of the probabilities that its gradient needs.

    Classes are the second axis of `scores`: log_prob = scores - log(sum of exp(scores) along it), which is computed
    from the differences to the highest score. The loss of a sample is -log_prob at its label, times the weight of that
    class, or 1; it is 0 if the label is `ignore_index`, -1 unless given. `output` has all losses for reduction "none",
    their sum for "sum", and for "mean" their sum divided by that of the weights, unless that is 0. `output_type` may
    only be the type of the scores. float16 and bfloat16 compute in float32 and round once; losses are added up in
    float64.
    """
    check_output_type(str(scores.dtype), output_type)
    dtype, classes = accumulator(scores.dtype), scores.shape[1]
    ignored, chosen, counts = counted(labels, weights, classes, ignored_label(ignore_index), dtype)
    with np.errstate(invalid="ignore", divide="ignore"):  # infinite scores make NaN, no classes log(0)
        x = scores.astype(dtype)
        shifted = x - np.max(x, 1, keepdims=True, initial=-np.inf)
        log_prob = shifted - np.log(np.sum(np.exp(shifted), 1, keepdims=True))
        right = np.take_along_axis(log_prob, np.expand_dims(chosen, 1), 1)[:, 0] if classes else np.zeros_like(counts)
        losses = np.where(ignored, dtype.type(0), -right * counts)
    loss = losses if reduction == "none" else np.sum(losses, dtype=np.float64)
    total = np.sum(counts, dtype=np.float64) if reduction == "mean" else 0
    output = np.asarray(loss / total if total else loss, scores.dtype)
    return (
        output if outputs is None or "output" in outputs else None,
        log_prob.astype(scores.dtype) if outputs is None or "log_prob" in outputs else None,
    )


def _shape_rule(
    dY: Known, log_prob: Known, label: Known, weight: Known | None, reduction: str, ignore_index: int
) -> tuple[Dim, ...] | None:
    _check_reduction(reduction)
    if dY.dims is not None:
        if reduction != "none" and dY.dims not in ((), (1,)):
            raise ValueError(f"dY has shape {list(dY.dims)}, expected a single number for reduction {reduction!r}")
        if reduction == "none" and label.dims is not None and not agree(dY.dims, label.dims):
            raise ValueError(f"dY has shape {list(dY.dims)}, expected {list(label.dims)} as label has")
    _check_samples(("log_prob", log_prob), ("label", label), ("weight", weight))
    return log_prob.dims


@op("SoftmaxCrossEntropyLossGrad", outputs="d_logits", shape=_shape_rule)
def softmax_cross_entropy_loss_grad(
    dY: T, log_prob: T, label: Index, weight: T | None = None, reduction: str = "mean", ignore_index: int = -1
) -> T:
    """Gradient of SoftmaxCrossEntropyLoss: probabilities minus 1 at the label, times what the sample counts for.

    Classes are the second axis of `log_prob`, which SoftmaxCrossEntropyLoss gave: the logarithms of the probabilities.
    A sample counts for the `weight` of its class, or 1, and for nothing if its label is `ignore_index`; for reduction
    "mean" divided by the sum of these numbers, unless that is 0. float16 and bfloat16 compute in float32 and round
    once.
    """
    dtype, classes = accumulator(log_prob.dtype), log_prob.shape[1]
    ignored, chosen, counts = counted(label, weight, classes, ignore_index, dtype)
    g = dY.astype(dtype) if reduction == "none" else dY.astype(dtype).reshape(())
    total = np.sum(counts, dtype=np.float64) if reduction == "mean" else 0
    each = np.expand_dims((g / dtype.type(total) if total else g) * counts, 1)
    right = np.arange(classes).reshape(-1, *[1] * (label.ndim - 1)) == np.expand_dims(chosen, 1)
    d_logits: T = (np.exp(log_prob.astype(dtype)) - right) * each
    return np.where(np.expand_dims(ignored, 1), dtype.type(0), d_logits).astype(log_prob.dtype)
