"""Losses, as nodes of the graph: each takes the name of the value that predicts, and adds an input for the target.

    loss = losses.CrossEntropy("logits") + 0.1 * losses.MSE("value", target="measured")

A loss of your own is a formula over ONNX operators:

    from onnxgrad.rules import op
    loss = losses.Custom("y", lambda prediction, target: op.ReduceMean(op.Abs(prediction - target), keepdims=0))
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.builder import op
from onnxgrad.graph.tensor import Dim, Tensor
from onnxgrad.tensor_types import Array
from onnxgrad.train.batches import NO_ADVICE, Advice

Shape = tuple[Dim, ...] | None


class Total:
    """A sum of losses, as `CrossEntropy("logits") + 0.1 * MSE("value", target="price")` is one; a loss is one, too."""

    def __init__(self, parts: Sequence["Loss"]) -> None:
        self.parts = tuple(parts)

    def __add__(self, other: "Total") -> "Total":
        return Total([*self.parts, *parts_of(other)])


class Loss(Total):
    """One loss, of one output: what all losses have.

    `prediction` is the name of the output, or of any value inside the model, `target` that of the input with the values
    it should have, which is added to the graph unless the model has it. `reduction`, where there is one, is "mean" or
    "sum". `share` is the factor of the loss in a sum; `2 * loss` sets it. A class of your own has the fields above and
    a `formula`.
    """

    prediction: str
    target: str
    share: float
    reduction: str = "mean"
    activations: ClassVar[tuple[str, ...]] = ()  # if one of these computes the prediction, the loss uses its input

    @property
    def parts(self) -> tuple["Loss", ...]:  # type: ignore[override]
        """Itself."""
        return (self,)

    def __mul__(self, factor: float) -> "Loss":
        return replace(self, share=self.share * factor)  # type: ignore[type-var]

    __rmul__ = __mul__

    def target_like(self, prediction: Tensor) -> tuple[ir.DataType, Shape]:
        """Type and shape of the target's input: by default those of the prediction."""
        return prediction.dtype, prediction.shape

    def formula(self, prediction: Tensor, target: Tensor) -> Tensor:
        """The loss, a scalar, as nodes: written with + - * / **, comparisons and `onnxgrad.rules.op`."""
        raise NotImplementedError

    def class_axis(self, prediction: Tensor) -> int | None:
        """Where the classes are, for a loss of classes."""
        return None

    def of_logits(self) -> "Loss":
        """The loss that uses the input of its activation."""
        return self

    def wrong_class(self, target: Array, shape: Sequence[Any] | None) -> tuple[tuple[int, ...], str] | None:
        """Where a target is not a class, and what was expected, for a loss of classes."""
        return None

    def advice(self, shape: Sequence[Any] | None) -> Advice:
        """What to do about targets that are wrong, for predictions of this shape."""
        return NO_ADVICE

    # With several ranks a batch's loss is a weighted sum of the losses of the ranks' slices of it.

    def as_part(self) -> "Loss":
        """The loss of a slice of a batch, to be weighted by its examples, or by `count`."""
        return self

    def count(self, target: Array) -> float | None:
        """The divisor of the mean over these targets, where not all examples count the same."""
        return None

    @property
    def is_sum(self) -> bool:
        """Whether the loss of a batch is the sum of the losses of its slices."""
        return self.reduction == "sum"


def parts_of(total: Total) -> tuple[Loss, ...]:
    """The terms of a sum of losses; anything else is refused."""
    if not isinstance(total, Total):
        raise TypeError(f"a {type(total).__name__} is added to a loss, expected another loss")
    return total.parts


def _reduce(values: Tensor, reduction: str) -> Tensor:
    reduce = op.ReduceMean if reduction == "mean" else op.ReduceSum
    return reduce(values, keepdims=0)


@dataclass(frozen=True)
class _ReducedLoss(Loss):
    """A loss whose `reduction` is one of `reductions`; each class has the field itself, in its own order."""

    reductions: ClassVar[tuple[str, ...]] = ("mean", "sum")
    prediction: str
    target: str = "target"
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.reduction not in self.reductions:
            expected = ", ".join(map(repr, self.reductions))
            raise ValueError(f"{type(self).__name__}: reduction is {self.reduction!r}, expected one of {expected}")


@dataclass(frozen=True)
class MSE(_ReducedLoss):
    """The mean, or sum, of the squared differences."""

    reduction: str = "mean"

    def formula(self, prediction: Tensor, target: Tensor) -> Tensor:
        difference = prediction - target
        return _reduce(difference * difference, self.reduction)


