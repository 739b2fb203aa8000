"""Metrics: numbers for validation data besides the loss; any function of outputs and batch is one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrad.tensor_types import Array


@dataclass(frozen=True)
class Metric:
    """A number for a batch: `metric(outputs, batch)` compares the output `prediction` with the batch's array `target`.

    A metric of your own has a `measure`, or is any function of outputs and batch.
    """

    prediction: str
    target: str = "target"

    def __call__(self, outputs: Mapping[str, Array], batch: Mapping[str, Any]) -> float:
        return self.measure(outputs[self.prediction], np.asarray(batch[self.target]))

    def measure(self, prediction: Array, target: Array) -> float:
        """The number for the arrays of one batch; `evaluate` takes the mean over batches."""
        raise NotImplementedError


@dataclass(frozen=True)
class Accuracy(Metric):
    """The fraction of examples whose class is among the `top` highest scores along `axis`.

    Targets are class numbers, or distributions over the classes, whose highest is the class. `ignore_index` is a class
    number that does not count.
    """

    top: int = 1
    axis: int = 1
    ignore_index: int | None = None

    def __post_init__(self) -> None:
        if self.top < 1:
            raise ValueError(f"Accuracy: top is {self.top}, expected at least 1")

    def measure(self, prediction: Array, target: Array) -> float:
        if not -prediction.ndim <= self.axis < prediction.ndim:
            raise ValueError(f"Accuracy: axis is {self.axis}, but {self.prediction!r} has {prediction.ndim} dimensions")
        scores = np.moveaxis(prediction, self.axis, -1)
        if target.ndim == prediction.ndim and np.issubdtype(target.dtype, np.floating):
            target = np.moveaxis(target, self.axis, -1).argmax(-1)
        if target.shape != scores.shape[:-1]:
            raise ValueError(
                f"Accuracy: {self.target!r} has shape {list(target.shape)}, expected {list(scores.shape[:-1])} for the "
                f"classes of {self.prediction!r} along axis {self.axis}"
            )
        best = (
            np.argsort(-scores, axis=-1, kind="stable")[..., : self.top]
            if self.top > 1
            else scores.argmax(-1)[..., None]
        )
        hit = (best == target[..., None]).any(-1)
        counted = hit if self.ignore_index is None else hit[target != self.ignore_index]
        return float(counted.mean()) if counted.size else 0.0


@dataclass(frozen=True)
class BinaryAccuracy(Metric):
    """The fraction of scores on the right side of `threshold`; targets are 0 or 1.

    For logits the threshold is 0, for probabilities 0.5.
    """

    threshold: float = 0.0

    def measure(self, prediction: Array, target: Array) -> float:
        return float(((prediction > self.threshold) == (_alike(self, prediction, target) > 0.5)).mean())


@dataclass(frozen=True)
class MAE(Metric):
    """The mean of the absolute differences."""

    def measure(self, prediction: Array, target: Array) -> float:
        return float(np.abs(prediction - _alike(self, prediction, target)).mean(dtype=np.float64))


@dataclass(frozen=True)
class MSE(Metric):
    """The mean of the squared differences."""

    def measure(self, prediction: Array, target: Array) -> float:
        return float(np.square(prediction - _alike(self, prediction, target)).mean(dtype=np.float64))


def _alike(metric: Metric, prediction: Array, target: Array) -> Array:
    """The target, whose shape must be the prediction's: broadcasting would compare all with all."""
    if target.shape != prediction.shape:
        raise ValueError(
            f"{type(metric).__name__}: {metric.target!r} has shape {list(target.shape)}, but {metric.prediction!r} has "
            f"{list(prediction.shape)}"
        )
    return target
