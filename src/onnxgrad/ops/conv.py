"""ConvGrad: the gradients of Conv with respect to image, kernel and bias; and DepthwiseConv."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxgrad.op import op
from onnxgrad.ops.families.windows import Axis, conv_axes
from onnxgrad.schema import OWN, Dim, Known, agree
from onnxgrad.tensor_types import T, accumulator


def _grad_shapes(dY: Known, X: Known, W: Known, **attributes: Any) -> tuple[tuple[Dim, ...] | None, ...]:
    if X.dims is not None and W.dims is not None:
        expected = output_shape(X.dims, W.dims, attributes)
        if dY.dims is not None and not agree(dY.dims, expected):
            raise ValueError(f"dY has shape {list(dY.dims)}, expected {_spelled(expected)}, that of Conv of X and W")
    return X.dims, W.dims, None if W.dims is None else W.dims[:1]


def _spelled(dims: Sequence[Dim]) -> str:
    return f"[{', '.join('?' if d is None else str(d) for d in dims)}]"


def output_shape(X: tuple[Dim, ...], W: tuple[Dim, ...], attributes: dict[str, Any]) -> list[Dim]:
    """The shape of Conv's output, as far as it is known."""
    if len(X) < 3:
        raise ValueError(f"X has shape {list(X)}, expected images, channels and at least one axis more")
    if len(W) != len(X):
        raise ValueError(f"W has shape {list(W)}, expected {len(X)} dimensions as X has")
    group, kernel_shape = attributes["group"], attributes["kernel_shape"]
    if group < 1:
        raise ValueError(f"group is {group}, expected at least 1")
    if isinstance(W[0], int) and W[0] % group:
        raise ValueError(f"W has {W[0]} output channels, expected a multiple of group, {group}")
    if isinstance(W[1], int) and isinstance(X[1], int) and W[1] * group != X[1]:
        raise ValueError(f"W has {W[1]} channels, expected those of X, {X[1]}, divided by group, {group}")
    if kernel_shape and not agree(W[2:], kernel_shape):
        raise ValueError(f"kernel_shape is {list(kernel_shape)}, expected {list(W[2:])} as W has")
    axes = conv_axes(X[2:], W[2:], attributes)
    return [X[0], W[0], *(axis.windows for axis in axes)]


def axes_of(X: Any, W: Any, attributes: dict[str, Any]) -> list[Axis]:
    """The axes of a convolution, all sizes being known."""
    return conv_axes(X.shape[2:], W.shape[2:], attributes)


@op("ConvGrad", outputs=("dX?", "dW?", "dB?"), shape=_grad_shapes)
def conv_grad(
    dY: T,
    X: T,
    W: T,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    outputs: Sequence[str] | None = None,
) -> tuple[T | None, T | None, T | None]:
    """Gradient of Conv, whose attributes it has: takes the gradient of its output, its image and its kernel.

    dY [N,M,…], X [N,C,…], W [M,C/group,…] → dX, dW and dB [M], the last also if the convolution had no bias. Only
    outputs that are asked for are computed. float16 and bfloat16 are computed in float32.
    """
    work = accumulator(X.dtype)
    axes = axes_of(X, W, {"auto_pad": auto_pad, "dilations": dilations, "pads": pads, "strides": strides})
    N, M, C, windows = X.shape[0], W.shape[0], X.shape[1], math.prod(a.windows for a in axes)
    g = dY.astype(work).reshape(N, group, M // group, windows)
    kernel = W.astype(work).reshape(group, M // group, C // group, *W.shape[2:])
    # The image with zeros around it, wide enough for every window.
    sizes = [max(a.before + a.size, a.reach) for a in axes]
    padded = np.zeros((N, group, C // group, *sizes), work)
    inside: Any = (..., *(slice(a.before, a.before + a.size) for a in axes))
    padded[inside] = X.reshape(N, group, C // group, *X.shape[2:])
    dX, dW = np.zeros_like(padded), np.zeros(kernel.shape, work)
    for place in itertools.product(*(range(k) for k in W.shape[2:])):
        element: Any = (..., *place)
        seen: Any = (..., *(a.seen_by(k) for a, k in zip(axes, place, strict=True)))
        image = padded[seen].reshape(N, group, C // group, windows)
        dW[element] = np.einsum("ngmo,ngco->gmc", g, image, optimize=True)
        dX[seen] += np.einsum("ngmo,gmc->ngco", g, kernel[element], optimize=True).reshape(dX[seen].shape)
    everything = {"dX": dX[inside].reshape(X.shape), "dW": dW.reshape(W.shape), "dB": g.sum((0, 3)).reshape(M)}
    names = everything if outputs is None else outputs
    return tuple(a.astype(X.dtype) if n in names else None for n, a in everything.items())  # type: ignore[return-value]


def _depthwise_shape(X: Known, W: Known, B: Known | None, **attributes: Any) -> tuple[Dim, ...] | None:
    if X.dims is None or W.dims is None:
        return None
    if len(X.dims) not in (3, 4):
        raise ValueError(f"X has shape {list(X.dims)}, expected images, channels and one or two axes")
    if len(W.dims) != len(X.dims) or W.dims[1] not in (1, None) or not agree(W.dims[:1], X.dims[1:2]):
        raise ValueError(f"W has shape {list(W.dims)}, expected a kernel for each of the {X.dims[1]} channels of X")
    if W.dims[0] not in (attributes["group"], None):
        raise ValueError(f"group is {attributes['group']}, expected the number of channels, {W.dims[0]}")
    if B is not None and B.dims is not None and not agree(B.dims, W.dims[:1]):
        raise ValueError(f"B has shape {list(B.dims)}, expected {_spelled(W.dims[:1])}")
    axes = conv_axes(X.dims[2:], W.dims[2:], {"auto_pad": "NOTSET", **attributes})
    return X.dims[0], X.dims[1], *(axis.windows for axis in axes)


@op("DepthwiseConv", domain=OWN, outputs="Y", shape=_depthwise_shape)
def depthwise_conv(
    X: T,
    W: T,
    B: T | None = None,
    *,
    dilations: Sequence[int] | None = None,
    group: int = 1,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> T:
    """Conv whose `group` is the number of channels: channel by channel, for weights that change from run to run.

    X [N,C,…] with one or two spatial axes, W [C,1,…] and B [C]. float16 and bfloat16 are computed in float32.
    """
    work = accumulator(X.dtype)
    axes = axes_of(X, W, {"auto_pad": "NOTSET", "dilations": dilations, "pads": pads, "strides": strides})
    padded = np.zeros((*X.shape[:2], *(max(a.before + a.size, a.reach) for a in axes)), work)
    inside: Any = (..., *(slice(a.before, a.before + a.size) for a in axes))
    padded[inside] = X
    Y = np.zeros((*X.shape[:2], *(a.windows for a in axes)), work)
    for place in itertools.product(*(range(k) for k in W.shape[2:])):
        seen: Any = (..., *(a.seen_by(k) for a, k in zip(axes, place, strict=True)))
        element: Any = (slice(None), 0, *place)
        Y += padded[seen] * W.astype(work)[element].reshape(-1, *[1] * len(axes))
    if B is not None:
        Y += B.astype(work).reshape(-1, *[1] * len(axes))
    result: T = Y.astype(X.dtype)
    return result