@dataclass(frozen=True)
class L1(_ReducedLoss):
    """The mean, or sum, of the absolute differences."""

    reduction: str = "mean"

    def formula(self, prediction: Tensor, target: Tensor) -> Tensor:
        return _reduce(op.Abs(prediction - target), self.reduction)


@dataclass(frozen=True)
class Huber(_ReducedLoss):
    """Half the squared difference up to `delta`, and linear beyond, as PyTorch's HuberLoss."""

    delta: float = 1.0
    reduction: str = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.delta > 0:
            raise ValueError(f"Huber: delta is {self.delta!r}, expected a number above 0")

    def formula(self, prediction: Tensor, target: Tensor) -> Tensor:
        size = op.Abs(prediction - target)
        near = op.Min(size, self.delta)
        return _reduce(near * (size - near * 0.5), self.reduction)


class _LossOfClasses(_ReducedLoss):
    """A loss whose targets are class numbers, unless it has `probabilities`; each class has the fields, as above."""

    probabilities: bool = False
    ignore_index: int | None
    weights: Sequence[float] | None
    axis: int

    @property
    def _counts_targets(self) -> bool:
        """Whether the mean depends on which classes the targets are."""
        some = self.ignore_index is not None or self.weights is not None
        return some and self.reduction == "mean" and not self.probabilities

    def as_part(self) -> Loss:
        # A slice may have no target that counts, and its mean would be 0 / 0; its sum is 0.
        return replace(self, reduction="sum") if self._counts_targets else self  # type: ignore[call-arg]

    def count(self, target: Array) -> float | None:
        if not self._counts_targets:
            return None
        counted = target[target != self.ignore_index] if self.ignore_index is not None else target
        if self.weights is None:
            return float(counted.size)
        return float(np.asarray(self.weights, np.float64)[counted].sum())

    def class_axis(self, prediction: Tensor) -> int:
        if not -prediction.rank <= self.axis < prediction.rank:
            raise ValueError(
                f"{type(self).__name__}: axis is {self.axis}, but {self.prediction!r} has {prediction.rank} dimensions"
            )
        return self.axis % prediction.rank

    def target_like(self, prediction: Tensor) -> tuple[ir.DataType, Shape]:
        if self.probabilities:
            return prediction.dtype, prediction.shape
        axis, shape = self.class_axis(prediction), prediction.shape
        return ir.DataType.INT64, None if shape is None else (*shape[:axis], *shape[axis + 1 :])

    def advice(self, shape: Sequence[Any] | None) -> Advice:
        if self.probabilities:
            return NO_ADVICE
        name = type(self).__name__
        has_other = any(field.name == "probabilities" for field in fields(self))
        takes = f"; {name}(…, probabilities=True) takes a distribution over them" if has_other else ""
        kind = f", the numbers of classes{takes}"
        if self.axis != 1 or shape is None or len(shape) < 3:
            return Advice(kind)
        dims = ["any" if d is None else d for d in shape]
        where = f": {name} takes dimension 1 of {self.prediction!r}, which has the shape {dims}, for the classes; "
        return Advice(kind, f"{where}axis=-1 takes the last")

    def _weights_like(self, prediction: Tensor) -> Array | None:
        if self.weights is None:
            return None
        weights = np.asarray(self.weights, prediction.dtype.numpy())
        classes = None if prediction.shape is None else prediction.shape[self.class_axis(prediction)]
        if isinstance(classes, int) and weights.shape != (classes,):
            raise ValueError(
                f"{type(self).__name__}: weights has shape {list(weights.shape)}, expected [{classes}], a number for "
                f"each class of {self.prediction!r}"
            )
        return weights

    def _classes_second(self, prediction: Tensor) -> Tensor:
        """With the classes where ONNX's operators expect them."""
        axis = self.class_axis(prediction)
        if axis == 1:
            return prediction
        order = [k for k in range(prediction.rank) if k != axis]
        moved: Tensor = op.Transpose(prediction, perm=[*order[:1], axis, *order[1:]])
        return moved

    def wrong_class(self, target: Array, shape: Sequence[Any] | None) -> tuple[tuple[int, ...], str] | None:
        """Where a target is neither a class nor ignored, and what was expected; `shape` is the prediction's, if known.

        Such a target would train other classes, or none, without an error.
        """
        if self.probabilities or target.dtype.kind not in "iu" or target.size == 0:
            return None
        found = shape[self.axis] if shape is not None and -len(shape) <= self.axis < len(shape) else None
        classes = found if isinstance(found, int) else None
        # As unsigned numbers those below 0 are the largest: if all are classes, one comparison tells.
        if classes is not None and target.view(f"u{target.itemsize}").max() < classes:
            return None
        wrong = target < 0
        if classes is not None:
            wrong |= target >= classes
        if self.ignore_index is not None:
            wrong &= target != self.ignore_index
        if not wrong.any():
            return None
        return tuple(np.argwhere(wrong)[0].tolist()), "0 or more" if classes is None else f"0 to {classes - 1}"


