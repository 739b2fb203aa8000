"""What a page shows of one example: its inputs, the truth, and what the model predicts in its place."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from onnxgrad.cli.reporting.example_loss import is_distribution
from onnxgrad.cli.reporting.names import Names
from onnxgrad.cli.reporting.picture import picture, pictures
from onnxgrad.tensor_types import Array
from onnxgrad.train.losses import BCE, NLL, BCEWithLogits, Loss
from onnxgrad.train.progress import figure

MOST_NUMBERS = 12  # of an array that are shown
MOST_TEXT = 600  # characters
BARS = 3  # of the classes with the highest probability
NOT_TOKENS = ("_mask", "type_ids", "position_ids")  # ends of names that exporters of language models give other inputs
Shown = dict[str, Any]


def described_input(name: str, array: Array, names: Names) -> Shown:
    """An input of one example: a picture, a text, or its first numbers."""
    shown: Shown = {"name": name, "shape": list(array.shape)}
    if (drawn := picture(array)) is not None:
        return {**shown, "picture": drawn}
    is_vector = array.dtype.kind in "iu" and array.ndim == 1
    if is_vector and not name.endswith(NOT_TOKENS) and (text := names.tokens.text(array.tolist())):
        return {**shown, "text": text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]} …"}
    return {**shown, "numbers": numbers(array)}


def numbers(array: Array) -> str:
    """The first numbers of an array."""
    flat = array.reshape(-1)
    words = [figure(float(x)) if array.dtype.kind not in "iub" else str(x) for x in flat[:MOST_NUMBERS]]
    return ", ".join(words) + (" …" if flat.size > MOST_NUMBERS else "")


def described_outcome(part: Loss, prediction: Array, target: Array, names: Names, of_sigmoid: bool) -> Shown:
    """What a loss compares for one example."""
    classes = class_scores(part, prediction[None], target[None])
    if classes is not None:
        scores, truth = classes[0][0], classes[1][0]
        if truth.ndim == 0:
            return {"of": part.prediction, **_of_class(part, scores, int(truth), names.of)}
        return {"of": part.prediction, **_of_positions(part, scores, truth, names)}
    if isinstance(part, (BCE, BCEWithLogits)):
        return {"of": part.prediction, **_of_labels(prediction, target, names, isinstance(part, BCE) or of_sigmoid)}
    return {"of": part.prediction, **_of_numbers(prediction, target)}


def class_scores(part: Loss, prediction: Array, target: Array) -> tuple[Array, Array] | None:
    """Predictions with the classes last and the classes that are right, of many examples; None if there are none."""
    axis = getattr(part, "axis", None)
    if axis is None or not -prediction.ndim <= axis < prediction.ndim:
        return None
    if getattr(part, "probabilities", False):
        target = target.argmax(axis)
    scores = np.moveaxis(prediction, axis, -1)
    return (scores, target) if target.shape == scores.shape[:-1] and target.dtype.kind in "iu" else None


def probabilities(part: Loss, scores: Array) -> Array:
    """Of the classes, which are last: scores may be probabilities or their logarithms already."""
    scores = scores.astype(np.float64)
    if is_distribution(scores, -1):
        return scores
    if isinstance(part, NLL):
        return np.exp(scores) if part.log_prediction else scores
    grown = np.exp(scores - scores.max(-1, keepdims=True))
    found: Array = grown / grown.sum(-1, keepdims=True)
    return found


def _of_class(part: Loss, scores: Array, truth: int, word: Callable[[int], str]) -> Shown:
    chances = probabilities(part, scores)
    best = np.argsort(-chances, kind="stable")[:BARS].tolist()
    shown = best if truth in best else [*best[: BARS - 1], truth]
    bars = [[word(k), _share(chances[k]), k == truth] for k in shown]
    return {"truth": word(truth), "predicted": word(best[0]), "bars": bars}


def _share(chance: float) -> float | None:
    return round(float(chance), 4) if np.isfinite(chance) else None


def _of_positions(part: Loss, scores: Array, truth: Array, names: Names) -> Shown:
    """Classes of tokens or pixels: how many are wrong, and the one whose truth is least probable."""
    flat, right = scores.reshape(-1, scores.shape[-1]), truth.reshape(-1)
    counted = np.flatnonzero(right != getattr(part, "ignore_index", None)) if right.size else right
    if not counted.size:
        return {"note": "no target counts"}
    chances = probabilities(part, flat[counted])
    predicted = flat[counted].argmax(-1)
    wrong = predicted != right[counted]
    worst = int(np.argmin(chances[np.arange(len(counted)), right[counted]]))
    at = [int(k) for k in np.unravel_index(counted[worst], truth.shape)]
    word = functools.partial(names.of, in_sequence=True)
    shown = _of_class(part, flat[counted[worst]], int(right[counted[worst]]), word)
    shown["note"] = f"{int(wrong.sum())} of {len(counted)} wrong; worst at {at[0] if len(at) == 1 else at}"
    return {**shown, "pictures": pictures({"truth": truth, "predicted": scores.argmax(-1)})}


def _of_labels(prediction: Array, target: Array, names: Names, is_probability: bool) -> Shown:
    """Labels that are right or wrong on their own: those that are farthest from the truth come first."""
    given = prediction.astype(np.float64).reshape(-1)
    chances, right = given if is_probability else 1 / (1 + np.exp(-np.clip(given, -700, 700))), target.reshape(-1)
    worst = np.argsort(-np.abs(chances - right), kind="stable")[:BARS].tolist()
    if given.size == 1:
        return {
            "truth": figure_of(right[0]), "predicted": str(int(chances[0] > 0.5)),
            "bars": [["1", _share(chances[0]), bool(right[0] > 0.5)]],
        }  # fmt: skip
    wrong = int(((chances > 0.5) != (right > 0.5)).sum())
    return {
        "note": f"{wrong} of {given.size} wrong",
        "bars": [[names.of(k), _share(chances[k]), bool(right[k] > 0.5)] for k in worst],
    }


def figure_of(number: Any) -> str:
    """A number of an array, short."""
    return str(int(number)) if float(number).is_integer() else figure(float(number))


def _of_numbers(prediction: Array, target: Array) -> Shown:
    if drawn := pictures({"truth": target, "predicted": prediction}):
        return {"pictures": drawn}
    return {"truth": numbers(np.asarray(target)), "predicted": numbers(np.asarray(prediction))}


def inputs_of(batch: Mapping[str, Array], k: int, names: Sequence[str], meaning: Names) -> list[Shown]:
    """The inputs of one example of a batch."""
    return [described_input(name, np.asarray(batch[name])[k], meaning) for name in names]
