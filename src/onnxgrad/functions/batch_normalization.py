"""BatchNormInternal and BatchNormalizationGrad as ONNX functions."""

from collections.abc import Callable

from onnxgrad.functions.body import Body, Value


def _seen_as_grid(o: Body, X: Value, scale: Value) -> tuple[Value, Value, Value, Value, Value]:
    """X's shape, that of the channels, X's as [N, C, all else], theirs to go with it, and how many numbers one has.

    Whatever the number of dimensions: all else is X's own last ones, and 1 where there are none.
    """
    shape, channels = o.Shape(X), o.Shape(scale)
    rest = o.ReduceProd(o.dims(1, o.slice(shape, 2)), keepdims=1)
    images = o.slice(shape, 0, 1)
    count = o.Max(images * rest, o.ints(1))
    return shape, channels, o.dims(images, channels, rest), o.dims(channels, 1), count


def batch_normalization_grad(
    o: Body, dY: Value, X: Value, scale: Value, mean: Value | None, inv_std: Value | None, epsilon: float
) -> list[Value]:
    shape, channels, grid, along, count = _seen_as_grid(o, X, scale)

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


def batch_norm_internal(
    o: Body,
    X: Value,
    scale: Value,
    B: Value,
    input_mean: Value,
    input_var: Value,
    epsilon: float,
    momentum: float,
    training_mode: int,
) -> list[Value]:
    shape, channels, grid, along, count = _seen_as_grid(o, X, scale)

    def compute(work: Callable[[Value], Value]) -> list[Value]:
        x = o.Reshape(work(X), grid, allowzero=1)
        given = [o.Reshape(o.CastLike(work(v), x), along, allowzero=1) for v in (scale, B, input_mean, input_var)]
        scales, shifts, mean, variance = given
        running = [mean, variance]
        if training_mode:
            share = o.Reciprocal(o.CastLike(count, x))
            mean = o.ReduceSum(x, [0, 2], keepdims=1) * share
            centred = x - mean
            variance = o.ReduceSum(centred * centred, [0, 2], keepdims=1) * share
            measured = zip(running, (mean, variance), strict=True)
            running = [now * momentum + new * (1 - momentum) for now, new in measured]
        inv = o.Reciprocal(o.Sqrt(variance + epsilon))
        Y = o.Reshape((x - mean) * (scales * inv) + shifts, shape, allowzero=1)
        return [Y, *(o.Reshape(v, channels, allowzero=1) for v in (*running, mean, inv))]

    return o.in_work_type(X, compute, (X, *[input_mean] * 4))
