"""One side's turn on the clock; plain standard library, because peers run it in environments of their own."""

import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class Turn(NamedTuple):
    """What a turn gave: how many calls were timed, and how long they took together."""

    calls: int
    seconds: float


def take_turn(call: Callable[[], Any], seconds: float) -> Turn:
    """Times a batch of calls that fills about `seconds`; at least one call, whatever it takes.

    The first call is not timed: it finds the caches as another side left them. A call longer than the whole turn
    does not care about caches, so it is timed at once. Results are dropped within the time: giving memory back is
    part of the cost of a call that takes it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        start = time.perf_counter()
        call()
        first = time.perf_counter() - start
        if first >= seconds:
            return Turn(1, first)
        calls = max(1, round(seconds / first))
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return Turn(calls, time.perf_counter() - start)
    finally:
        if was_enabled:
            gc.enable()


def wait_until_idle(at_most: float = 0.2) -> None:
    """Returns once this process has stopped using the processor.

    Thread pools (OpenMP, OpenBLAS, onnxruntime) spin for up to 50 ms after their last work, which would be taken from
    whoever has the next turn.
    """
    nap, deadline = 0.002, time.perf_counter() + at_most
    while time.perf_counter() < deadline:
        before = time.process_time()
        time.sleep(nap)
        if time.process_time() - before < 0.2 * nap:
            return
