"""The process that makes the calls, and may die of them: what it is doing is in memory that it shares."""

import contextlib
import faulthandler
import json
import mmap
import os
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from tests.fuzz.calls import draw_call, operators
from tests.fuzz.direct import FindingError, try_call
from tests.fuzz.guarded import NoRoomError

from onnxgrad.cpu.core import memory

SESSIONS = 0.15  # of the seeds are models in sessions, each of which runs several times
REPORT = 100  # seeds after which the numbers of calls are told
TOLD = os.fdopen(os.dup(1), "w")  # to the parent
MEMORY = 6 << 30  # bytes of addresses beyond those in use; what needs more gets a MemoryError


def choose(seed: int, pattern: str) -> tuple[Any, bool]:
    """The operator of a seed, and whether it runs in a session."""
    rng = np.random.default_rng([seed, 0])
    of_session = rng.random() < SESSIONS
    found = operators(pattern)
    return found[int(rng.integers(len(found)))], of_session


def run_seed(seed: int, pattern: str, counts: Counter[str], before_run: Any = lambda: None) -> None:
    """What a number stands for; raises FindingError."""
    op, of_session = choose(seed, pattern)
    if of_session:
        from tests.fuzz.in_session import run_session

        counts[f"{op.name} runs"] += run_session(op, seed, before_run)
        return
    call = draw_call(op, seed)
    counts[f"{op.name} calls"] += 1
    try:
        if not isinstance(try_call(call, seed), Exception):
            counts[f"{op.name} accepted"] += 1
    except FindingError as finding:
        raise FindingError(f"{call}: {finding}") from finding


def main(first: int, end: int, seconds: float, pattern: str, status: str) -> None:
    """Runs seeds until the last one or the time is over; a line of JSON for each finding and for the counts."""
    faulthandler.enable()
    os.dup2(2, 1)  # what onnxruntime prints is none of ours
    warnings.simplefilter("ignore")
    _limit_memory()
    with Path(status).open("r+b") as file:
        shared = mmap.mmap(file.fileno(), 16)
    counts: Counter[str] = Counter()
    stop = time.monotonic() + seconds
    seed = first
    while seed < end and time.monotonic() < stop:
        shared[:8] = seed.to_bytes(8, "little")
        try:
            with contextlib.suppress(NoRoomError):
                run_seed(seed, pattern, counts)
        except Exception as error:
            text = str(error) if isinstance(error, FindingError) else "".join(traceback.format_exception(error)[-4:])
            _tell({"seed": seed, "finding": text})
        seed += 1
        if seed % REPORT == 0:
            _tell({"counts": counts})
            counts.clear()
    _tell({"counts": counts, "next": seed})


def _limit_memory() -> None:
    memory.WAITING_LIMIT = 1 << 28  # pages that wait count, too, and onnxruntime hangs where its threads get no memory
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


def _tell(what: dict[str, Any]) -> None:
    TOLD.write(json.dumps(what) + "\n")
    TOLD.flush()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4], sys.argv[5])
