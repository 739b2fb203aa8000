"""Metrics: numbers for validation data in addition to the loss; any function of outputs and batch is one.

A metric counts in every batch, and its result comes from the counts of all of them: an F1 score is not the mean of the
F1 scores of batches.
"""

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from onnxgrad.graph.suggest import listed
from onnxgrad.tensor_types import Array
from onnxgrad.train.batches import on_host

Counts = Mapping[str, Any]  # numbers and arrays of a batch, which add up
AVERAGES = ("auto", "binary", "macro", "micro", "weighted")
CLOSE_TO_1 = 1e-3  # probabilities in half types add up to 1 no better


@dataclass(frozen=True)
class Metric:
    """A number that compares the output `prediction` with the array `target` of the batch, over all batches.

    A custom metric implements `count` and `result`, and sets `higher_is_better`. Any function of outputs and batch is a
    metric too, whose values are averaged.
    """

    higher_is_better: ClassVar[bool | None] = None  # None: that has to be said where it matters
    prediction: str
    target: str = "target"

    def __call__(self, outputs: Mapping[str, Array], batch: Mapping[str, Any]) -> Any:
        return self.result(self.of_batch(outputs, batch))

    def of_batch(self, outputs: Mapping[str, Array], batch: Mapping[str, Any]) -> Counts:
        """The counts of a batch."""
        for name, arrays, what in ((self.prediction, outputs, "outputs"), (self.target, batch, "batch")):
            if name not in arrays:
                raise ValueError(f"{type(self).__name__}: {name!r} is not in the {what}, which has {listed(arrays)}")
        return self.count(outputs[self.prediction], on_host(batch[self.target]))

    def count(self, prediction: Array, target: Array) -> Counts:
        """What one batch contributes: numbers and arrays by name."""
        raise NotImplementedError

    def merge(self, counts: Sequence[Counts]) -> Counts:
        """The counts of several batches as those of one: their sums."""
        return {name: functools.reduce(operator.add, (one[name] for one in counts)) for name in counts[0]}

    def result(self, counts: Counts) -> Any:
        """The number for the counts of all batches."""
        raise NotImplementedError


@dataclass(frozen=True)
class Accuracy(Metric):
    """The fraction of examples whose class is among the `top` highest scores along `axis`.

    Targets are class numbers, or distributions over the classes, whose highest is the class. `ignore_index` is a class
    number that does not count.
    """

    higher_is_better = True
    top: int = 1
    axis: int = 1
    ignore_index: int | None = None

    def __post_init__(self) -> None:
        if self.top < 1:
            raise ValueError(f"Accuracy: top is {self.top}, expected at least 1")

    def count(self, prediction: Array, target: Array) -> Counts:
        target = _target_classes(self, prediction, target, self.axis)
        if self.top > 1:
            scores = np.moveaxis(prediction, self.axis, -1)
            best = np.argsort(-scores, axis=-1, kind="stable")[..., : self.top]
            hit = (best == target[..., None]).any(-1)
        else:
            hit = prediction.argmax(self.axis) == target
        counted = hit if self.ignore_index is None else hit[target != self.ignore_index]
        return {"hits": int(counted.sum()), "counted": counted.size}

    def result(self, counts: Counts) -> float:
        return counts["hits"] / counts["counted"] if counts["counted"] else 0.0


@dataclass(frozen=True)
class BinaryAccuracy(Metric):
    """The fraction of scores on the right side of `threshold`; targets are 0 or 1.

    For logits the threshold is 0, for probabilities 0.5.
    """

    higher_is_better = True
    threshold: float = 0.0

    def count(self, prediction: Array, target: Array) -> Counts:
        hit = (prediction > self.threshold) == (_alike(self, prediction, target) > 0.5)
        return {"hits": int(hit.sum()), "counted": hit.size}

    def result(self, counts: Counts) -> float:
        return float(counts["hits"] / counts["counted"])


@dataclass(frozen=True)
class MAE(Metric):
    """The mean of the absolute differences."""

    higher_is_better = False

    def count(self, prediction: Array, target: Array) -> Counts:
        difference = np.abs(prediction - _alike(self, prediction, target))
        return {"total": float(difference.sum(dtype=np.float64)), "counted": difference.size}

    def result(self, counts: Counts) -> float:
        return float(counts["total"] / counts["counted"])


@dataclass(frozen=True)
class MSE(MAE):
    """The mean of the squared differences."""

    def count(self, prediction: Array, target: Array) -> Counts:
        square = np.square(prediction - _alike(self, prediction, target))
        return {"total": float(square.sum(dtype=np.float64)), "counted": square.size}


