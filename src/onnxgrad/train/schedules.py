"""Schedules: the factor of the learning rate at each update."""

import math
from dataclasses import dataclass
from typing import Any

from onnxgrad.train.arithmetic import choose, cosine, floor, least, most


@dataclass(frozen=True)
class Schedule:
    """`schedule(step)` is the factor of the learning rate after `step` updates, 0 before the first.

    The trainer only calls it: any function of that number will do.
    """

    def __post_init__(self) -> None:
        for name, smallest in (("steps", 1), ("every", 1), ("warmup", 0)):
            number = getattr(self, name, smallest)
            if not (isinstance(number, (int, float)) and number >= smallest):
                raise ValueError(
                    f"{type(self).__name__}: {name} is {number!r}, expected a number of updates, at least {smallest}"
                )

    def __call__(self, step: int) -> float:
        return float(self.factor_at(step))

    def factor_at(self, step: Any) -> Any:
        """The factor, by a formula for numbers and for float64 values of a graph."""
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(Schedule):
    """A constant learning rate, after `warmup` steps in which it grows."""

    warmup: int = 0

    def factor_at(self, step: Any) -> Any:
        return _warm(step, self.warmup)


@dataclass(frozen=True)
class Linear(Schedule):
    """Falls in a straight line to `final` of the rate at step `steps`, after growing for `warmup` steps."""

    steps: int
    warmup: int = 0
    final: float = 0.0

    def factor_at(self, step: Any) -> Any:
        falling = self.final + (1 - self.final) * (1 - _progress(step, self.warmup, self.steps))
        return choose(step < self.warmup, _warm(step, self.warmup), falling)


@dataclass(frozen=True)
class Cosine(Schedule):
    """Falls along a cosine to `final` of the rate at step `steps`, after growing for `warmup` steps."""

    steps: int
    warmup: int = 0
    final: float = 0.0

    def factor_at(self, step: Any) -> Any:
        turn = cosine(math.pi * _progress(step, self.warmup, self.steps))
        falling = self.final + (1 - self.final) * (1 + turn) / 2
        return choose(step < self.warmup, _warm(step, self.warmup), falling)


@dataclass(frozen=True)
class Step(Schedule):
    """Multiplies the rate by `factor` after every `every` steps."""

    every: int
    factor: float = 0.1

    def factor_at(self, step: Any) -> Any:
        return self.factor ** floor(step / self.every)


@dataclass(frozen=True)
class OneCycle(Schedule):
    """Rises along a cosine from 1/`start` of the rate for `rise` of the steps, then falls to 1/(`start`·`end`) of it.

    The learning rate of the optimizer is the highest one, PyTorch's max_lr.
    """

    steps: int
    rise: float = 0.3
    start: float = 25.0
    end: float = 1e4

    def factor_at(self, step: Any) -> Any:
        top = self.rise * self.steps - 1
        step = least(step, self.steps - 1)
        down = self.steps - 1 - top
        rising = _between(1 / self.start, 1.0, step / top) if top > 0 else 1.0
        falling = _between(1.0, 1 / (self.start * self.end), (step - top) / down) if down > 0 else rising
        return choose(step <= top, rising, falling)


def _between(first: float, last: float, part: Any) -> Any:
    return last + (first - last) / 2 * (1 + cosine(math.pi * part))


def _warm(step: Any, warmup: int) -> Any:
    return least((step + 1) / (warmup + 1), 1.0)


def _progress(step: Any, warmup: int, steps: int) -> Any:
    return least(most((step - warmup) / max(1, steps - warmup), 0.0), 1.0)
