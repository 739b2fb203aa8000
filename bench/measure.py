"""The clock: sides take turns, round after round, and the best round counts."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.peers import Side

ROUNDS, FEWEST_ROUNDS = 15, 7
# A round of all sides that takes longer than this is repeated FEWEST_ROUNDS times only.
LONG_ROUND_SECONDS = 2.0


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call: in the best round, and in the middle one."""

    best_ms: float
    median_ms: float


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int
    fewest_rounds: int
    seconds_per_side: float


FULL = Effort(ROUNDS, FEWEST_ROUNDS, 1.2)
SHORTER = Effort(ROUNDS, FEWEST_ROUNDS, 0.6)  # where no bar waits
QUICK = Effort(3, 2, 0.1)  # to look at while working on a kernel


def time_sides(
    sides: Mapping[str, Side], effort: Effort, on_turn: Callable[[float], None] = lambda share: None
) -> dict[str, Timing]:
    """Times every side; `on_turn` is told what share of the work each turn was.

    Sides alternate, so that a machine that slows down does so for all; each round starts with another side, so that
    none is always the one after the same neighbour.
    """
    names = list(sides)
    seconds = effort.seconds_per_side / effort.rounds
    estimates = [sides[name].turn(seconds / 4) for name in names]
    round_seconds = sum(max(seconds, turn.seconds / turn.calls) for turn in estimates)
    rounds = effort.rounds if round_seconds < LONG_ROUND_SECONDS else effort.fewest_rounds
    per_call: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            turn = sides[name].turn(seconds)
            per_call[name].append(turn.seconds / turn.calls * 1e3)
            on_turn(1 / (rounds * len(names)))
    return {name: Timing(min(times), statistics.median(times)) for name, times in per_call.items()}
