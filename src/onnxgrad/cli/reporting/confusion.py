"""The confusion matrix of a classifier: which classes are taken for which, counted batch by batch."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from onnxgrad.cli.reporting.describe import class_scores
from onnxgrad.cli.reporting.names import Names
from onnxgrad.tensor_types import Array
from onnxgrad.train.losses import BCE, BCEWithLogits, Loss

MOST_CLASSES = 40  # whose matrix is shown; of more the pairs that are confused most
MOST_PAIRS = 20


class Confusion:
    """Counts pairs (class, class predicted) for one loss."""

    def __init__(self, part: Loss, of_sigmoid: bool) -> None:
        self.part, self._is_probability = part, of_sigmoid or isinstance(part, BCE)
        self.classes, self._in_sequence = 0, False
        self.pairs: Counter[tuple[int, int]] = Counter()

    def add(self, prediction: Array, target: Array) -> None:
        """Counts a batch; what is not about classes is not counted."""
        found = class_scores(self.part, prediction, target)
        if found is not None:
            scores, truth = found
            self._in_sequence = truth.ndim > 1
            self._count(scores.shape[-1], truth, scores.argmax(-1))
        elif isinstance(self.part, (BCE, BCEWithLogits)) and prediction.size == len(prediction):
            self._count(2, target > 0.5, prediction > (0.5 if self._is_probability else 0.0))

    def _count(self, classes: int, truth: Array, predicted: Array) -> None:
        self.classes = max(self.classes, classes)
        right, chosen = truth.reshape(-1).astype(np.int64), predicted.reshape(-1).astype(np.int64)
        counted = (right >= 0) & (right < classes) & (right != getattr(self.part, "ignore_index", None))
        codes, counts = np.unique(right[counted] * classes + chosen[counted], return_counts=True)
        for code, count in zip(codes.tolist(), counts.tolist(), strict=True):
            self.pairs[divmod(code, classes)] += count

    def take_all(self, of_all: Iterable[tuple[int, Counter[tuple[int, int]]]]) -> None:
        """Takes the counts of all processes in place of its own."""
        counted = list(of_all)
        self.classes = max(classes for classes, _ in counted)
        self.pairs = sum((pairs for _, pairs in counted), Counter())

    def shown(self, names: Names) -> dict[str, Any] | None:
        """What the page has of it: a matrix, or of many classes those pairs that are confused most."""
        total = sum(self.pairs.values())
        if not total:
            return None
        right = sum(count for (a, b), count in self.pairs.items() if a == b)
        facts = {"of": self.part.prediction, "right": right, "total": total}
        if self.classes <= MOST_CLASSES:
            matrix = [[self.pairs[a, b] for b in range(self.classes)] for a in range(self.classes)]
            return {**facts, "names": [names.of(k, self._in_sequence) for k in range(self.classes)], "matrix": matrix}
        wrong = Counter({pair: count for pair, count in self.pairs.items() if pair[0] != pair[1]})
        pairs = [
            [names.of(a, self._in_sequence), names.of(b, self._in_sequence), count]
            for (a, b), count in wrong.most_common(MOST_PAIRS)
        ]
        return {**facts, "classes": self.classes, "pairs": pairs}
