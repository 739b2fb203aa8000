"""Schedules: the factor of the learning rate at each update."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """`schedule(step)` is the factor of the learning rate after `step` updates, 0 before the first.

    The trainer only calls it: any function of that number will do.
    """

    def __call__(self, step: int) -> float:
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(Schedule):
    """A constant learning rate, after `warmup` steps in which it grows."""

    warmup: int = 0

    def __call__(self, step: int) -> float:
        return _warm(step, self.warmup)


@dataclass(frozen=True)
class Linear(Schedule):
    """Falls in a straight line to `final` of the rate at step `steps`, after growing for `warmup` steps."""

    steps: int
    warmup: int = 0
    final: float = 0.0

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return _warm(step, self.warmup)
        return self.final + (1 - self.final) * (1 - _progress(step, self.warmup, self.steps))


@dataclass(frozen=True)
class Cosine(Schedule):
    """Falls along a cosine to `final` of the rate at step `steps`, after growing for `warmup` steps."""

    steps: int
    warmup: int = 0
    final: float = 0.0

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return _warm(step, self.warmup)
        turn = math.cos(math.pi * _progress(step, self.warmup, self.steps))
        return self.final + (1 - self.final) * (1 + turn) / 2


@dataclass(frozen=True)
class Step(Schedule):
    """Multiplies the rate with `factor` after every `every` steps."""

    every: int
    factor: float = 0.1

    def __call__(self, step: int) -> float:
        return float(self.factor ** (step // self.every))


@dataclass(frozen=True)
class OneCycle(Schedule):
    """Up along a cosine from 1/`start` of the rate for `rise` of the steps, then down to 1/(`start`·`end`) of it.

    The learning rate of the optimizer is the highest one, PyTorch's max_lr.
    """

    steps: int
    rise: float = 0.3
    start: float = 25.0
    end: float = 1e4

    def __call__(self, step: int) -> float:
        top = self.rise * self.steps - 1
        step = min(step, self.steps - 1)
        if step <= top:
            return _between(1 / self.start, 1.0, step / top if top > 0 else 1.0)
        return _between(1.0, 1 / (self.start * self.end), (step - top) / (self.steps - 1 - top))


def _between(first: float, last: float, part: float) -> float:
    return last + (first - last) / 2 * (1 + math.cos(math.pi * part))


def _warm(step: int, warmup: int) -> float:
    return min(1.0, (step + 1) / (warmup + 1))


def _progress(step: int, warmup: int, steps: int) -> float:
    return min(1.0, max(0.0, (step - warmup) / max(1, steps - warmup)))
