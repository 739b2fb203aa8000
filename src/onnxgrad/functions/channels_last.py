"""Operators of images whose channels come last, as ONNX functions: transpositions around those of the others."""

from collections.abc import Callable
from typing import Any

from onnxgrad.functions import batch_normalization, conv, max_pool
from onnxgrad.functions.body import Body, Value
from onnxgrad.ops.families.windows import pool_settings

HOW: dict[str, Any] = {
    "strides": conv.STRIDES, "dilations": conv.DILATIONS, "group": conv.GROUP, "pads": conv.PADS,
}  # fmt: skip


def _first(o: Body, X: Value) -> Value:
    return o.Transpose(X, perm=[0, 3, 1, 2])


def _last(o: Body, X: Value) -> Value:
    return o.Transpose(X, perm=[0, 2, 3, 1])


def _given_image(o: Body, image: Value, X: Value) -> Value:
    """An optional one, of X's shape: onnxruntime looks at shapes also where others have none."""
    there = o.given(image, X, o.dims(0, o.slice(o.Shape(X), 1)))
    return o.Reshape(there, o.Shape(X), allowzero=1)


def nhwc_convolution(o: Body, X: Value, W: Value, B: Value | None) -> list[Value]:
    def compute(work: Callable[[Value], Value]) -> list[Value]:
        bias = () if B is None else (work(o.given(B, X, o.ints(0))),)
        return [_last(o, o.Conv(_first(o, work(X)), work(W), *bias, **HOW))]

    return o.in_work_type(X, compute)


def nhwc_conv_grad(o: Body, dY: Value, X: Value, W: Value) -> list[Value]:
    dX, dW, dB = conv.conv_grad(o, _first(o, dY), _first(o, X), W, "NOTSET")
    return [_last(o, dX), dW, dB]


def nhwc_batch_norm(
    o: Body, X: Value, scale: Value, B: Value, input_mean: Value, input_var: Value, Z: Value | None, epsilon: float,
    momentum: float, activation: str, sample_variance: int,
) -> list[Value]:  # fmt: skip
    def compute(work: Callable[[Value], Value]) -> list[Value]:
        x = _first(o, work(X))
        found = batch_normalization.batch_norm_internal(
            o, x, scale, B, input_mean, input_var, epsilon, momentum, training_mode=1
        )
        y, variance = _last(o, found[0]), found[2]
        if sample_variance:
            count = o.ReduceProd(o.slice(o.Shape(X), 0, 3), keepdims=1)
            variance, before, degrees = (o.CastLike(v, x) for v in (variance, input_var, o.Max(count - 1, o.ints(1))))
            variance = variance + (variance - before * momentum) / degrees
        if Z is not None:
            y = y + work(_given_image(o, Z, X))
        return [o.Relu(y) if activation else y, found[1], variance, *found[3:]]

    return o.in_work_type(X, compute, (X, *[input_mean] * 4))


def nhwc_batch_norm_grad(
    o: Body, dY: Value, X: Value, scale: Value, mean: Value, inv_std: Value, Y: Value | None, B: Value | None,
    dY2: Value | None,
) -> list[Value]:  # fmt: skip
    if dY2 is not None:
        other = _given_image(o, dY2, X)
        (dY,) = o.in_work_type(dY, lambda work: [work(dY) + work(other)])
    dZ, zero = dY, o.like(0, dY)
    if Y is not None:
        dZ = o.Where(_given_image(o, Y, X) > 0, dY, zero)
    elif B is not None:

        def normalized(work: Callable[[Value], Value]) -> list[Value]:
            x = work(X)
            shifts = o.Reshape(o.given(B, scale, o.ints(0)), o.Shape(scale), allowzero=1)
            scales, shifts, centre, inv = (o.CastLike(v, x) for v in (scale, shifts, mean, inv_std))
            return [(x - centre) * (scales * inv) + shifts]

        dZ = o.Where(o.in_work_type(X, normalized)[0] > 0, dY, zero)
    found = batch_normalization.batch_normalization_grad(o, _first(o, dZ), _first(o, X), scale, mean, inv_std, 0.0)
    return [_last(o, found[0]), *found[1:], dZ]


def nhwc_max_pool(
    o: Body, X: Value, ceil_mode: int, dilations: Any, kernel_shape: Any, pads: Any, strides: Any
) -> list[Value]:
    given = pool_settings("NOTSET", ceil_mode, dilations, kernel_shape, pads, strides)

    def compute(work: Callable[[Value], Value]) -> list[Value]:
        return [_last(o, o.MaxPool(_first(o, work(X)), **max_pool.attributes_of(given)))]

    return o.in_work_type(X, compute)


def nhwc_max_pool_grad(
    o: Body, dY: Value, X: Value, ceil_mode: int, dilations: Any, kernel_shape: Any, pads: Any, strides: Any
) -> list[Value]:
    how = "NOTSET", ceil_mode, dilations, kernel_shape, pads, strides
    return [_last(o, max_pool.max_pool_grad(o, _first(o, dY), _first(o, X), *how)[0])]
