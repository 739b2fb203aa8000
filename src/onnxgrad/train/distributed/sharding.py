"""BatchSlicer: which examples of a batch are this rank's, and what weight the loss of each rank's slice has.

The loss of a batch is a weighted sum of the losses of its slices. The weight is the slice's fraction of the examples if
the loss is a mean over them, 1 if it is a sum, and one over the number of targets that count, on all ranks, where a
loss ignores targets or weighs them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxgrad.interop import is_foreign, to_numpy
from onnxgrad.tensor_types import Array
from onnxgrad.train.batches import Batch, LocalBatch, slice_of
from onnxgrad.train.distributed.ranks import Ranks
from onnxgrad.train.losses import Loss, Total


def examples_of(batch: Batch, targets: Sequence[str]) -> int:
    """The number of examples in a batch: in its target, or else in its first input that has a dimension."""
    ordered = [*(batch[name] for name in targets if name in batch), *batch.values()]
    shapes = (np.shape(x) for x in ordered)
    return next((int(shape[0]) for shape in shapes if shape), 1)


class BatchSlicer:
    """Slices batches for this rank; `weights` and `place` are bound to the step's graph (passes/batch_slice.py)."""

    def __init__(self, ranks: Ranks, loss: Total | str) -> None:
        self._ranks = ranks
        self._losses: Sequence[Loss] = () if isinstance(loss, str) else loss.parts
        self._targets = [loss.target for loss in self._losses]
        self.weights = np.zeros(max(1, len(self._losses)), np.float64)
        self.place = np.zeros(3, np.int64)

    def slice_batch(self, batch: Any, dims: Mapping[str, Sequence[Any]]) -> LocalBatch:
        """This rank's examples of a batch that all ranks have; `dims` are the declared dimensions of the inputs."""
        if isinstance(batch, LocalBatch):
            return batch
        if not isinstance(batch, Mapping):
            raise TypeError(f"a batch is a {type(batch).__name__}, expected a dict of arrays by input name")
        examples = examples_of(batch, self._targets)
        mine = slice_of(examples, self._ranks.rank, self._ranks.size)
        here = mine if mine.start < mine.stop else slice(0, 1)
        arrays, has_free = {}, False
        for name, array in batch.items():
            shape, declared = np.shape(array), dims.get(name, ())
            is_free = bool(shape) and shape[0] == examples and not (declared and isinstance(declared[0], int))
            has_free |= is_free
            arrays[name] = array[here] if is_free else array
        if not has_free and self._ranks.size > 1:
            raise ValueError(
                f"the model takes batches of a fixed size, so that {self._ranks.size} ranks cannot split one: give the "
                "first dimension of its inputs a name in place of a number"
            )
        return LocalBatch(arrays, mine.stop - mine.start)

    def agree(self, batch: LocalBatch | None, arrays: Mapping[str, Any], error: Exception | None) -> None:
        """Sets weights and place once every rank knows the counts of all; an error of one rank is raised by all."""
        examples, counts = 0, [0.0] * len(self._losses)
        if batch is not None and error is None:
            examples = examples_of(batch, self._targets) if batch.examples is None else batch.examples
            try:
                counts = [_count(loss, arrays) if examples else 0.0 for loss in self._losses]
            except Exception as problem:
                error = problem
        rows = self._ranks.all_gather_numbers([examples, *counts], error)
        total, before = rows[:, 0].sum(), rows[: self._ranks.rank, 0].sum()
        self.place[:] = before, max(1, examples), examples > 0
        if not examples:
            self.weights[:] = 0
            return
        self.weights[:] = examples / total
        for k, loss in enumerate(self._losses):
            if loss.is_sum:
                self.weights[k] = 1
            elif loss.as_part().is_sum:
                with np.errstate(divide="ignore"):  # if no target counts, the loss is NaN, as in a single process
                    self.weights[k] = np.float64(1) / rows[:, 1 + k].sum()


def _count(loss: Loss, arrays: Mapping[str, Any]) -> float:
    target = arrays.get(loss.target)
    if target is None:
        return 0.0
    as_array: Array = to_numpy(target) if is_foreign(target) else np.asarray(target)
    return loss.count(as_array) or 0.0