@dataclass(frozen=True)
class CrossEntropy(_LossOfClasses):
    """The cross entropy of scores (logits) along `axis`, as PyTorch's.

    Targets are class numbers, or with `probabilities=True` a distribution over the classes. `ignore_index` is a class
    number that does not count; `weights` are one number per class; `label_smoothing` mixes in the uniform distribution.
    If a Softmax computes the output, the loss uses the input of the Softmax.
    """

    activations = ("Softmax", "LogSoftmax")
    reduction: str = "mean"
    probabilities: bool = False
    ignore_index: int | None = None
    weights: Sequence[float] | None = None
    label_smoothing: float = 0.0
    axis: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"CrossEntropy: label_smoothing is {self.label_smoothing!r}, expected 0 to 1")
        if self.ignore_index is not None and not _fits_int64(self.ignore_index):
            raise ValueError(
                f"CrossEntropy: ignore_index is {self.ignore_index!r}, expected a class number, which fits int64"
            )
        if self.probabilities and self.ignore_index is not None:
            raise ValueError("CrossEntropy: ignore_index is for class numbers, but the targets are probabilities")

    def formula(self, prediction: Tensor, target: Tensor) -> Tensor:
        weights = self._weights_like(prediction)
        if self.probabilities:
            return self._of_probabilities(prediction, target, self.class_axis(prediction), weights)
        prediction = self._classes_second(prediction)
        given = {"reduction": self.reduction, "ignore_index": self.ignore_index}
        plain = op.SoftmaxCrossEntropyLoss(prediction, target, weights, **given)
        if not self.label_smoothing:
            return plain
        return plain * (1 - self.label_smoothing) + self._smooth(prediction, target, weights)

    def _smooth(self, prediction: Tensor, target: Tensor, weights: Any) -> Tensor:
        """The term of the uniform distribution; ignored targets do not count, and the mean is as in the plain loss."""
        scores = op.LogSoftmax(prediction, axis=1)
        per_class = weights if weights is not None else np.ones(1, prediction.dtype.numpy())
        shape = [1, len(per_class), *[1] * (prediction.rank - 2)]
        classes = op.CastLike(op.Gather(op.Shape(prediction), 1, axis=0), prediction)
        total = -op.ReduceSum(scores * per_class.reshape(shape), [1], keepdims=0) * (self.label_smoothing / classes)
        ignored = -1 if self.ignore_index is None else self.ignore_index  # -1 is not a class, so it ignores nothing
        counts = op.CastLike(~target.equals(ignored), prediction)
        total = op.ReduceSum(total * counts, keepdims=0)
        if self.reduction == "sum":
            return total
        if weights is not None:
            known = op.Where(target.equals(ignored), 0, target)
            counts = counts * op.Gather(_constant(weights, prediction), known, axis=0)
        return total / op.ReduceSum(counts, keepdims=0)

    def _of_probabilities(self, prediction: Tensor, target: Tensor, axis: int, weights: Any) -> Tensor:
        if self.label_smoothing:
            classes = op.CastLike(op.Gather(op.Shape(prediction), axis, axis=0), prediction)
            target = target * (1 - self.label_smoothing) + self.label_smoothing / classes
        if weights is not None:
            shape = [1] * prediction.rank
            shape[axis] = len(weights)
            target = target * weights.reshape(shape)
        total = -op.ReduceSum(op.LogSoftmax(prediction, axis=axis) * target, [axis], keepdims=0)
        return _reduce(total, self.reduction)


@dataclass(frozen=True)
class NLL(_LossOfClasses):
    """The negative log-likelihood of classes along `axis`, as PyTorch's NLLLoss: the output is log-probabilities.

    With `log_prediction=False` the output is probabilities; their logarithms are limited to -100. Targets are class
    numbers; `ignore_index` is one that does not count; `weights` are one number per class. If a Softmax computes the
    output, the loss uses the input of the Softmax.
    """

    activations = ("Softmax",)
    reduction: str = "mean"
    log_prediction: bool = True
    ignore_index: int | None = None
    weights: Sequence[float] | None = None
    axis: int = 1

    def of_logits(self) -> Loss:
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "log_prediction"}
        return CrossEntropy(**given)

    def formula(self, prediction: Tensor, target: Tensor) -> Tensor:
        weights = self._weights_like(prediction)
        scores = self._classes_second(prediction if self.log_prediction else _log(prediction))
        given = {"reduction": self.reduction, "ignore_index": self.ignore_index}
        loss: Tensor = op.NegativeLogLikelihoodLoss(scores, target, weights, **given)
        return loss


