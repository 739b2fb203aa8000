"""How ranks share a batch: which examples are whose, and what the loss of each part counts in that of the whole.

The loss of a batch is the sum of those of its parts, each times a weight: the share of the examples for a mean over
them, 1 for a sum, and one over the targets that count, of all ranks, where a loss leaves targets out or weighs them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxgrad.interop import is_foreign, to_numpy
from onnxgrad.tensor_types import Array
from onnxgrad.train.batches import Batch, LocalBatch, part_of
from onnxgrad.train.distributed.ranks import Ranks
from onnxgrad.train.losses import Loss, Total


def examples_of(batch: Batch, targets: Sequence[str]) -> int:
    """How many are in a batch: as many as in its target, or in its first input with a dimension at all."""
    ordered = [*(batch[name] for name in targets if name in batch), *batch.values()]
    shapes = (np.shape(x) for x in ordered)
    return next((int(shape[0]) for shape in shapes if shape), 1)


class Shares:
    """The part of a batch that is this rank's; `weights` and `place` are bound to the step's graph."""

    def __init__(self, ranks: Ranks, loss: Total | str) -> None:
        self._ranks = ranks
        self._parts: Sequence[Loss] = () if isinstance(loss, str) else loss.parts
        self._targets = [part.target for part in self._parts]
        self.weights = np.zeros(max(1, len(self._parts)), np.float64)
        self.place = np.zeros(3, np.int64)

    def cut(self, batch: Any, dims: Mapping[str, Sequence[Any]]) -> LocalBatch:
        """This rank's examples of a batch that all have; `dims` are those that the model declares for its inputs."""
        if isinstance(batch, LocalBatch):
            return batch
        if not isinstance(batch, Mapping):
            raise TypeError(f"a batch is a {type(batch).__name__}, expected a dict of arrays by input name")
        examples = examples_of(batch, self._targets)
        mine = part_of(examples, self._ranks.rank, self._ranks.size)
        here = mine if mine.start < mine.stop else slice(0, 1)
        found, has_free = {}, False
        for name, array in batch.items():
            shape, declared = np.shape(array), dims.get(name, ())
            is_free = bool(shape) and shape[0] == examples and not (declared and isinstance(declared[0], int))
            has_free |= is_free
            found[name] = array[here] if is_free else array
        if not has_free and self._ranks.size > 1:
            raise ValueError(
                f"the model takes batches of a fixed size, so that {self._ranks.size} ranks cannot share one: give the "
                "first dimension of its inputs a name in place of a number"
            )
        return LocalBatch(found, mine.stop - mine.start)

    def agree(self, batch: LocalBatch | None, arrays: Mapping[str, Any], error: Exception | None) -> None:
        """Sets weights and place, once all ranks have told what they have; an error of some is raised by all."""
        examples, counts = 0, [0.0] * len(self._parts)
        if batch is not None and error is None:
            examples = examples_of(batch, self._targets) if batch.examples is None else batch.examples
            try:
                counts = [_count(part, arrays) if examples else 0.0 for part in self._parts]
            except Exception as problem:
                error = problem
        rows = self._ranks.share([examples, *counts], error)
        total, before = rows[:, 0].sum(), rows[: self._ranks.rank, 0].sum()
        self.place[:] = before, max(1, examples), examples > 0
        if not examples:
            self.weights[:] = 0
            return
        self.weights[:] = examples / total
        for k, part in enumerate(self._parts):
            if part.is_sum:
                self.weights[k] = 1
            elif part.as_part().is_sum:
                with np.errstate(divide="ignore"):  # if no target counts at all, the loss is no number, as alone
                    self.weights[k] = np.float64(1) / rows[:, 1 + k].sum()


def _count(part: Loss, arrays: Mapping[str, Any]) -> float:
    target = arrays.get(part.target)
    if target is None:
        return 0.0
    as_array: Array = to_numpy(target) if is_foreign(target) else np.asarray(target)
    return part.count(as_array) or 0.0