@dataclass(frozen=True)
class _OfClasses(Metric):
    """A metric of predicted and actual classes.

    Without `threshold` the prediction is a score for each class along `axis`, and the highest is the predicted class.
    With it each score is a decision of its own, 1 above the threshold: a single one along `axis` between the classes 0
    and 1, several of them between labels, of which any may apply.
    """

    higher_is_better: ClassVar[bool | None] = True
    threshold: float | None = None
    axis: int = 1
    ignore_index: int | None = None

    def _classes(self, prediction: Array, target: Array) -> tuple[Array, Array, int]:
        """Predicted and actual classes of what counts, and how many classes there are."""
        if self.threshold is not None:
            target = _alike(self, prediction, target)
            predicted, actual, count = prediction > self.threshold, target > 0.5, 2
        else:
            kind = type(self).__name__
            if prediction.ndim == 1 or 1 in prediction.shape[self.axis :][:1]:
                raise ValueError(
                    f"{kind}: {self.prediction!r} is one score for each example: set the threshold above which it "
                    "predicts class 1 (0 for logits, 0.5 for probabilities)"
                )
            actual = _target_classes(self, prediction, target, self.axis)
            target, predicted, count = actual, prediction.argmax(self.axis), prediction.shape[self.axis]
        if self.ignore_index is not None:
            counts = target != self.ignore_index
            predicted, actual = predicted[counts], actual[counts]
        predicted, actual = predicted.ravel().astype(np.int64), actual.ravel().astype(np.int64)
        _expect_classes(self, actual, count)
        return predicted, actual, count

    def _are_labels(self, prediction: Array) -> bool:
        """Whether there are several decisions for each example."""
        is_there = -prediction.ndim <= self.axis < prediction.ndim
        return self.threshold is not None and is_there and prediction.shape[self.axis] > 1


@dataclass(frozen=True)
class _OfEachClass(_OfClasses):
    """A ratio for each class, from the hits of the class, and how often it was predicted and is right."""

    def count(self, prediction: Array, target: Array) -> Counts:
        if self._are_labels(prediction):
            return self._count_labels(prediction, target)
        predicted, actual, count = self._classes(prediction, target)
        hits = actual[predicted == actual]
        found = {"hits": hits, "predicted": predicted, "actual": actual}
        return {"labels": 0, **{name: np.bincount(classes, minlength=count) for name, classes in found.items()}}

    def _count_labels(self, prediction: Array, target: Array) -> Counts:
        target = _alike(self, prediction, target)
        counted = np.ones(target.shape, bool) if self.ignore_index is None else target != self.ignore_index
        predicted, actual = (prediction > self.threshold) & counted, (target > 0.5) & counted
        others = tuple(k for k in range(target.ndim) if k != self.axis % target.ndim)
        found = {"hits": predicted & actual, "predicted": predicted, "actual": actual}
        return {"labels": 1, **{name: one.sum(others, dtype=np.int64) for name, one in found.items()}}

    def _ratio(self, hits: Array, predicted: Array, actual: Array) -> tuple[Array, Array]:
        """Numerator and denominator."""
        raise NotImplementedError

    def _averaged(self, counts: Counts, average: str) -> float:
        sums = [counts[name] for name in ("hits", "predicted", "actual")]
        if average == "micro":
            sums = [one.sum(keepdims=True) for one in sums]
        if average == "binary":
            sums = [one[1:] for one in sums]
        above, below = self._ratio(*sums)
        ratios = np.divide(above, below, out=np.zeros(len(above)), where=below > 0)
        if average == "weighted":
            total = counts["actual"].sum()
            return float((ratios * counts["actual"]).sum() / total) if total else 0.0
        if average == "macro" and not counts["labels"]:  # classes that never occur do not count, labels do
            ratios = ratios[counts["predicted"] + counts["actual"] > 0]
        return float(ratios.mean()) if len(ratios) else 0.0


@dataclass(frozen=True)
class F1(_OfEachClass):
    """The harmonic mean of precision and recall, over all batches together.

    - Predictions are scores of classes along `axis`, or with `threshold` (0 for logits, 0.5 for probabilities) separate
      decisions, as for BCE: one for each example, or one for each of several labels.
    - `average`: "binary" (class 1), "macro" (the mean over classes), "micro" (over all decisions), "weighted" (by the
      frequency of classes), or "auto": "binary" for two classes, otherwise "macro".
    - `ignore_index`: a class number that does not count.

    As in scikit-learn, a ratio with a zero denominator is 0, and the mean leaves out classes that neither targets nor
    predictions contain.
    """

    average: str = "auto"

    def __post_init__(self) -> None:
        if self.average not in AVERAGES:
            kind = type(self).__name__
            raise ValueError(f"{kind}: average is {self.average!r}, expected one of {', '.join(AVERAGES)}")

    def result(self, counts: Counts) -> float:
        classes, average = len(counts["hits"]), self.average
        are_two = classes == 2 and not counts["labels"]
        if average == "binary" and not are_two:
            what = "labels" if counts["labels"] else "classes"
            raise ValueError(
                f"{type(self).__name__}: average is 'binary', but {self.prediction!r} has {classes} {what}: take "
                "'macro', 'micro' or 'weighted'"
            )
        if average == "auto":
            average = "binary" if are_two else "macro"
        return self._averaged(counts, average)

    def _ratio(self, hits: Array, predicted: Array, actual: Array) -> tuple[Array, Array]:
        return 2 * hits, predicted + actual


