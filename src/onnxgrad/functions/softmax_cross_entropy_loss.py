"""SoftmaxCrossEntropyLossInternal and SoftmaxCrossEntropyLossGrad as ONNX functions."""

from collections.abc import Callable

from onnx import TensorProto

from onnxgrad.functions.body import Body, Value
from onnxgrad.ops.softmax_cross_entropy_loss import NEVER_COUNTED


def softmax_cross_entropy_loss_internal(
    o: Body, scores: Value, labels: Value, weights: Value | None, ignore_index: Value | None, reduction: str
) -> list[Value]:
    def compute(work: Callable[[Value], Value]) -> list[Value]:
        log_prob = o.LogSoftmax(work(scores), axis=1)
        given = o.Cast(labels, to=TensorProto.INT64)
        ignored = given.equals(NEVER_COUNTED if ignore_index is None else _single(o, ignore_index))
        # An ignored sample may name a class that is none: it gets the first one, and counts for nothing.
        chosen = o.Where(ignored, o.like(0, given), given)
        nothing = o.like(0, log_prob)
        losses = -o.Squeeze(o.GatherElements(log_prob, o.Unsqueeze(chosen, [1]), axis=1), [1])
        counts = o.CastLike(~ignored, log_prob)
        if weights is not None:
            each = o.Gather(work(o.given(weights, scores, o.ints(0))), chosen, axis=0)
            losses, counts = losses * each, o.Where(ignored, nothing, each)
        losses = o.Where(ignored, nothing, losses)
        if reduction == "none":
            return [losses, log_prob]
        loss, total = (o.ReduceSum(o.Cast(x, to=TensorProto.DOUBLE), keepdims=0) for x in (losses, counts))
        if reduction == "mean":
            loss = loss / o.Where(total.equals(0), o.like(1, total), total)
        return [o.CastLike(loss, log_prob), log_prob]

    return o.in_work_type(scores, compute)


def _single(o: Body, number: Value) -> Value:
    """A scalar of int64; where other nodes have none, by an operator that takes any number of inputs."""
    if number.guarded:
        number = o.Max(o.node("Constant", value_int=-(2**63)), number)
    return o.Reshape(number, [])


def softmax_cross_entropy_loss_grad(
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