def _log(probabilities: Tensor) -> Tensor:
    """Logarithms, not below -100, as PyTorch's BCELoss has them; they have no gradient there."""
    positive = probabilities > 0
    log: Tensor = op.Max(op.Log(op.Where(positive, probabilities, 1)), -100)
    clamped: Tensor = op.Where(positive, log, -100)
    return clamped


def _fits_int64(number: Any) -> bool:
    whole = isinstance(number, (int, np.integer)) and not isinstance(number, bool)
    return whole and -(2**63) <= int(number) < 2**63


def _constant(array: Any, like: Tensor) -> Tensor:
    """An array as a constant of the type of a tensor."""
    return like.builder.constant(array, like.dtype)


@dataclass(frozen=True)
class BCEWithLogits(_ReducedLoss):
    """Binary cross entropy of scores (logits), each on its own; targets are 0 to 1.

    `pos_weight` is the weight of positive targets, one number or one for each score. If a Sigmoid computes the output,
    the loss uses the input of the Sigmoid.
    """

    activations = ("Sigmoid",)
    threshold: ClassVar[float] = 0.0  # of metrics
    reduction: str = "mean"
    pos_weight: float | Sequence[float] | None = None

    def formula(self, prediction: Tensor, target: Tensor) -> Tensor:
        negative = op.Softplus(-prediction)  # -log of the sigmoid, without overflow
        if self.pos_weight is not None:
            more = np.asarray(self.pos_weight, prediction.dtype.numpy()) - 1
            negative = negative * (target * _constant(more, prediction) + 1)
        return _reduce((1 - target) * prediction + negative, self.reduction)


@dataclass(frozen=True)
class BCE(_ReducedLoss):
    """Binary cross entropy of probabilities, each on its own, as PyTorch's BCELoss; targets are 0 to 1.

    Logarithms are not below -100, and have no gradient there.
    """

    threshold: ClassVar[float] = 0.5  # of metrics
    reduction: str = "mean"

    def formula(self, prediction: Tensor, target: Tensor) -> Tensor:
        return _reduce((target - 1) * _log(1 - prediction) - target * _log(prediction), self.reduction)


@dataclass(frozen=True)
class KLDiv(_ReducedLoss):
    """The Kullback-Leibler divergence of the prediction, given as logarithms, from the target, given as probabilities.

    `log_target`: the target is given as logarithms too. `reduction="batchmean"` divides the sum by the first dimension.
    """

    reductions = ("batchmean", *_ReducedLoss.reductions)
    reduction: str = "batchmean"
    log_target: bool = False

    def formula(self, prediction: Tensor, target: Tensor) -> Tensor:
        if self.log_target:
            total = op.Exp(target) * (target - prediction)
        else:  # 0 · log 0 is 0
            nothing = target.equals(0)
            total = op.Where(nothing, 0, target * (op.Log(op.Where(nothing, 1, target)) - prediction))
        if self.reduction == "mean":
            return _reduce(total, "mean")
        total = op.ReduceSum(total, keepdims=0)
        if self.reduction == "batchmean":
            total = total / op.CastLike(op.Gather(op.Shape(prediction), 0, axis=0), prediction)
        return total


@dataclass(frozen=True)
class Custom(Loss):
    """A custom loss: `function` takes prediction and target as tensors and returns a scalar.

    It uses + - * / **, comparisons and `op.<Name>(…)` of `onnxgrad.rules` for any ONNX operator. The target has the
    type and shape of the prediction, unless `target_type` (of NumPy) and `target_shape` are given.
    """

    prediction: str
    function: Callable[[Tensor, Tensor], Tensor]
    target: str = "target"
    share: float = 1.0
    target_type: Any = None
    target_shape: tuple[Dim, ...] | None = None

    def target_like(self, prediction: Tensor) -> tuple[ir.DataType, Shape]:
        dtype = prediction.dtype if self.target_type is None else ir.DataType.from_numpy(np.dtype(self.target_type))
        return dtype, prediction.shape if self.target_shape is None else self.target_shape

    def formula(self, prediction: Tensor, target: Tensor) -> Tensor:
        return self.function(prediction, target)
