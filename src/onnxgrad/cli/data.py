"""The data to train on: files whose columns are the inputs of model and loss, and examples held out of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.graph.suggest import listed, suggestion
from onnxgrad.tensor_types import Array
from onnxgrad.train.losses import Total

HELD_OUT = 1  # sets the choice of examples to hold out apart from other uses of the seed
Columns = dict[str, Array]


def read_columns(option: str, path: Path, needed: Sequence[str]) -> tuple[Columns, list[str]]:
    """The columns of a file that are needed, and the names of the others."""
    from onnxgrad.train.batches import read_arrays

    columns = read_arrays(path, option)
    for name in needed:
        if name not in columns:
            raise ValueError(
                f"{option}: {str(path)!r} lacks {name!r}, an input of model or loss{suggestion(name, columns)}"
            )
    if not len(columns[needed[0]]):
        raise ValueError(f"{option}: {str(path)!r} has no examples")
    return {name: columns[name] for name in needed}, [name for name in columns if name not in needed]


def hold_out(columns: Columns, share: float, seed: int) -> tuple[Columns, Columns]:
    """Examples to train on, and others, chosen by the seed, to validate with."""
    count = len(next(iter(columns.values())))
    aside = round(count * share)
    if not 0 < aside < count:
        raise ValueError(f"--val {share:g} of {count} examples is {aside}, expected at least one, and one to train on")
    order = np.random.default_rng([seed, HELD_OUT]).permutation(count)
    chosen, rest = np.sort(order[:aside]), np.sort(order[aside:])
    return {n: a[rest] for n, a in columns.items()}, {n: a[chosen] for n, a in columns.items()}


def validation(text: str, columns: Columns, seed: int) -> tuple[Columns, Columns]:
    """What --val asks for: a share of the examples, or a file. Gives what is left to train on, and what to validate."""
    try:
        share = float(text)
    except ValueError:
        found, _ = read_columns("--val", Path(text), list(columns))
        return columns, found
    if not 0 < share < 1:
        raise ValueError(f"--val is {text}, expected a file or a share between 0 and 1 of the examples to hold out")
    return hold_out(columns, share, seed)


def expect_classes(option: str, columns: Columns, loss: Total | str, classes: Mapping[str, Sequence[Any]]) -> None:
    """Raises if a target is not a class: that would stop a run late or, below 0, train it on other classes.

    `classes` are the shapes of outputs, as far as they are known.
    """
    for part in () if isinstance(loss, str) else loss.parts:
        if part.target not in columns:
            continue
        given = columns[part.target]
        wrong = part.wrong_class(given, classes.get(part.prediction))
        if wrong is not None:
            example, expected = wrong
            raise ValueError(
                f"{option}: {part.target!r} has the class {given[example]} in example {example[0]}, expected "
                f"{expected}; ignore-index={given[example]} leaves it out"
            )


def expect_columns(trained: str, needed: Sequence[str]) -> None:
    """Raises if neither the model nor its loss has inputs."""
    if not needed:
        raise ValueError(f"{trained!r} cannot be trained: neither the model nor its loss has inputs")


def unused(path: Path, names: Sequence[str]) -> str:
    """A remark on columns that are not used."""
    return f"{path.name}: not used: {listed(names)}"