@dataclass(frozen=True)
class Precision(F1):
    """How many of those predicted as a class are of it; settings as of F1."""

    def _ratio(self, hits: Array, predicted: Array, actual: Array) -> tuple[Array, Array]:
        return hits, predicted


@dataclass(frozen=True)
class Recall(F1):
    """How many of those of a class are predicted as it; settings as of F1."""

    def _ratio(self, hits: Array, predicted: Array, actual: Array) -> tuple[Array, Array]:
        return hits, actual


@dataclass(frozen=True)
class MeanIoU(_OfEachClass):
    """The intersection over the union of predicted and actual members of a class, mean over the classes that occur.

    For segmentation: scores of classes along `axis` for every pixel, or with `threshold` one score for each.
    `ignore_index` does not count.
    """

    def result(self, counts: Counts) -> float:
        return self._averaged(counts, "macro")

    def _ratio(self, hits: Array, predicted: Array, actual: Array) -> tuple[Array, Array]:
        return hits, predicted + actual - hits


@dataclass(frozen=True)
class ConfusionMatrix(_OfClasses):
    """How often each class was predicted as which: a list for each true class, with a number for each predicted one.

    Predictions as of F1, except that several labels have no such matrix. `classes` are names to show.
    """

    higher_is_better = None
    classes: tuple[str, ...] = ()

    def count(self, prediction: Array, target: Array) -> Counts:
        if self._are_labels(prediction):
            raise ValueError(
                f"ConfusionMatrix: {self.prediction!r} has {prediction.shape[self.axis]} labels, of which any may "
                "apply: there is a matrix of classes only, without a threshold"
            )
        predicted, actual, count = self._classes(prediction, target)
        if self.classes and len(self.classes) != count:
            raise ValueError(
                f"ConfusionMatrix: classes has {len(self.classes)} names, but {self.prediction!r} has {count} classes"
            )
        return {"matrix": np.bincount(actual * count + predicted, minlength=count * count).reshape(count, count)}

    def result(self, counts: Counts) -> list[list[int]]:
        found: list[list[int]] = counts["matrix"].tolist()
        return found


@dataclass(frozen=True)
class AUC(Metric):
    """The area under the ROC curve: how often a member of a class has a higher score than a non-member; ties are half.

    With class numbers as targets, scores of classes along `axis` are logits or probabilities, and the result is the
    mean over classes, each against the rest. With targets like the prediction, 0 or 1, it is the mean over labels along
    `axis`, or the area of the only one. Classes are left out if they or the rest do not occur; if none is left, the
    result is NaN. `ignore_index` is a class number that does not count.
    """

    higher_is_better = True
    axis: int = 1
    ignore_index: int | None = None

    def count(self, prediction: Array, target: Array) -> Counts:
        if prediction.shape == target.shape:
            return self._count_labels(prediction, target)
        actual = _target_classes(self, prediction, target, self.axis)
        scores = np.moveaxis(prediction, self.axis, -1).reshape(actual.size, -1).astype(np.float64)
        actual = actual.reshape(-1, 1)
        if self.ignore_index is not None:
            counted = actual[:, 0] != self.ignore_index
            scores, actual = scores[counted], actual[counted]
        _expect_classes(self, actual, scores.shape[1])
        are_probabilities = _are_probabilities(scores)
        if scores.shape[1] == 2:  # differences of logits: their probabilities may all be 1
            return {"scores": scores[:, 1:] if are_probabilities else scores[:, 1:] - scores[:, :1], "actual": actual}
        if not are_probabilities:
            scores = np.exp(scores - scores.max(1, keepdims=True))
            scores /= scores.sum(1, keepdims=True)
        return {"scores": scores, "actual": actual}

    def _count_labels(self, prediction: Array, target: Array) -> Counts:
        actual = np.where(target > 0.5, 1, 0)
        if self.ignore_index is not None:
            actual[target == self.ignore_index] = -1
        if not -target.ndim <= self.axis < target.ndim:
            return {"scores": prediction.reshape(-1, 1), "actual": actual.reshape(-1, 1)}
        labels = target.shape[self.axis]
        scores, actual = (np.moveaxis(a, self.axis, -1).reshape(-1, labels) for a in (prediction, actual))
        return {"scores": scores, "actual": actual}

    def merge(self, counts: Sequence[Counts]) -> Counts:
        return {name: np.concatenate([one[name] for one in counts]) for name in counts[0]}

    def result(self, counts: Counts) -> float:
        scores, actual = counts["scores"], counts["actual"]
        areas = []
        for k in range(scores.shape[1]):
            labels = actual[:, k] if actual.shape == scores.shape else np.where(actual[:, 0] == k, 1, 0)
            areas.append(_area(scores[labels >= 0, k], labels[labels >= 0] == 1))
        known = [area for area in areas if area is not None]
        return float(np.mean(known)) if known else math.nan


