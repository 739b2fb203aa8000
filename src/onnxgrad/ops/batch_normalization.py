"""BatchNormInternal, which normalizes each channel over the whole batch and tells the statistics, and its gradient."""

from collections.abc import Sequence
from typing import Annotated

import numpy as np

from onnxgrad.op import op
from onnxgrad.schema import Dim, Known, agree
from onnxgrad.tensor_types import FLOATS, Array, T, TypeConstraint, accumulator

# As in BatchNormalization: the parameters and the statistics of half numbers may be float32.
Parameter = Annotated[Array, TypeConstraint("T1", FLOATS)]
Statistic = Annotated[Array, TypeConstraint("T2", FLOATS)]


def _channels(X: tuple[Dim, ...], others: dict[str, Known | None]) -> tuple[Dim, ...]:
    """The shape of what has one number for each channel, which the others are checked against."""
    if not X:
        raise ValueError("X is a scalar, expected at least one dimension")
    channels = X[1:2] or (1,)
    for name, given in others.items():
        if given is not None and given.dims is not None and not agree(given.dims, channels):
            raise ValueError(
                f"{name} has shape {list(given.dims)}, expected {list(channels)}, one number for each channel of X"
            )
    return channels


def _expect_epsilon(epsilon: float) -> None:
    if not epsilon >= 0:
        raise ValueError(f"epsilon is {epsilon}, expected a number that is not negative")


def _shapes(
    dY: Known, X: Known, scale: Known, mean: Known | None, inv_std: Known | None, epsilon: float
) -> tuple[tuple[Dim, ...] | None, ...]:
    if (mean is None) != (inv_std is None):
        there, absent = ("mean", "inv_std") if inv_std is None else ("inv_std", "mean")
        raise ValueError(f"{there} is given and {absent} is not, expected both or neither")
    _expect_epsilon(epsilon)
    if X.dims is None:
        return dY.dims, scale.dims, scale.dims
    channels = _channels(X.dims, {"scale": scale, "mean": mean, "inv_std": inv_std})
    if dY.dims is not None and not agree(dY.dims, X.dims):
        raise ValueError(f"dY has shape {list(dY.dims)}, expected {list(X.dims)}, as X has")
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


def _internal_shapes(
    X: Known, scale: Known, B: Known, input_mean: Known, input_var: Known, epsilon: float, momentum: float,
    training_mode: int,
) -> tuple[tuple[Dim, ...] | None, ...]:  # fmt: skip
    _expect_epsilon(epsilon)
    others: dict[str, Known | None] = {"scale": scale, "B": B, "input_mean": input_mean, "input_var": input_var}
    channels = input_mean.dims if X.dims is None else _channels(X.dims, others)
    return X.dims, *[channels] * 4


@op(
    "BatchNormInternal",
    outputs=("Y", "running_mean?", "running_var?", "saved_mean?", "saved_inv_std?"),
    shape=_internal_shapes,
)
def batch_norm_internal(
    X: T,
    scale: Parameter,
    B: Parameter,
    input_mean: Statistic,
    input_var: Statistic,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 1,
    outputs: Sequence[str] | None = None,
) -> tuple[T, Statistic | None, Statistic | None, Statistic | None, Statistic | None]:
    """ONNX's BatchNormalization, which also tells the statistics that it normalizes with.

    Y = (X - mean) · inv_std · scale + B for each channel (axis 1). In training mean and inv_std = 1 / √(variance +
    epsilon) are those of X over the whole batch, and the running statistics are momentum · input + (1 - momentum) ·
    those of the batch. In inference they are input_mean and input_var, and the running statistics stay. saved_mean and
    saved_inv_std are what BatchNormalizationGrad takes. float16 and bfloat16 are computed in float32.
    """
    work = accumulator(X.dtype)
    axes, along = tuple(k for k in range(X.ndim) if k != 1), (-1, *(1,) * (X.ndim - 2))
    x = X.astype(work)
    mean, variance = input_mean.astype(work), input_var.astype(work)
    running = mean, variance
    if training_mode:
        count = work.type(max(1, X.size // max(1, scale.size)))
        mean = np.sum(x, axes).ravel() / count
        variance = np.sum(np.square(x - mean.reshape(along)), axes).ravel() / count
        share = work.type(momentum)
        running = running[0] * share + mean * (1 - share), running[1] * share + variance * (1 - share)
    inv_std = 1 / np.sqrt(variance + work.type(epsilon))
    Y = (x - mean.reshape(along)) * (scale.astype(work) * inv_std).reshape(along) + B.astype(work).reshape(along)
    found = {"Y": Y.astype(X.dtype)}
    names = "running_mean", "running_var", "saved_mean", "saved_inv_std"
    for name, numbers in zip(names, (*running, mean, inv_std), strict=True):
        found[name] = numbers.astype(input_mean.dtype)
    wanted = (found[name] if outputs is None or name in outputs else None for name in found)
    return tuple(wanted)  # type: ignore[return-value]
