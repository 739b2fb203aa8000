"""TargetChecker: whether the targets of a batch are such as its losses take, and what to do about others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrad.train.batches import Advice
from onnxgrad.train.losses import Loss


@dataclass(frozen=True)
class TargetChecker:
    """Checks the targets of a batch; with each loss and the shape of its prediction."""

    predicted: Sequence[tuple[Loss, Sequence[Any] | None]]

    def __call__(self, batch: Mapping[str, Any]) -> None:
        """Raises if a target is not a class."""
        for part, shape in self.predicted:
            target = batch.get(part.target)
            wrong = part.wrong_class(target, shape) if isinstance(target, np.ndarray) else None
            if wrong is not None:
                assert target is not None
                at, expected = wrong
                raise ValueError(
                    f"the batch's {part.target} has the class {target[at]} at {list(at)}, expected {expected}; "
                    f"{type(part).__name__}(…, ignore_index={target[at]}) leaves it out"
                )

    @property
    def advice(self) -> dict[str, Advice]:
        """What to do about targets that are wrong, by name."""
        return {part.target: part.advice(shape) for part, shape in self.predicted}
