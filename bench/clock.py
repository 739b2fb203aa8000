"""The clock: a run of calls on end, each timed; standard library only, because peers have their own environments."""

import time
from collections.abc import Callable
from typing import Any


def timed(call: Callable[[], Any], calls: int) -> list[float]:
    """Seconds of each of so many calls on end, with what giving back the memory of its result takes."""
    found = []
    start = time.perf_counter()
    for _ in range(calls):
        call()
        end = time.perf_counter()
        found.append(end - start)
        start = end
    return found


def wait_until_idle(at_most: float = 0.2) -> None:
    """Returns once this process has stopped using the processor.

    Thread pools (OpenMP, OpenBLAS, onnxruntime) spin for up to 50 ms after their last work, which would be taken from
    whoever runs next.
    """
    nap, deadline = 0.002, time.perf_counter() + at_most
    while time.perf_counter() < deadline:
        before = time.process_time()
        time.sleep(nap)
        if time.process_time() - before < 0.2 * nap:
            return
