"""Source: examples by index, from any kind of data."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxgrad.tensor_types import Array

HELD_OUT = 1  # sets the choice of examples to hold out apart from other uses of the seed


class Source(ABC):
    """Examples by index, from which `Batches` makes batches. A custom source implements `__len__` and `take`.

    `classes` has the class names of columns that were text, `remarks` sentences about how the data was read.
    """

    classes: Mapping[str, Sequence[str]] = {}
    remarks: Sequence[str] = ()
    rows: Array | None = None  # of a split, what numbers its examples had before
    is_ready = False  # whether all arrays are in memory, so that worker processes would have nothing to do

    @abstractmethod
    def __len__(self) -> int:
        """The number of examples."""

    @abstractmethod
    def take(self, chosen: Array, seed: Sequence[int] = ()) -> dict[str, Array]:
        """The batch of the chosen examples: an array for every input, with an example for each number in `chosen`.

        What is random in an example depends on its number and on `seed`, which differs from epoch to epoch, alone.
        """

    def column(self, name: str) -> Array | None:
        """One column of all examples, if there is such an array; batches may have others."""
        return None

    def plain(self) -> "Source":
        """The same examples, without augmentation: what to validate with."""
        return self

    def subset(self, chosen: Array) -> "Source":
        """Some of the examples, under numbers of their own."""
        return Subset(self, chosen)

    def split(self, share: float, seed: int = 0, stratify: str | None = None) -> tuple["Source", "Source"]:
        """Examples to train on, and others to validate with, chosen by the seed: `share` of them.

        With `stratify`, the name of a target, both have the same shares of its classes.
        """
        count = len(self)
        aside = round(count * share)
        if not 0 < aside < count:
            raise ValueError(f"{share:g} of {count} examples is {aside}, expected at least one, and one to train on")
        order = np.random.default_rng([seed, HELD_OUT]).permutation(count)
        labels = np.zeros(count, np.int64) if stratify is None else self._classes_of(stratify)[order]
        held_out = _evenly(labels, aside)
        trained, aside_rows = np.sort(order[~held_out]), np.sort(order[held_out])
        validated = self.subset(aside_rows).plain()
        validated.rows = aside_rows
        return self.subset(trained), validated

    def _classes_of(self, name: str) -> Array:
        labels = self.column(name)
        if labels is None or labels.ndim != 1 or labels.dtype.kind not in "iub":
            found = "is not a column" if labels is None else f"holds {labels.dtype} of shape {list(labels.shape)}"
            raise ValueError(f"stratify: {name!r} {found}, expected one class number for each example")
        return labels


class Subset(Source):
    """Some of the examples of another source, which are read where they are."""

    def __init__(self, source: Source, chosen: Array) -> None:
        self._source, self._chosen = source, chosen
        self.classes, self.is_ready = source.classes, source.is_ready

    def __len__(self) -> int:
        return len(self._chosen)

    def take(self, chosen: Array, seed: Sequence[int] = ()) -> dict[str, Array]:
        return self._source.take(self._chosen[chosen], seed)

    def column(self, name: str) -> Array | None:
        whole = self._source.column(name)
        return None if whole is None else whole[self._chosen]

    def plain(self) -> Source:
        return Subset(self._source.plain(), self._chosen)


class Arrays(Source):
    """Arrays in memory, or mapped from files, with the examples along the first dimension."""

    def __init__(
        self, arrays: Mapping[str, Array], classes: Mapping[str, Sequence[str]] | None = None,
        remarks: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.arrays, self.classes, self.remarks = dict(arrays), dict(classes or {}), list(remarks)
        self._count = len(next(iter(self.arrays.values())))

    is_ready = True

    def __len__(self) -> int:
        return self._count

    def take(self, chosen: Array, seed: Sequence[int] = ()) -> dict[str, Array]:
        return {name: a[chosen] for name, a in self.arrays.items()}

    def column(self, name: str) -> Array | None:
        return self.arrays.get(name)

    def subset(self, chosen: Array) -> Source:
        return Arrays(self.take(chosen), self.classes)


def balanced_weights(labels: Array, classes: int | None = None) -> list[float]:
    """Returns a weight for each class that compensates for its frequency, as "balanced" in scikit-learn.

    `labels` are the class numbers of all examples; those below 0 are ignored. A class without examples has weight 1.
    """
    counts = np.bincount(labels[labels >= 0].ravel(), minlength=classes or 0)
    there = np.count_nonzero(counts)
    weights = np.divide(counts.sum(), there * counts, out=np.ones(len(counts)), where=counts > 0)
    return [float(w) for w in weights]


def _evenly(labels: Array, aside: int) -> Any:
    """Which of the shuffled examples are held out: of every class its share, rounded so that all add up to `aside`."""
    classes, of_class, counts = np.unique(labels, return_inverse=True, return_counts=True)
    exact = counts * (aside / len(labels))
    each = np.floor(exact).astype(np.int64)
    most = np.argsort(each - exact, kind="stable")[: aside - each.sum()]  # the largest remainders
    each[most] += 1
    held_out = np.zeros(len(labels), bool)
    for k in range(len(classes)):
        held_out[np.flatnonzero(of_class == k)[: each[k]]] = True
    return held_out
