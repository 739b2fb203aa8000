"""BatchNormalizationGrad: the gradient of a normalization of each channel over the whole batch."""

from collections.abc import Sequence
from typing import Annotated

import numpy as np

from onnxgrad.op import op
from onnxgrad.schema import Dim, Known, agree
from onnxgrad.tensor_types import FLOATS, Array, T, TypeConstraint, accumulator

# As in BatchNormalization: the parameters and the statistics of half numbers may be float32.
Parameter = Annotated[Array, TypeConstraint("T1", FLOATS)]
Statistic = Annotated[Array, TypeConstraint("T2", FLOATS)]


def _shapes(
    dY: Known, X: Known, scale: Known, mean: Known | None, inv_std: Known | None, epsilon: float
) -> tuple[tuple[Dim, ...] | None, ...]:
    if (mean is None) != (inv_std is None):
        there, absent = ("mean", "inv_std") if inv_std is None else ("inv_std", "mean")
        raise ValueError(f"{there} is given and {absent} is not, expected both or neither")
    if not epsilon >= 0:
        raise ValueError(f"epsilon is {epsilon}, expected a number that is not negative")
    if X.dims is None:
        return dY.dims, scale.dims, scale.dims
    if not X.dims:
        raise ValueError("X is a scalar, expected at least one dimension")
    channels = X.dims[1:2] or (1,)
    expected = {"dY": (dY, X.dims, "as X has")}
    expected |= {
        name: (given, channels, "one number for each channel of X")
        for name, given in (("scale", scale), ("mean", mean), ("inv_std", inv_std))
        if given is not None
    }
    for name, (given, dims, why) in expected.items():
        if given.dims is not None and not agree(given.dims, dims):
            raise ValueError(f"{name} has shape {list(given.dims)}, expected {list(dims)}, {why}")
    if scale.dims is not None and not isinstance(channels[0], int):
        channels = scale.dims
    return X.dims, channels, channels


@op(
    "BatchNormalizationGrad",
    outputs=("X_grad?", "scale_grad?", "bias_grad?"),
    shape=_shapes,
)
def batch_normalization_grad(
    dY: T,
    X: T,
    scale: Parameter,
    mean: Statistic | None = None,
    inv_std: Statistic | None = None,
    *,
    epsilon: float = 1e-5,
    outputs: Sequence[str] | None = None,
) -> tuple[T | None, Parameter | None, Parameter | None]:
    """Gradient of BatchNormalization in training, which normalizes each channel (axis 1) over the whole batch.

    With x = (X - mean) · inv_std: X_grad = scale · inv_std · (dY - mean of dY - x · mean of dY · x), scale_grad is the
    sum of dY · x and bias_grad that of dY, all of them over each channel. scale, mean and inv_std have one number for
    each channel; an X of one dimension is one channel. inv_std is 1 / √(variance + epsilon), though the schema of
    onnxruntime-training, which requires both statistics, calls it variance. Where they are absent they are those of X;
    epsilon serves for nothing else. float16 and bfloat16 are computed in float32.
    """
    work = accumulator(X.dtype)
    axes, along = tuple(k for k in range(X.ndim) if k != 1), (-1, *(1,) * (X.ndim - 2))
    g, x = dY.astype(work), X.astype(work)
    count = work.type(max(1, X.size // max(1, scale.size)))

    def summed(terms: Array) -> Array:
        total: Array = np.sum(terms, axes)
        return total.reshape(along)

    def given(numbers: Array) -> Array:
        return numbers.astype(work).reshape(along)

    centred = x - (summed(x) / count if mean is None else given(mean))
    inv = 1 / np.sqrt(summed(centred * centred) / count + work.type(epsilon)) if inv_std is None else given(inv_std)
    xhat = centred * inv
    along_xhat, level = summed(g * xhat), summed(g)
    X_grad = (g - level / count - xhat * (along_xhat / count)) * (given(scale) * inv)
    found = {
        "X_grad": X_grad.astype(X.dtype),
        "scale_grad": along_xhat.ravel().astype(scale.dtype),
        "bias_grad": level.ravel().astype(scale.dtype),
    }
    wanted = (found[name] if outputs is None or name in outputs else None for name in found)
    return tuple(wanted)  # type: ignore[return-value]
