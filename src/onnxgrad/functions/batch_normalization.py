"""BatchNormalizationGrad as an ONNX function."""

from collections.abc import Callable

from onnxgrad.functions.body import Body, Value


def batch_normalization_grad(
    o: Body, dY: Value, X: Value, scale: Value, mean: Value | None, inv_std: Value | None, epsilon: float
) -> list[Value]:
    # Seen as [N, C, all else], whatever the number of dimensions: its own last ones, and 1 where there are none.
    shape, channels = o.Shape(X), o.Shape(scale)
    rest = o.ReduceProd(o.dims(1, o.slice(shape, 2)), keepdims=1)
    images = o.slice(shape, 0, 1)
    grid, along = o.dims(images, channels, rest), o.dims(channels, 1)
    count = o.Max(images * rest, o.ints(1))

    def compute(work: Callable[[Value], Value]) -> list[Value]:
        g, x = (o.Reshape(work(v), grid, allowzero=1) for v in (dY, X))
        share = o.Reciprocal(o.CastLike(count, x))

        def summed(terms: Value) -> Value:
            return o.ReduceSum(terms, [0, 2], keepdims=1)

        def of_channels(numbers: Value) -> Value:
            there = o.given(numbers, scale, o.ints(0))  # where some nodes have statistics, these are of scale's type
            return o.Reshape(o.CastLike(work(there), x), along, allowzero=1)

        centred = x - (summed(x) * share if mean is None else of_channels(mean))
        if inv_std is None:
            inv = o.Reciprocal(o.Sqrt(summed(centred * centred) * share + epsilon))
        else:
            inv = of_channels(inv_std)
        xhat = centred * inv
        dot, level = summed(g * xhat), summed(g)
        inner = g - level * share - xhat * (dot * share)
        X_grad = o.Reshape(inner * (of_channels(scale) * inv), shape, allowzero=1)
        return [X_grad, *(o.Reshape(total, channels, allowzero=1) for total in (dot, level))]

    return o.in_work_type(X, compute, (X, scale, scale))
