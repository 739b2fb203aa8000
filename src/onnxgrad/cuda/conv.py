"""ConvGrad and DepthwiseConv on CUDA: cuDNN's kernels, by way of torch, on an image with its pads written out.

Products of float32 use TF32 only where torch.backends.cuda.matmul says so, as those of matrices do. torch's own
convolutions have a switch of their own, which is on by default.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from onnxgrad.cuda.core.cudnn import deterministic_cudnn, padded
from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.cuda.core.launch import INTERPRETED, sums_dtype
from onnxgrad.ops.conv import axes_of
from onnxgrad.ops.families.windows import Axis

MOST_AXES = 3  # that torch convolves over


def conv_grad(
    dY: torch.Tensor,
    X: torch.Tensor,
    W: torch.Tensor,
    dX: torch.Tensor | None,
    dW: torch.Tensor | None,
    dB: torch.Tensor | None,
    auto_pad: str,
    dilations: Sequence[int] | None,
    group: int,
    kernel_shape: Sequence[int] | None,
    pads: Sequence[int] | None,
    strides: Sequence[int] | None,
    bad: BadIndex,
) -> None:
    """`kernel_shape` says what the shape of W does, and no index can be bad."""
    axes = axes_of(X, W, {"auto_pad": auto_pad, "dilations": dilations, "pads": pads, "strides": strides})
    if dB is not None:
        dB.copy_(dY.sum([0, *range(2, dY.ndim)], dtype=sums_dtype(dY.dtype)))
    if 0 in (*dY.shape, *X.shape, *W.shape):
        for result in (dX, dW):
            if result is not None:
                result.zero_()
        return
    if len(axes) > MOST_AXES:
        _by_elements(dY, X, W, dX, dW, group, axes)
        return
    image, padding = padded(X, axes)
    alike = image is X
    # cuDNN adds up half numbers in float32; torch's convolutions on a CPU do so on some machines only.
    dY, image, W = (x.to(sums_dtype(x.dtype)) if INTERPRETED else x for x in (dY, image, W))
    with deterministic_cudnn():
        found = torch.ops.aten.convolution_backward(
            dY, image, W, None, [a.stride for a in axes], padding, [a.dilation for a in axes], False,
            [0] * len(axes), group, [dX is not None, dW is not None, False],
        )  # fmt: skip
    if dX is not None:
        inside = (..., *(slice(a.before, a.before + a.size) for a in axes))
        dX.copy_(found[0] if alike else found[0][inside])
    if dW is not None:
        dW.copy_(found[1])


def depthwise_conv(
    X: torch.Tensor,
    W: torch.Tensor,
    B: torch.Tensor | None,
    Y: torch.Tensor,
    dilations: Sequence[int] | None,
    group: int,
    pads: Sequence[int] | None,
    strides: Sequence[int] | None,
    bad: BadIndex,
) -> None:
    """No index can be bad."""
    axes = axes_of(X, W, {"auto_pad": "NOTSET", "dilations": dilations, "pads": pads, "strides": strides})
    if 0 in Y.shape:
        return
    image, padding = padded(X, axes)
    image, W = (x.to(sums_dtype(x.dtype)) if INTERPRETED else x for x in (image, W))
    bias = B.to(image.dtype) if B is not None else None
    strided, spread = [a.stride for a in axes], [a.dilation for a in axes]
    with deterministic_cudnn():
        Y.copy_(torch.ops.aten.convolution(image, W, bias, strided, padding, spread, False, [0] * len(axes), group))


def _by_elements(
    dY: torch.Tensor,
    X: torch.Tensor,
    W: torch.Tensor,
    dX: torch.Tensor | None,
    dW: torch.Tensor | None,
    group: int,
    axes: Sequence[Axis],
) -> None:
    """Over any number of axes: a product for every element of the kernel, as the definition has it."""
    work, (N, C), M = sums_dtype(X.dtype), X.shape[:2], W.shape[0]
    g = dY.to(work).reshape(N, group, M // group, math.prod(a.windows for a in axes))
    kernel = W.to(work).reshape(group, M // group, C // group, *W.shape[2:])
    sizes = [max(a.before + a.size, a.reach) for a in axes]
    wide = torch.zeros((N, group, C // group, *sizes), dtype=work, device=X.device)
    inside: Any = (..., *(slice(a.before, a.before + a.size) for a in axes))
    wide[inside] = X.to(work).reshape(N, group, C // group, *X.shape[2:])
    input_gradient, kernel_gradient = torch.zeros_like(wide), torch.zeros_like(kernel)
    for place in itertools.product(*(range(k) for k in W.shape[2:])):
        element: Any = (..., *place)
        seen: Any = (..., *(a.seen_by(k) for a, k in zip(axes, place, strict=True)))
        image = wide[seen].reshape(N, group, C // group, -1)
        kernel_gradient[element] = torch.einsum("ngmo,ngco->gmc", g, image)
        input_gradient[seen] += torch.einsum("ngmo,gmc->ngco", g, kernel[element]).reshape(wide[seen].shape)
    if dX is not None:
        dX.copy_(input_gradient[inside].reshape(X.shape))
    if dW is not None:
        dW.copy_(kernel_gradient.reshape(W.shape))
