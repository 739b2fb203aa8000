"""SoftmaxCrossEntropyLossGrad: the gradient of SoftmaxCrossEntropyLoss."""

from collections.abc import Callable

import numpy as np
from onnx import TensorProto

from onnxgrad.arguments import label_error
from onnxgrad.function_body import Body, Value
from onnxgrad.op import op
from onnxgrad.schema import Dim, Known, agree
from onnxgrad.tensor_types import Index, T, accumulator

REDUCTIONS = ("none", "mean", "sum")


def _shape_rule(
    dY: Known, log_prob: Known, label: Known, weight: Known | None, reduction: str, ignore_index: int
) -> tuple[Dim, ...] | None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}, expected one of {', '.join(map(repr, REDUCTIONS))}")
    if dY.dims is not None:
        if reduction != "none" and dY.dims not in ((), (1,)):
            raise ValueError(f"dY has shape {list(dY.dims)}, expected a single number for reduction {reduction!r}")
        if reduction == "none" and label.dims is not None and not agree(dY.dims, label.dims):
            raise ValueError(f"dY has shape {list(dY.dims)}, expected {list(label.dims)} as label has")
    if log_prob.dims is None:
        return None
    if len(log_prob.dims) < 2:
        raise ValueError(f"log_prob has shape {list(log_prob.dims)}, expected at least two dimensions")
    samples = (log_prob.dims[0], *log_prob.dims[2:])
    if label.dims is not None and not agree(label.dims, samples):
        raise ValueError(
            f"label has shape {list(label.dims)}, expected {list(samples)} for log_prob of shape {list(log_prob.dims)}"
        )
    if weight is not None and weight.dims is not None and not agree(weight.dims, log_prob.dims[1:2]):
        raise ValueError(f"weight has shape {list(weight.dims)}, expected {list(log_prob.dims[1:2])}, one per class")
    return log_prob.dims


def _function(
    o: Body, dY: Value, log_prob: Value, label: Value, weight: Value | None, reduction: str, ignore_index: int
) -> list[Value]:
    def compute(work: Callable[[Value], Value]) -> list[Value]:
        log = work(log_prob)
        ignored = o.Cast(label, to=TensorProto.INT64).equals(ignore_index)
        # An ignored sample may name a class that is none: it gets the first one, and counts for nothing.
        chosen = o.Where(ignored, o.like(0, label), label)
        counts = o.CastLike(~ignored, log)
        if weight is not None:
            given = work(o.given(weight, log_prob, o.ints(0)))
            counts = o.Where(ignored, o.like(0, log), o.Gather(given, chosen, axis=0))
        g = work(dY) if reduction == "none" else o.ReduceSum(work(dY), keepdims=0)  # one number: as a scalar
        if reduction == "mean":
            total = o.ReduceSum(counts, keepdims=0)
            g = g / o.Where(total.equals(0), o.like(1, log), total)
        each = o.Unsqueeze(g * counts, [1])
        skipped = o.Unsqueeze(ignored, [1])
        spread = o.Where(skipped, o.like(0, log), o.Exp(log) * each)
        return [o.ScatterElements(spread, o.Unsqueeze(chosen, [1]), -each, axis=1, reduction="add")]

    return o.in_work_type(dY, compute)


@op("SoftmaxCrossEntropyLossGrad", outputs="d_logits", shape=_shape_rule, function=_function)
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
    ignored = label == ignore_index
    bad = ~ignored & ((label < 0) | (label >= classes))
    if bad.any():
        position = int(np.argmax(bad))
        raise label_error(label.shape, position, label.flat[position], classes, ignore_index)
    chosen = np.where(ignored, 0, label)
    if weight is None or not classes:
        counts = (~ignored).astype(dtype)
    else:
        counts = np.where(ignored, 0, weight.astype(dtype)[chosen]).astype(dtype)
    g = dY.astype(dtype) if reduction == "none" else dY.astype(dtype).reshape(())
    total = np.sum(counts, dtype=np.float64) if reduction == "mean" else 0
    each = np.expand_dims((g / dtype.type(total) if total else g) * counts, 1)
    right = np.arange(classes).reshape(-1, *[1] * (label.ndim - 1)) == np.expand_dims(chosen, 1)
    d_logits: T = (np.exp(log_prob.astype(dtype)) - right) * each
    return np.where(np.expand_dims(ignored, 1), dtype.type(0), d_logits).astype(log_prob.dtype)
