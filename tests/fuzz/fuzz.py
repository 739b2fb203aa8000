"""Children one after the other: the next one goes on behind the call that the one before died of."""

import json
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.fuzz.calls import draw_call, operators
from tests.fuzz.child import choose

HANGS = 300.0  # seconds in which a call should be over, though it may have to compile a kernel
ROOT = Path(__file__).parents[2]


class Outcome(NamedTuple):
    """Of all children."""

    counts: Counter[str]
    findings: dict[str, int]  # the first of each kind, and how often it came
    next_seed: int


def run(first: int, seconds: float, calls: int, pattern: str, tell: Callable[[str], None]) -> Outcome:
    """Runs numbers from the first on; a finding is told at once."""
    if not operators(pattern):
        raise SystemExit(f"fuzz: no operator with a kernel for the CPU has {pattern!r} in its name")
    counts: Counter[str] = Counter()
    findings: dict[str, int] = {}
    kinds: dict[str, str] = {}
    stop, seed, end = time.monotonic() + seconds, first, first + calls

    def found(seed: int, text: str) -> None:
        name, only = choose(seed, pattern)[0].name, f" --only {pattern}" if pattern else ""
        text = f"{text}\n    again: python -m tests.fuzz --calls 1 --seed {seed}{only}"
        kind = name + re.sub(r"[\d., -]+|(float|int|array).*?(?=\b)", "", text.rpartition("): ")[2])[:80]
        first = kinds.setdefault(kind, text)
        findings[first] = findings.get(first, 0) + 1
        if first is text:
            tell(text)

    with tempfile.TemporaryDirectory() as folder:
        status, errors = Path(folder) / "status", Path(folder) / "errors"
        while seed < end and (left := stop - time.monotonic()) > 0:
            status.write_bytes(bytes(16))
            with errors.open("wb") as file:
                child = subprocess.Popen(
                    [sys.executable, "-m", "tests.fuzz.child", *map(str, (seed, end, left, pattern, status))],
                    stdout=subprocess.PIPE, stderr=file, text=True, cwd=ROOT,
                )  # fmt: skip
            died = _listen(child, status, counts, found)
            if died is None:
                break
            seed = int.from_bytes(status.read_bytes()[:8], "little")
            found(seed, f"{_describe(seed, pattern)}: {died}\n{_tail(errors.read_text(errors='replace'))}")
            seed += 1
    return Outcome(counts, findings, seed)


def _listen(child: Any, status: Path, counts: Counter[str], found: Callable[[int, str], None]) -> str | None:
    """Takes what a child says until it ends; how it died, if it did."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in child.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    seen, since = b"", time.monotonic()
    while True:
        try:
            line = lines.get(timeout=1)
        except queue.Empty:
            now = status.read_bytes()
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > HANGS:
                child.kill()
                child.wait()
                return f"was not over after {HANGS:.0f} s"
            continue
        if line is None:
            code = child.wait()
            return f"the process died of {-code if code < 0 else code}" if code else None
        said = json.loads(line)
        if "finding" in said:
            found(said["seed"], said["finding"])
        counts.update(said.get("counts", {}))


def _describe(seed: int, pattern: str) -> str:
    op, in_session = choose(seed, pattern)
    return f"{op.name} in a session" if in_session else str(draw_call(op, seed))


def _tail(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[:14])


def report(outcome: Outcome) -> str:
    """The numbers of calls of each operator."""
    names = sorted({key.rpartition(" ")[0] for key in outcome.counts})
    rows = [[name, *(outcome.counts[f"{name} {kind}"] for kind in ("calls", "accepted", "runs"))] for name in names]
    lines = [f"{'operator':36} {'calls':>8} {'accepted':>8} {'in sessions':>11}"]
    lines += [f"{name:36} {calls:8} {accepted:8} {runs:11}" for name, calls, accepted, runs in rows]
    total, found = sum(row[1] + row[3] for row in rows), sum(outcome.findings.values())
    lines.append(f"{total} calls of {len(rows)} operators, {found} findings of {len(outcome.findings)} kinds")
    return "\n".join(lines)
