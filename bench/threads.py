"""`python -m bench.threads [network …]`: training steps on 1, 2, 4, 8 and 16 threads, as many as the machine has."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

import onnxgrad
from bench import machine, report, results
from bench.measure import time_sides
from bench.peers import OURS, TORCH
from bench.peers.process import Process
from bench.quiet import Neighbours
from bench.results import Row, new_row
from bench.step_contest import FULL, QUICK, STEPS, DifferentLossesError, TimeCase, command
from bench.training_report import step_time

if TYPE_CHECKING:
    from bench.training_cases import TrainingCase

COUNTS = (1, 2, 4, 8, 16)
SIDES = (OURS, TORCH)
CLOSE = 1e-3  # how far losses may be apart
COLUMNS = ["training step, float32", "threads", "onnxgrad ms", "of one thread", "PyTorch", "of one thread"]


def _side(side: str, threads: int) -> str:
    return f"{side}, {threads}"


@contextmanager
def _timing(is_quick: bool, folder: Path, console: Console) -> Iterator[TimeCase]:
    processes = {side: Process() for side in SIDES}

    def time_case(case: "TrainingCase") -> list[Row]:
        case.write(folder)
        found: list[Row] = []
        for threads in (n for n in COUNTS if n <= onnxgrad.get_num_threads()):
            found += _rows(case, folder, processes, threads, is_quick, console)
        return found

    try:
        yield time_case
    finally:
        for process in processes.values():
            process.close()


def _rows(
    case: "TrainingCase", folder: Path, processes: dict[str, Process], threads: int, is_quick: bool, console: Console
) -> list[Row]:
    losses = {s: np.array(p.prepare_training(s, folder, case.name, threads, STEPS)) for s, p in processes.items()}
    worst = float(np.abs(losses[OURS] / losses[TORCH] - 1).max())
    if worst > CLOSE:
        raise DifferentLossesError(f"{case.work}: the losses on {threads} threads differ by {worst:.1e}")
    versions, neighbours = machine.versions("onnxruntime", "torch"), Neighbours()
    rows = {s: new_row(case.name, case.work, "float32", _side(s, threads), versions) for s in SIDES}
    for side, timing in time_sides(processes, QUICK if is_quick else FULL).items():
        rows[side].set_timing(timing)
        rows[side].loss = float(losses[side][-1])
    if note := neighbours.note():
        rows[OURS].note = note
        console.print(f"[yellow]{case.work}: {rows[OURS].note}, so take the figures for a guess.[/]")
    return list(rows.values())


def _lines(rows: Sequence[Row]) -> report.Lines:
    lines = []
    for sides in report.by_case(rows):
        for threads in (n for n in COUNTS if _side(OURS, n) in sides):
            ours = sides[_side(OURS, threads)]
            cells = [ours.work, str(threads)]
            for side in SIDES:
                row, alone = sides[_side(side, threads)], sides.get(_side(side, 1))
                faster = report.ratio(alone, row)
                cells += [step_time(row, ours), report.NOTHING if faster is None else report.times(faster)]
            lines.append(cells)
    return lines


def on_terminal(rows: Sequence[Row]) -> Table:
    return report.terminal_table("", COLUMNS, _lines(rows))


def tables(rows: Sequence[Row]) -> str:
    """For docs/speed.md: a section for each kind of processor."""
    legend = "Milliseconds a step as above; then how many times as fast as on one thread. **Bold**: faster."
    return report.sections(
        rows, "Threads of", "threads", lambda found: report.markdown_table(COLUMNS, _lines(found)), lambda found: legend
    )


def main(arguments: Sequence[str] | None = None) -> int:
    from bench.training_cases import CASES  # imports PyTorch

    description = "Training steps on 1, 2, 4, 8 and 16 threads, beside PyTorch."
    return command("threads", description, arguments, CASES, _timing, on_terminal, results.THREADS)


if __name__ == "__main__":
    sys.exit(main())
