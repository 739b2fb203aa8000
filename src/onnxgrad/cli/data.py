"""The data to train on: --data and --val, held-out examples, and class weights."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.cli.training import Options
from onnxgrad.graph.files import replaced
from onnxgrad.sources.read import read_source, settings_of, validation_beside
from onnxgrad.sources.request import Field, Settings
from onnxgrad.sources.source import Source, balanced_weights
from onnxgrad.tensor_types import Array
from onnxgrad.train.losses import Loss, Total, parts_of


def settings(options: Options) -> Settings:
    """How the options say that data is read."""
    columns: dict[str, list[str]] = {}
    for text in options.columns:
        name, equals, names = text.partition("=")
        if not (name and equals and names):
            raise ValueError(f"--columns {text!r} names no columns, expected an input and its columns as in x=a,b,c")
        columns[name] = names.split(",")
    size = None if options.image_size is None else _size(options.image_size)
    augment = options.augment.split(",") if options.augment else ()
    return settings_of("--data", columns, size, options.normalize, augment, options.tokenizer, options.length)


def _size(text: str) -> list[int]:
    """224, or 480x640 of height and width."""
    sides = text.lower().split("x")
    if not (1 <= len(sides) <= 2 and all(s.isdecimal() for s in sides)):
        raise ValueError(f"--image-size is {text!r}, expected pixels as in 224, or height and width as in 480x640")
    return [int(sides[0]), int(sides[-1])]


def validation_of(options: Options) -> str | None:
    """What to validate with: what --val names, or the folder val/ beside train/ in --data."""
    if options.val is not None:
        return options.val
    beside = validation_beside(options.data)
    return None if beside is None else str(beside)


def read_both(
    options: Options, fields: tuple[Field, ...], targets: Sequence[str]
) -> tuple[Source, Source | None, list[str]]:
    """The examples to train on and those to validate with, and remarks."""
    how, val = settings(options), validation_of(options)
    source = read_source(options.data, "--data", fields, how)
    remarks = list(source.remarks)
    if val is None:
        if options.stratify:
            raise ValueError("--stratify needs examples to hold out: give their share with --val")
        return source, None, remarks
    share = _share(val)
    if share is None:
        if options.stratify:
            raise ValueError(f"--stratify is for a share of the examples to hold out, but --val is {val!r}")
        if options.val is None:
            remarks.append(f"validating with {val}")
        return source, read_source(Path(val), "--val", fields, replace(how, augment=()), source.classes), remarks
    if not 0 < share < 1:
        raise ValueError(f"--val is {val}, expected a file or a share between 0 and 1 of the examples to hold out")
    stratify = _target_to_stratify(source, targets) if options.stratify else None
    try:
        return *source.split(share, options.seed, stratify), remarks
    except ValueError as error:
        raise ValueError(f"--{error}" if stratify and str(error).startswith("stratify") else f"--val {error}") from None


def _share(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _target_to_stratify(source: Source, targets: Sequence[str]) -> str:
    """The first target that has classes; any, for the sentence that says what it is instead."""
    if not targets:
        raise ValueError("--stratify needs a loss whose target is a class")
    columns = {name: source.column(name) for name in targets}
    found = (n for n, a in columns.items() if a is not None and a.dtype.kind in "iub" and a.ndim == 1)
    return next(found, targets[0])


def expect_classes(option: str, source: Source, loss: Total | str, classes: Mapping[str, Sequence[Any]]) -> None:
    """Raises if a target is not a class: that would stop a run late or, below 0, train it on other classes.

    `classes` are the shapes of outputs, as far as they are known.
    """
    for part, given in _targets(source, loss):
        wrong = part.wrong_class(given, classes.get(part.prediction))
        if wrong is not None:
            example, expected = wrong
            raise ValueError(
                f"{option}: {part.target!r} has the class {given[example]} in example {example[0]}, expected "
                f"{expected}; ignore-index={given[example]} leaves it out"
            )


def _targets(source: Source, loss: Total | str) -> Iterator[tuple[Loss, Array]]:
    """The parts of a loss whose targets are a column."""
    for part in () if isinstance(loss, str) else loss.parts:
        column = source.column(part.target)
        if column is not None:
            yield part, column


def balanced(source: Source, loss: Total | str, shapes: Mapping[str, Sequence[Any]]) -> Total | str:
    """The loss with weights of its classes, so that all count the same in these examples."""
    weights = {part: _weights(part, column, shapes.get(part.prediction)) for part, column in _targets(source, loss)}
    changed = {part: found for part, found in weights.items() if found}
    if not changed:
        raise ValueError("--class-weights needs a loss of classes whose target is a column of --data")
    assert isinstance(loss, Total)
    parts = [replace(part, **changed.get(part, {})) for part in parts_of(loss)]  # type: ignore[type-var]
    return parts[0] if len(parts) == 1 else Total(parts)


def _weights(part: Loss, labels: Array, shape: Sequence[Any] | None) -> dict[str, Any]:
    """The settings of a loss that weigh its classes; none if it has no classes, or weights already."""
    if getattr(part, "weights", ()) is None and labels.dtype.kind in "iu":
        dim = shape[part.axis] if shape is not None and part.axis < len(shape) else None  # type: ignore[attr-defined]
        ignored = getattr(part, "ignore_index", None)
        known = labels if ignored is None else labels[labels != ignored]
        return {"weights": tuple(balanced_weights(known, dim if isinstance(dim, int) else None))}
    if getattr(part, "pos_weight", ()) is None:
        positive = np.count_nonzero(labels > 0.5)
        return {"pos_weight": (labels.size - positive) / positive} if positive else {}
    return {}


def write_classes(path: Path, classes: Mapping[str, Sequence[str]]) -> None:
    """The names of the classes by target, in the order of their numbers."""
    with replaced(path) as draft:
        draft.write_text(json.dumps({n: list(c) for n, c in classes.items()}, indent=1, ensure_ascii=False) + "\n")


def expect_columns(trained: str, needed: Sequence[str]) -> None:
    """Raises if neither the model nor its loss has inputs."""
    if not needed:
        raise ValueError(f"{trained!r} cannot be trained: neither the model nor its loss has inputs")
