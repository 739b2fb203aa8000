"""find_lr(): steps with increasing learning rates, to find where the loss falls fastest."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxgrad.train.batches import Batches
from onnxgrad.train.distributed.ranks import on_every_rank
from onnxgrad.train.fitting import Position, TrainingStoppedError, rest_of_epoch
from onnxgrad.train.schedules import Schedule

if TYPE_CHECKING:
    from onnxgrad.train.trainer import Trainer

WIDTH = 4.0  # of the smoothing, in updates: losses of single batches jump
SMOOTHING = 0.9  # of what decides about the end, which knows of no later losses
TOO_HIGH = 4.0  # times the least loss so far: nothing is to be seen at higher rates
FLAT = 1e-6  # of the loss: a change that is rounding


@dataclass(frozen=True)
class LearningRates:
    """The learning rates that find_lr() tried, and the loss at each of them: that of a batch, before its update."""

    rates: list[float]
    losses: list[float]

    @property
    def smoothed(self) -> list[float]:
        """The losses, each averaged with its neighbours."""
        at = np.arange(len(self.losses))
        weights = np.exp(-0.5 * ((at[:, None] - at) / WIDTH) ** 2)
        found: list[float] = (weights @ np.array(self.losses) / weights.sum(1)).tolist()
        return found

    @property
    def suggestion(self) -> float | None:
        """The rate at which the smoothed loss falls fastest; None if it does not fall."""
        smoothed = self.smoothed
        least = int(np.argmin(smoothed)) + 1 if smoothed else 0
        if least < 3:
            return None
        slopes = np.gradient(smoothed[:least], np.log(self.rates[:least]))
        steepest = int(slopes.argmin())
        return self.rates[steepest] if slopes[steepest] < -FLAT * abs(smoothed[0]) else None


@dataclass(frozen=True)
class _Rising(Schedule):
    """A schedule that goes from rate to rate, of an optimizer whose own is `lr`, from the update `first` on."""

    rates: Sequence[float]
    lr: float
    first: int

    def __call__(self, step: int) -> float:
        return self.rates[min(step - self.first, len(self.rates) - 1)] / self.lr


def expect_range(lowest: float, highest: float, steps: int, lr: float) -> None:
    """Raises one sentence unless learning rates can be tried."""
    if not 0 < lowest < highest < math.inf:
        raise ValueError(f"find_lr: lowest is {lowest!r} and highest {highest!r}, expected 0 < lowest < highest")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 5:
        raise ValueError(f"find_lr: steps is {steps!r}, expected a number of at least 5")
    if not lr:
        raise ValueError("find_lr: the optimizer's lr is 0, which no schedule can raise: give it another value")


def find_lr(
    trainer: "Trainer", batches: Iterable[Mapping[str, Any]], lowest: float, highest: float, steps: int
) -> LearningRates:
    """Trains on the batches, again and again if they are few; the caller restores what that changes."""
    rates = [lowest * (highest / lowest) ** (k / (steps - 1)) for k in range(steps)]
    trainer.schedule = _Rising(rates, trainer.optimizer.lr, trainer.steps)
    losses: list[float] = []
    mean, least = 0.0, math.inf
    of_update: list[float] = []
    for batch in itertools.islice(_again_and_again(trainer, batches), 4 * steps * trainer.accumulate):
        before = trainer.steps
        try:
            of_update.append(float(trainer.step(batch)))
        except TrainingStoppedError:
            if not losses:  # no rate is to blame
                raise
            break
        if trainer.steps > before:
            losses.append(sum(of_update) / len(of_update))
            of_update = []
            mean = SMOOTHING * mean + (1 - SMOOTHING) * losses[-1]
            smoothed = mean / (1 - SMOOTHING ** len(losses))
            least = min(least, smoothed)
            if len(losses) == steps or smoothed > least + (TOO_HIGH - 1) * abs(least):
                break
    return LearningRates(rates[: len(losses)], losses)


def _again_and_again(trainer: "Trainer", batches: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    while True:
        some = False
        for batch in trainer.ranks.each(rest_of_epoch(batches, Position(), trainer.ranks)):
            if not trainer.skips(batch):
                some = True
                yield batch
        if not some:
            if isinstance(batches, Iterator):
                return
            raise on_every_rank(ValueError("find_lr: there are no batches"))


def epoch_of(batches: Any) -> int | None:
    """How many epochs of Batches have begun; None of others, which have no such number."""
    return batches.epoch if isinstance(batches, Batches) else None