@dataclass(frozen=True)
class Perplexity(Metric):
    """The exponential of the mean of -log p over all targets, where p is the probability of the right class.

    Predictions along `axis` are logits, logarithms of probabilities, or probabilities. `ignore_index` does not count.
    """

    higher_is_better = False
    axis: int = 1
    ignore_index: int | None = None

    def count(self, prediction: Array, target: Array) -> Counts:
        target = _target_classes(self, prediction, target, self.axis)
        scores = np.moveaxis(prediction, self.axis, -1)
        if self.ignore_index is not None:
            counted = target != self.ignore_index
            scores, target = scores[counted], target[counted]
        _expect_classes(self, target, scores.shape[-1])
        right = np.take_along_axis(scores, target[..., None].astype(np.int64), -1)[..., 0].astype(np.float64)
        with np.errstate(divide="ignore"):
            if _are_probabilities(scores):
                return {"total": -float(np.log(right).sum()), "counted": target.size}
            most = scores.max(-1, keepdims=True) if target.size else scores[..., :1]
            sums = np.exp(scores - most).sum(-1, dtype=np.float64)
        return {"total": float((np.log(sums) + most[..., 0] - right).sum()), "counted": target.size}

    def result(self, counts: Counts) -> float:
        if not counts["counted"]:
            return math.nan
        with np.errstate(over="ignore"):
            return float(np.exp(np.float64(counts["total"] / counts["counted"])))


def _alike(metric: Metric, prediction: Array, target: Array) -> Array:
    """The target, whose shape must be the prediction's: broadcasting would compare all with all."""
    if target.shape != prediction.shape:
        raise ValueError(
            f"{type(metric).__name__}: {metric.target!r} has shape {list(target.shape)}, but {metric.prediction!r} has "
            f"{list(prediction.shape)}"
        )
    return target


def _target_classes(metric: Metric, prediction: Array, target: Array, axis: int) -> Array:
    """The class numbers of targets, or where they are distributions those of the highest probability."""
    kind = type(metric).__name__
    if not -prediction.ndim <= axis < prediction.ndim:
        raise ValueError(f"{kind}: axis is {axis}, but {metric.prediction!r} has {prediction.ndim} dimensions")
    if target.ndim == prediction.ndim and np.issubdtype(target.dtype, np.floating):
        target = target.argmax(axis)
    expected = np.delete(prediction.shape, axis).tolist()
    if list(target.shape) != expected:
        raise ValueError(
            f"{kind}: {metric.target!r} has shape {list(target.shape)}, expected {expected} for the classes of "
            f"{metric.prediction!r} along axis {axis}"
        )
    return target


def _expect_classes(metric: Metric, target: Array, classes: int) -> None:
    """Raises one sentence unless all targets are classes."""
    wrong = target[(target < 0) | (target >= classes)]
    if wrong.size:
        raise ValueError(
            f"{type(metric).__name__}: {metric.target!r} has the class {wrong.flat[0]}, expected 0 to {classes - 1}; "
            f"ignore_index={wrong.flat[0]} leaves it out"
        )


def _are_probabilities(scores: Array) -> bool:
    """Whether the scores of each row are those of a Softmax: what adds up to 1 everywhere is no logits."""
    if not scores.size or scores.min() < 0:
        return False
    return bool((np.abs(scores.sum(-1, dtype=np.float64) - 1) < CLOSE_TO_1).all())


def _area(scores: Array, positive: Array) -> float | None:
    """The area under the ROC curve, by the ranks of the positive scores; None if there is one kind only."""
    ones = int(positive.sum())
    zeros = len(positive) - ones
    if not ones or not zeros:
        return None
    if np.isnan(scores).any():
        return math.nan
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # of equal scores the mean of theirs
    return float((ranks[place[positive]].sum() - ones * (ones + 1) / 2) / (ones * zeros))
