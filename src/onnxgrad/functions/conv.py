"""ConvGrad as an ONNX function: ConvTranspose, and a convolution with dY in the kernel's place.

All convolutions of a model share it, whatever their attributes: these are handed on to the nodes within.
"""

from collections.abc import Callable
from typing import Any

from onnxgrad.functions.body import Body, Passed, Value

GROUP, STRIDES, DILATIONS, PADS = (
    Passed("group", "int"),
    Passed("strides", "ints"),
    Passed("dilations", "ints"),
    Passed("pads", "ints"),
)


def conv_grad(o: Body, dY: Value, X: Value, W: Value, auto_pad: str) -> list[Value]:
    """dX, dW and dB."""

    def compute(work: Callable[[Value], Value]) -> list[Value]:
        g, x, w = work(dY), work(X), work(W)
        size = o.slice(o.Shape(x), 2)
        none, rank = size * 0, o.Size(size)
        axes = o.Range(o.like(2, rank), rank + 2, o.like(1, rank))
        how: dict[str, Any] = {"strides": STRIDES, "dilations": DILATIONS, "group": GROUP}
        pads = {"pads": PADS} if auto_pad == "NOTSET" else {}
        # The stride may leave some of the image's end out: one more window, of zeros, reaches past it.
        spread = o.ConvTranspose(_padded(o, g, none, none + 1), w, **how, **pads)
        first = none
        if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            total = o.Max(o.slice(o.Shape(o.ConvTranspose(g, w, **how)), 2) - size, none)
            first = total / 2 if auto_pad == "SAME_UPPER" else total - total / 2
            x = _padded(o, x, first, total - first)
        dX = o.Slice(spread, first, first + size, axes)
        return [dX, _kernel(o, x, g, w, axes, pads), o.ReduceSum(g, o.dims(0, axes), keepdims=0)]

    return o.in_work_type(X, compute)


def _padded(o: Body, x: Value, first: Value, last: Value) -> Value:
    return o.Pad(x, o.dims(o.ints(0, 0), first, o.ints(0, 0), last))


def _kernel(o: Body, x: Value, g: Value, w: Value, axes: Value, pads: dict[str, Passed]) -> Value:
    """Channels are images and images channels: `g` is the kernel, strides are dilations and the other way round."""
    shape = o.Shape(x)
    images, outputs, channels = o.slice(shape, 0, 1), o.slice(o.Shape(g), 1, 2), o.slice(o.Shape(w), 1, 2)
    groups = o.slice(shape, 1, 2) / channels

    def transposed(x: Value, flat: Value, perm: list[int], whole: Value) -> Value:
        """Axes changed, whatever the number of those behind them."""
        return o.Reshape(o.Transpose(o.Reshape(x, flat), perm=perm), whole)

    rows = transposed(
        x,
        o.dims(images, groups, channels, -1),
        [2, 1, 0, 3],
        o.dims(channels, images * groups, o.slice(shape, 2)),
    )
    kernel = transposed(g, o.dims(images, outputs, -1), [1, 0, 2], o.dims(outputs, images, o.slice(o.Shape(g), 2)))
    found = o.Conv(rows, kernel, strides=DILATIONS, dilations=STRIDES, group=GROUP, **pads)
    # What the stride left out of the image may be enough for another element.
    size = o.slice(o.Shape(w), 2)
    found = o.Slice(found, size * 0, size, axes)
    return transposed(found, o.dims(channels, outputs, -1), [1, 0, 2], o.Shape(w))


def depthwise_conv(o: Body, X: Value, W: Value, B: Value | None = None) -> list[Value]:
    """Conv itself."""
    how: dict[str, Any] = {"strides": STRIDES, "dilations": DILATIONS, "group": GROUP, "pads": PADS}

    def compute(work: Callable[[Value], Value]) -> list[Value]:
        bias = () if B is None else (work(o.given(B, X, o.ints(0))),)
        return [o.Conv(work(X), work(W), *bias, **how)]

    return o.in_work_type(X, compute)
