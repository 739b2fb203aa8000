"""`python -m bench.pauses`: the first training steps after a pause beside those on end, of onnxgrad and PyTorch.

Whoever trains in a notebook, or waits for data between steps, meets the first step after a pause; the other tables
show steps on end. The network is the MLP, whose step is the shortest.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import onnxgrad
from bench import machine, report, results
from bench.measure import timing
from bench.peers import OURS, TORCH
from bench.peers.process import Process
from bench.quiet import Neighbours, warn_if_busy
from bench.results import Row, new_row

NETWORK = "mlp"
PAUSES = (  # what the process does between steps, and for how many ms
    ("asleep", 0), ("asleep", 10), ("asleep", 100), ("asleep", 1000), ("busy", 100), ("other data", 0)
)  # fmt: skip
FIRST, WARM = 3, 20  # steps looked at after a pause, and on end before it
STEADY = "on end"


def _words(pause: str, milliseconds: int) -> str:
    if pause == "other data":
        return "after 128 MB of other data"
    return f"{pause} for {milliseconds} ms" if milliseconds else "no pause"


def measured(times: int) -> list[Row]:
    """Rows of each pause and each step after it, over so many pauses."""
    from bench.training_cases import CASES

    case = next(c for c in CASES if c.name == NETWORK)
    seconds: dict[tuple[str, str], list[float]] = {}
    processes = {OURS: Process(), TORCH: Process()}
    neighbours = Neighbours()
    with tempfile.TemporaryDirectory() as folder:
        case.write(Path(folder))
        for side, process in processes.items():
            process.prepare_training(side, Path(folder), case.name, onnxgrad.get_num_threads(), WARM)
        for _ in range(times):
            for pause, ms in PAUSES:
                for side, process in processes.items():
                    steady, after = process.ask("run_around", calls=WARM, pause=pause, seconds=ms / 1e3, then=FIRST)
                    seconds.setdefault((STEADY, side), []).extend(steady[WARM // 2 :])
                    for place, found in enumerate(after, 1):
                        seconds.setdefault((f"{_words(pause, ms)}, step {place}", side), []).append(found)
    for process in processes.values():
        process.close()
    rows = []
    note = neighbours.note()
    for (place, side), found in seconds.items():
        rows.append(new_row(place, case.work, "float32", side, machine.versions("onnxruntime", "torch")))
        rows[-1].set_timing(timing(found))
        if side == OURS:
            rows[-1].note = note
    return rows


def _lines(rows: Sequence[Row]) -> report.Lines:
    """A line for each pause: the medians of the steps after it, and their ratios to a step without a pause."""
    found = {(row.case, row.side): row for row in rows}
    lines = []
    for pause, ms in PAUSES:
        cells = [_words(pause, ms)]
        for side in (OURS, TORCH):
            for place in range(1, FIRST + 1):
                row = found[f"{_words(pause, ms)}, step {place}", side]
                many = report.ratio(row, found[STEADY, side])
                assert row.median_ms is not None and many is not None
                cells.append(f"{report.milliseconds(row.median_ms)} ({report.times(many)})")
        lines.append(cells)
    return lines


def _columns() -> list[str]:
    return ["", *(f"{side}, step {place}" for side in (OURS, TORCH) for place in range(1, FIRST + 1))]


def _legend(rows: Sequence[Row]) -> str:
    found = {(row.case, row.side): row for row in rows}

    def both(pause: tuple[str, int], place: int) -> str:
        cases = ((f"{_words(*pause)}, step {place}", side) for side in (OURS, TORCH))
        ratios = [report.ratio(found[case], found[STEADY, case[1]]) for case in cases]
        return " and ".join(report.times(many) for many in ratios if many is not None)

    asleep, busy, other_data = PAUSES[3:]
    return (
        f"Medians in milliseconds, and their ratio to a step without a pause, which takes "
        f"{report.median(found[STEADY, OURS])} ms with {OURS} and {report.median(found[STEADY, TORCH])} ms with "
        f"{TORCH}. With {OURS} and {TORCH}, the first step after a second asleep takes {both(asleep, 1)} the time of a "
        f"step without a pause, the third {both(asleep, 3)}. If only the other threads sleep, the first takes "
        f"{both(busy, 1)}; if nothing sleeps but caches are cold, {both(other_data, 1)}."
    )


def table(rows: Sequence[Row]) -> str:
    """A table for each kind of processor."""
    return report.sections(
        rows, "Pauses on", "pauses", lambda found: report.markdown_table(_columns(), _lines(found)), _legend
    )


def main() -> int:
    from bench import pages  # which imports this module for its table

    parser = argparse.ArgumentParser(prog="python -m bench.pauses", description="Training steps after pauses.")
    parser.add_argument("--quick", action="store_true", help="a short look: nothing is written")
    options = parser.parse_args()
    console = report.terminal()
    warn_if_busy(console)
    rows = measured(2 if options.quick else 30)
    console.print(report.terminal_table("", _columns(), _lines(rows)))
    if not options.quick:
        results.update(results.PAUSES, rows, lambda row: True, lambda row: 0)
        pages.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
