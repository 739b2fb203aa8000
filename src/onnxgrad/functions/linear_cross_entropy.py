"""LinearCrossEntropy as ONNX functions, with all logits in memory."""

from collections.abc import Callable

from onnx import TensorProto

from onnxgrad.functions.body import Body, Value
from onnxgrad.functions.matrix import in_precision


def linear_cross_entropy(
    o: Body,
    X: Value,
    W: Value,
    labels: Value,
    bias: Value | None,
    weights: Value | None,
    scale: Value | None,
    transW: int,
    reduction: str,
    ignore_index: int,
    precision: str,
) -> list[Value]:
    def compute(work: Callable[[Value], Value]) -> list[Value]:
        def multiplied(a: Value, b: Value) -> Value:
            return o.MatMul(*(in_precision(o, v, precision) for v in (a, b)))

        def transposed(v: Value) -> Value:
            return o.Transpose(v, perm=[1, 0])

        rows = o.Reshape(o.Size(labels), [1])
        x = o.Reshape(work(X), o.dims(rows, o.slice(o.Shape(X), -1)), allowzero=1)
        w = work(o.CastLike(W, X))

        classes = o.slice(o.Shape(W), 0, 1) if transW else o.slice(o.Shape(W), 1, 2)

        def per_class(numbers: Value) -> Value:
            return o.CastLike(work(o.Reshape(o.given(numbers, W, o.ints(0)), classes, allowzero=1)), x)

        logits = multiplied(x, transposed(w) if transW else w)
        if bias is not None:
            logits = logits + per_class(bias)
        log_prob = o.LogSoftmax(logits, axis=1)
        given = o.Reshape(o.Cast(labels, to=TensorProto.INT64), [-1])
        ignored = given.equals(ignore_index)
        # An ignored sample may name a class that is none: it gets the first one, and counts for nothing.
        chosen = o.Where(ignored, o.like(0, given), given)
        nothing, places = o.like(0, x), o.Unsqueeze(chosen, [1])
        counts = o.CastLike(~ignored, x)
        if weights is not None:
            counts = o.Where(ignored, nothing, o.Gather(per_class(weights), chosen, axis=0))
        losses = o.Where(ignored, nothing, -o.Squeeze(o.GatherElements(log_prob, places, axis=1), [1]) * counts)
        loss, total = (o.ReduceSum(o.Cast(v, to=TensorProto.DOUBLE), keepdims=0) for v in (losses, counts))
        each = o.Cast(counts, to=TensorProto.DOUBLE)
        if reduction == "mean":
            total = o.Where(total.equals(0), o.like(1, total), total)
            loss, each = loss / total, each / total
        if scale is not None:
            factor = o.Sum(o.like(0, W), scale) if scale.guarded else scale
            each = each * o.Reshape(o.Cast(factor, to=TensorProto.DOUBLE), [])
        each = o.Unsqueeze(o.CastLike(each, x), [1])
        spread = o.Where(o.Unsqueeze(ignored, [1]), nothing, o.Exp(log_prob) * each)
        gradient = o.ScatterElements(spread, places, -each, axis=1, reduction="add")
        if transW:
            dX, dW = multiplied(gradient, w), multiplied(transposed(gradient), x)
        else:
            dX, dW = multiplied(gradient, transposed(w)), multiplied(transposed(x), gradient)
        return [loss, o.Reshape(dX, o.Shape(X), allowzero=1), dW, o.ReduceSum(gradient, [0], keepdims=0)]

    return o.in_work_type(X, compute, (W, X, W, W))
