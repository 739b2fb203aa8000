"""LayerNormalizationGrad and SimplifiedLayerNormalizationGrad: gradients of normalizations over the last axes."""

from collections.abc import Sequence
from typing import Annotated

import numpy as np

from onnxgrad.arguments import check_axis
from onnxgrad.op import op
from onnxgrad.schema import Dim, Known, agree
from onnxgrad.tensor_types import Array, T, TypeConstraint, accumulator

# onnxruntime-training has float and bfloat16; what is normalized in float64 has statistics of float64.
Statistic = Annotated[Array, TypeConstraint("U", ("float", "double", "bfloat16"))]


def _shapes(Y_grad: Known, X: Known, scale: Known, axis: int, **statistics: Known) -> list[tuple[Dim, ...] | None]:
    """Of X_grad and scale_grad."""
    if X.dims is None:
        return [Y_grad.dims, scale.dims]
    if not X.dims:
        raise ValueError("X is a scalar, expected at least one dimension")
    first = check_axis(axis, len(X.dims))
    rows, normalized = X.dims[:first], X.dims[first:]
    _expect("Y_grad", Y_grad, X.dims, "as X has")
    _expect("scale", scale, normalized, "as X has from the axis on")
    if scale.dims is not None:  # what one of them does not know, the other may
        normalized = tuple(s if isinstance(s, int) else x for s, x in zip(scale.dims, normalized, strict=True))
    for name, given in statistics.items():
        _expect(name, given, (*rows, *(1,) * len(normalized)), "one number for each row of X")
    return [(*rows, *normalized), normalized]


def _expect(name: str, given: Known, dims: Sequence[Dim], why: str) -> None:
    if given.dims is not None and not agree(given.dims, dims):
        raise ValueError(f"{name} has shape {list(given.dims)}, expected {list(dims)}, {why}")


def _layer_shapes(
    Y_grad: Known, X: Known, scale: Known, mean: Known, inv_std_var: Known, axis: int
) -> tuple[tuple[Dim, ...] | None, ...]:
    X_grad, scale_grad = _shapes(Y_grad, X, scale, axis, mean=mean, inv_std_var=inv_std_var)
    return X_grad, scale_grad, scale_grad


def _simplified_shapes(
    Y_grad: Known, X: Known, scale: Known, inv_std_var: Known, axis: int
) -> tuple[tuple[Dim, ...] | None, ...]:
    return tuple(_shapes(Y_grad, X, scale, axis, inv_std_var=inv_std_var))


def _gradients(
    Y_grad: Array, X: Array, scale: Array, mean: Array | None, inv_std_var: Array, axis: int
) -> tuple[Array, Array, Array]:
    """Those of X, of the scale and of the bias."""
    work, first = accumulator(X.dtype), axis % X.ndim
    rows, normalized = tuple(range(first)), tuple(range(first, X.ndim))
    g, inv = Y_grad.astype(work), inv_std_var.astype(work)
    xhat = (X.astype(work) if mean is None else X.astype(work) - mean.astype(work)) * inv
    scaled = g * scale.astype(work)
    count = max(1, scale.size)
    inner = scaled - xhat * (np.sum(scaled * xhat, normalized, keepdims=True) / count)
    if mean is not None:
        inner = inner - np.sum(scaled, normalized, keepdims=True) / count
    return (inner * inv).astype(X.dtype), np.sum(g * xhat, rows).astype(X.dtype), np.sum(g, rows).astype(X.dtype)


@op(
    "LayerNormalizationGrad",
    outputs=("X_grad?", "scale_grad?", "bias_grad?"),
    shape=_layer_shapes,
)
def layer_normalization_grad(
    Y_grad: T,
    X: T,
    scale: T,
    mean: Statistic,
    inv_std_var: Statistic,
    *,
    axis: int = -1,
    outputs: Sequence[str] | None = None,
) -> tuple[T | None, T | None, T | None]:
    """Gradient of LayerNormalization, which normalizes over `axis` and those after it, then multiplies and adds.

    With mean and inv_std_var as LayerNormalization gives them (Mean and InvStdDev), x = (X - mean) · inv_std_var and
    g = Y_grad · scale: X_grad = inv_std_var · (g - mean of g - x · mean of g · x), scale_grad = sum of Y_grad · x and
    bias_grad = sum of Y_grad over all rows. scale has the shape that X has from the axis on, mean and inv_std_var have
    1 there. float16 and bfloat16 are computed in float32.
    """
    found = _gradients(Y_grad, X, scale, mean, inv_std_var, axis)
    names = ("X_grad", "scale_grad", "bias_grad")
    X_grad, scale_grad, bias_grad = (
        a if outputs is None or n in outputs else None for n, a in zip(names, found, strict=True)
    )
    return X_grad, scale_grad, bias_grad


@op(
    "SimplifiedLayerNormalizationGrad",
    outputs=("X_grad?", "scale_grad?"),
    shape=_simplified_shapes,
)
def simplified_layer_normalization_grad(
    Y_grad: T,
    X: T,
    scale: T,
    inv_std_var: Statistic,
    *,
    axis: int = -1,
    outputs: Sequence[str] | None = None,
) -> tuple[T | None, T | None]:
    """Gradient of RMSNormalization, which onnxruntime calls SimplifiedLayerNormalization: no mean, no bias.

    With inv_std_var 1 over the root of the mean square, x = X · inv_std_var and g = Y_grad · scale:
    X_grad = inv_std_var · (g - x · mean of g · x) and scale_grad = sum of Y_grad · x over all rows. scale has the shape
    that X has from the axis on, inv_std_var has 1 there. float16 and bfloat16 are computed in float32.
    """
    X_grad, scale_grad, _ = _gradients(Y_grad, X, scale, None, inv_std_var, axis)
    return (
        X_grad if outputs is None or "X_grad" in outputs else None,
        scale_grad if outputs is None or "scale_grad" in outputs else None,
    )
