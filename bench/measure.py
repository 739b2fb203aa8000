"""What a call takes: sides run by turns, each call of each run is timed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from bench.peers import Side


@dataclass(frozen=True)
class Timing:
    """Milliseconds a call, over the calls of all runs: the median, the 10th and the 90th percentile, the best."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    best_ms: float
    calls: int


@dataclass(frozen=True)
class Effort:
    """How many runs each side has, and how long one is: at least so many seconds and so many calls."""

    runs: int
    seconds: float
    calls: int = 1
    slow_calls: int = 1  # instead of `calls`, where one call takes more than SLOW seconds

    def calls_of_run(self, seconds_per_call: float) -> int:
        least = self.slow_calls if seconds_per_call > SLOW else self.calls
        return max(least, round(self.seconds / seconds_per_call))


SLOW = 0.1
FULL = Effort(7, 0.25)
SHORTER = Effort(5, 0.1)  # for the types beside float32
QUICK = Effort(3, 0.03)  # to look at while working on a kernel


def time_sides(
    sides: Mapping[str, Side], effort: Effort, on_run: Callable[[float], None] = lambda share: None
) -> dict[str, Timing]:
    """Times every side; `on_run` is told what share of the work each run was.

    Sides alternate, so that a machine that slows down does so for all; each round starts with another side, so that
    none is always the one after the same neighbour.
    """
    names = list(sides)
    calls = {name: effort.calls_of_run(min(sides[name].run(2))) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(effort.runs):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            seconds[name] += sides[name].run(calls[name])
            on_run(1 / (effort.runs * len(names)))
    return {name: timing(found) for name, found in seconds.items()}


def timing(seconds: list[float]) -> Timing:
    """What the seconds of single calls come to."""
    p10, median, p90 = (float(q) * 1e3 for q in np.percentile(seconds, (10, 50, 90)))
    return Timing(median, p10, p90, min(seconds) * 1e3, len(seconds))
