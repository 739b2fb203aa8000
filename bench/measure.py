"""The clock: sides take turns, round after round, and the best round counts."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.peers import Side

ROUNDS = 21
# A side whose one call takes longer than this sits out four rounds of five, so that the others get all of theirs.
SLOW_CALL_SECONDS, SITS_OUT = 1.0, 5


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call: in the best round, and in the middle one."""

    best_ms: float
    median_ms: float


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int
    seconds_per_side: float


FULL = Effort(ROUNDS, 1.5)
SHORTER = Effort(11, 0.5)  # where no bar waits
QUICK = Effort(3, 0.1)  # to look at while working on a kernel


def time_sides(
    sides: Mapping[str, Side], effort: Effort, on_turn: Callable[[float], None] = lambda share: None
) -> dict[str, Timing]:
    """Times every side; `on_turn` is told what share of the work each turn was.

    Sides alternate, so that a machine that slows down does so for all; each round starts with another side, so that
    none is always the one after the same neighbour.
    """
    names = list(sides)
    seconds = effort.seconds_per_side / effort.rounds
    estimates = {name: sides[name].turn(seconds / 4) for name in names}
    slow = {name for name, turn in estimates.items() if turn.seconds / turn.calls > SLOW_CALL_SECONDS}
    per_call: dict[str, list[float]] = {name: [] for name in names}
    for number in range(effort.rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if name not in slow or number % SITS_OUT == 0:
                turn = sides[name].turn(seconds)
                per_call[name].append(turn.seconds / turn.calls * 1e3)
            on_turn(1 / (effort.rounds * len(names)))
    return {name: Timing(min(times), statistics.median(times)) for name, times in per_call.items()}
