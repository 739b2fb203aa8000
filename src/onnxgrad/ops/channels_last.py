"""Convolution, batch normalization and maximum pool of images whose channels come last, with their gradients, on GPUs.

cuDNN's kernels for half types want images this way, [N,H,W,C]; the kernels of convolutions stay as Conv has them. Each
operator is that of images whose channels come first, between transpositions: so it is defined.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxgrad.op import op
from onnxgrad.ops.batch_normalization import Parameter, Statistic, batch_norm_internal, batch_normalization_grad
from onnxgrad.ops.conv import axes_of, conv_grad, output_shape
from onnxgrad.ops.families.windows import PoolSettings, check_windows, pool_axes, pool_settings
from onnxgrad.ops.max_pool import max_pool_grad
from onnxgrad.schema import OWN, Dim, Known, agree
from onnxgrad.tensor_types import Array, T, accumulator

ACTIVATIONS = ("", "Relu")
RANK = 4


def _first(X: Array) -> Array:
    """An image with its channels before rows and columns."""
    return np.ascontiguousarray(X.transpose(0, 3, 1, 2))


def _last(X: Array) -> Array:
    """And back again."""
    return np.ascontiguousarray(X.transpose(0, 2, 3, 1))


def _dims(known: Known | None, name: str) -> tuple[Dim, ...] | None:
    """The shape of an image as if its channels came first."""
    if known is None or known.dims is None:
        return None
    if len(known.dims) != RANK:
        raise ValueError(f"{name} has shape {list(known.dims)}, expected [images, rows, columns, channels]")
    n, h, w, c = known.dims
    return n, c, h, w


def _conv_shape(X: Known, W: Known, B: Known | None, **attributes: Any) -> tuple[Dim, ...] | None:
    image = _dims(X, "X")
    if image is None or W.dims is None:
        return None
    n, m, h, w = output_shape(image, W.dims, {"auto_pad": "NOTSET", "kernel_shape": None, **attributes})
    if B is not None and B.dims is not None and not agree(B.dims, (m,)):
        raise ValueError(f"B has shape {list(B.dims)}, expected {[m]}")
    return n, h, w, m


# onnxruntime's CUDA provider takes any operator called NhwcConv for its own.
@op("NhwcConvolution", domain=OWN, outputs="Y", shape=_conv_shape)
def nhwc_convolution(
    X: T,
    W: T,
    B: T | None = None,
    *,
    dilations: Sequence[int] | None = None,
    group: int = 1,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> T:
    """Conv of images whose channels come last: X [N,H,W,C], W [M,C/group,kH,kW] and B [M] give Y [N,H',W',M].

    float16 and bfloat16 are computed in float32, and may be rounded before B is added, too.
    """
    work = accumulator(X.dtype)
    x = _first(X).astype(work)
    axes = axes_of(x, W, {"auto_pad": "NOTSET", "dilations": dilations, "pads": pads, "strides": strides})
    N, M, C = x.shape[0], W.shape[0], x.shape[1]
    kernel = W.astype(work).reshape(group, M // group, C // group, *W.shape[2:])
    padded = np.zeros((N, group, C // group, *(max(a.before + a.size, a.reach) for a in axes)), work)
    inside: Any = (..., *(slice(a.before, a.before + a.size) for a in axes))
    padded[inside] = x.reshape(N, group, C // group, *x.shape[2:])
    Y = np.zeros((N, group, M // group, *(a.windows for a in axes)), work)
    for place in itertools.product(*(range(k) for k in W.shape[2:])):
        seen: Any = (..., *(a.seen_by(k) for a, k in zip(axes, place, strict=True)))
        element: Any = (..., *place)
        Y += np.einsum("ngchw,gmc->ngmhw", padded[seen], kernel[element], optimize=True)
    result = _last(Y.reshape(N, M, *Y.shape[3:]))
    return (result if B is None else result + B.astype(work)).astype(X.dtype)


def _conv_grad_shapes(dY: Known, X: Known, W: Known, **attributes: Any) -> tuple[tuple[Dim, ...] | None, ...]:
    expected = _conv_shape(X, W, None, **attributes)
    if expected is not None and dY.dims is not None and not agree(dY.dims, expected):
        raise ValueError(f"dY has shape {list(dY.dims)}, expected {list(expected)}, that of NhwcConvolution of X and W")
    return X.dims, W.dims, None if W.dims is None else W.dims[:1]


@op("NhwcConvGrad", domain=OWN, outputs=("dX?", "dW?", "dB?"), shape=_conv_grad_shapes)
def nhwc_conv_grad(
    dY: T,
    X: T,
    W: T,
    *,
    dilations: Sequence[int] | None = None,
    group: int = 1,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    outputs: Sequence[str] | None = None,
) -> tuple[T | None, T | None, T | None]:
    """Gradient of NhwcConvolution, whose attributes it has: ConvGrad of images whose channels come last."""
    how: dict[str, Any] = {"dilations": dilations, "group": group, "pads": pads, "strides": strides}
    dX, dW, dB = conv_grad.body(_first(dY), _first(X), W, **how, outputs=outputs)
    return None if dX is None else _last(dX), dW, dB


def _check_sizes(X: Known, others: dict[str, Known | None], images: dict[str, Known | None]) -> None:
    dims = _dims(X, "X")
    for name, given in others.items():
        if dims is not None and given is not None and given.dims is not None and not agree(given.dims, dims[1:2]):
            raise ValueError(
                f"{name} has shape {list(given.dims)}, expected {[dims[1]]}, one number for each channel of X"
            )
    for name, given in images.items():
        if X.dims is not None and given is not None and given.dims is not None and not agree(given.dims, X.dims):
            raise ValueError(f"{name} has shape {list(given.dims)}, expected {list(X.dims)}, as X has")


def _norm_shapes(
    X: Known, scale: Known, B: Known, input_mean: Known, input_var: Known, Z: Known | None, epsilon: float,
    momentum: float, activation: str, sample_variance: int,
) -> tuple[tuple[Dim, ...] | None, ...]:  # fmt: skip
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, expected one of {', '.join(map(repr, ACTIVATIONS))}")
    _check_sizes(X, {"scale": scale, "B": B, "input_mean": input_mean, "input_var": input_var}, {"Z": Z})
    return X.dims, *[scale.dims if X.dims is None else X.dims[3:]] * 4


@op(
    "NhwcBatchNorm",
    domain=OWN,
    outputs=("Y", "running_mean?", "running_var?", "saved_mean?", "saved_inv_std?"),
    shape=_norm_shapes,
)
def nhwc_batch_norm(
    X: T,
    scale: Parameter,
    B: Parameter,
    input_mean: Statistic,
    input_var: Statistic,
    Z: T | None = None,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    activation: str = "",
    sample_variance: int = 0,
    outputs: Sequence[str] | None = None,
) -> tuple[T, Statistic | None, Statistic | None, Statistic | None, Statistic | None]:
    """BatchNormInternal in training, of images whose channels come last, and what often follows it.

    X, Y and Z are [N,H,W,C], all else is [C]. Z, if it is given, is added to what is normalized; then comes the
    activation: "" for none, or "Relu". With sample_variance, the running variance follows that of a sample, n/(n-1)
    times the variance of the batch, as PyTorch's does. float16 and bfloat16 are computed in float32 and rounded once.
    """
    work = accumulator(X.dtype)
    wide = _first(X).astype(work)
    how = {"epsilon": epsilon, "momentum": momentum, "outputs": outputs}
    y, mean, variance, *saved = batch_norm_internal.body(wide, scale, B, input_mean, input_var, **how)  # type: ignore[arg-type]
    if sample_variance and variance is not None:
        degrees = max(X.size // max(1, scale.size) - 1, 1)
        variance = (variance + (variance - momentum * input_var) / degrees).astype(input_var.dtype)
    if y is not None:
        y = _last(y) if Z is None else _last(y) + Z.astype(work)
        y = (np.maximum(y, 0) if activation else y).astype(X.dtype)
    return y, mean, variance, *saved  # type: ignore[return-value]


def _norm_grad_shapes(
    dY: Known, X: Known, scale: Known, mean: Known, inv_std: Known, Y: Known | None, B: Known | None,
    dY2: Known | None,
) -> tuple[tuple[Dim, ...] | None, ...]:  # fmt: skip
    if Y is not None and B is not None:
        raise ValueError("Y and B are given, expected at most one of them")
    _check_sizes(X, {"scale": scale, "mean": mean, "inv_std": inv_std, "B": B}, {"dY": dY, "Y": Y, "dY2": dY2})
    channels = scale.dims if X.dims is None else X.dims[3:]
    return X.dims, channels, channels, X.dims


@op("NhwcBatchNormGrad", domain=OWN, outputs=("dX?", "dscale?", "dB?", "dZ?"), shape=_norm_grad_shapes)
def nhwc_batch_norm_grad(
    dY: T,
    X: T,
    scale: Parameter,
    mean: Statistic,
    inv_std: Statistic,
    Y: T | None = None,
    B: Parameter | None = None,
    dY2: T | None = None,
    *,
    outputs: Sequence[str] | None = None,
) -> tuple[T | None, Parameter | None, Parameter | None, T | None]:
    """Gradient of NhwcBatchNorm, from the statistics that it saved and, if its activation is Relu, its result Y.

    dZ is dY where Y > 0 and 0 elsewhere, or dY itself without Y; the rest is what BatchNormalizationGrad makes of it.
    Where nothing was added, B may be given instead of Y: what is normalized is then computed again, which takes less
    time than reading Y. dY2, if it is given, is added to dY. float16 and bfloat16 are computed in float32.
    """
    if dY2 is not None:
        dY = (dY.astype(accumulator(dY.dtype)) + dY2.astype(accumulator(dY.dtype))).astype(dY.dtype)
    dZ = dY if Y is None else np.where(Y > 0, dY, dY.dtype.type(0))
    if B is not None:
        work = accumulator(X.dtype)
        scales, shifts, centre, inv = (a.astype(work) for a in (scale, B, mean, inv_std))
        dZ = np.where((X.astype(work) - centre) * (scales * inv) + shifts > 0, dY, dY.dtype.type(0))
    names = dict(zip(("dX", "dscale", "dB"), ("X_grad", "scale_grad", "bias_grad"), strict=True))
    wanted = None if outputs is None else [names[name] for name in outputs if name in names]
    dX, dscale, dB = batch_normalization_grad.body(_first(dZ), _first(X), scale, mean, inv_std, outputs=wanted)
    return None if dX is None else _last(dX), dscale, dB, dZ if outputs is None or "dZ" in outputs else None


def _pool_settings(ceil_mode: int, dilations: Any, kernel_shape: Any, pads: Any, strides: Any) -> PoolSettings:
    found = pool_settings("NOTSET", ceil_mode, dilations, kernel_shape, pads, strides)
    if len(found.kernel) != RANK - 2:
        raise ValueError(f"kernel_shape is {found.kernel}, expected {RANK - 2} numbers")
    return found


def _pool_shape(X: Known, **attributes: Any) -> tuple[Dim, ...] | None:
    image, given = _dims(X, "X"), _pool_settings(**attributes)
    if image is None:
        return None
    n, c, *sizes = image
    windows = [
        pool_axes([size] * len(sizes), given)[k].windows if isinstance(size, int) else None
        for k, size in enumerate(sizes)
    ]
    return n, *windows, c


@op("NhwcMaxPool", domain=OWN, outputs="Y", shape=_pool_shape)
def nhwc_max_pool(
    X: T,
    *,
    ceil_mode: int = 0,
    dilations: Sequence[int] | None = None,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> T:
    """MaxPool of images whose channels come last, X [N,H,W,C], without its indices; NaN is passed over."""
    axes = pool_axes(X.shape[1:3], _pool_settings(ceil_mode, dilations, kernel_shape, pads, strides))
    sizes = [max(a.before + a.size, a.reach) for a in axes]
    padded = np.full((X.shape[0], *sizes, X.shape[3]), -np.inf, accumulator(X.dtype))
    rows, columns = axes
    padded[:, rows.before : rows.before + rows.size, columns.before : columns.before + columns.size] = X
    Y = np.full((X.shape[0], rows.windows, columns.windows, X.shape[3]), -np.inf, padded.dtype)
    for h, w in itertools.product(range(rows.kernel), range(columns.kernel)):
        Y = np.fmax(Y, padded[:, rows.seen_by(h), columns.seen_by(w)])
    return Y.astype(X.dtype)


def _pool_grad_shape(dY: Known, X: Known, **attributes: Any) -> tuple[Dim, ...] | None:
    check_windows(_dims(dY, "dY"), _dims(X, "X"), "X", _pool_settings(**attributes))
    return X.dims


@op("NhwcMaxPoolGrad", domain=OWN, outputs="dX", shape=_pool_grad_shape)
def nhwc_max_pool_grad(
    dY: T,
    X: T,
    *,
    ceil_mode: int = 0,
    dilations: Sequence[int] | None = None,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> T:
    """Gradient of NhwcMaxPool, whose attributes it has: MaxPoolGrad of images whose channels come last."""
    how = {"ceil_mode": ceil_mode, "dilations": dilations, "kernel_shape": kernel_shape, "pads": pads}
    return _last(max_pool_grad.body(_first(dY), _first(X), strides=strides, **how))  # type: ignore[arg-type]
