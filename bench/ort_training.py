"""`python -m bench.ort_training [network …]`: a step of Module and Optimizer with artifacts of onnxruntime-training.

Both sides train with the same files, which onnxruntime-training 1.19.2 generates, each in a process of its own and by
turns; where the losses of the first steps differ, nothing is timed.
"""

import argparse
import platform
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
from rich.console import Console

import onnxgrad
from bench import results
from bench.measure import Effort, time_sides
from bench.peers import MODULE, ORT_TRAINING, CannotRunError
from bench.peers.ort_training_peer import OrtTrainingPeer
from bench.peers.process import Process
from bench.quiet import NOTICEABLE, Neighbours
from bench.report import (
    Lines,
    busy,
    by_case,
    by_processor,
    headings,
    markdown_table,
    median,
    milliseconds,
    origin,
    ratio,
    terminal_table,
    times,
)
from bench.results import BUSY, Row, new_row

if TYPE_CHECKING:
    from bench.training_cases import TrainingCase

FULL, QUICK = Effort(5, 3.0, calls=100, slow_calls=30), Effort(3, 0.3)
STEPS, CLOSE = 5, 1e-5  # losses that are compared, and how far they may be apart
SIDES = (MODULE, ORT_TRAINING)
STEP = (
    "Forward, backward and AdamW, milliseconds a step: the median, and from which to which time eight steps of ten "
    "take; then how many times onnxgrad.ort_training's median. Below it the best step. **Bold**: faster."
)


class DifferentLossesError(Exception):
    """The sides do not train alike: nothing to time."""


class Contest:
    """Both sides, in their processes."""

    def __init__(self, is_quick: bool, folder: Path, console: Console) -> None:
        self._effort, self._folder, self._console = QUICK if is_quick else FULL, folder, console
        self._threads = onnxgrad.get_num_threads()
        peer = OrtTrainingPeer(self._threads)
        version = peer.version()
        self._processes = {ORT_TRAINING: peer.process(), MODULE: Process()}  # the first one writes the artifacts
        self._versions = ", ".join(
            [
                f"onnxgrad {onnxgrad.__version__}",
                f"onnxruntime {metadata.version('onnxruntime')}",
                f"{ORT_TRAINING} {version}",
                f"Python {platform.python_version()}",
            ]
        )

    def close(self) -> None:
        for process in self._processes.values():
            process.close()

    def run(self, case: "TrainingCase") -> list[Row]:
        case.write(self._folder)
        rows = {side: new_row(case.name, case.work, "float32", side, self._versions) for side in SIDES}
        losses = {
            side: np.array(process.prepare_training(side, self._folder, case.name, self._threads, STEPS))
            for side, process in self._processes.items()
        }
        worst = float(np.abs(losses[MODULE] / losses[ORT_TRAINING] - 1).max())
        if worst > CLOSE:
            raise DifferentLossesError(f"{case.work}: the losses differ by {worst:.1e}")
        neighbours = Neighbours()
        for side, timing in time_sides(self._processes, self._effort).items():
            rows[side].set_timing(timing)
            rows[side].loss = float(losses[side][-1])
        if (share := neighbours.share()) > NOTICEABLE:
            rows[MODULE].note = f"{BUSY} {share:.0%} of the machine"
            self._console.print(f"[yellow]{case.work}: {rows[MODULE].note}, so take the figures for a guess.[/]")
        return list(rows.values())


def tables(rows: Sequence[Row]) -> str:
    """For docs/speed.md: a section for each kind of processor."""
    if not rows:
        return "Not measured yet."
    parts = []
    for processor, measured in by_processor(rows).items():
        parts += [f"### Artifacts on {processor}", markdown_table(_columns(measured), _lines(measured))]
        parts.append("  \n".join([STEP, *busy(measured), origin(measured, "python -m bench.ort_training")]))
    return "\n\n".join(parts)


def _columns(rows: Sequence[Row]) -> list[str]:
    return ["training step, float32", f"{MODULE} ms", *headings(rows, [ORT_TRAINING])]


def _lines(rows: Sequence[Row]) -> Lines:
    lines = []
    for sides in by_case(rows):
        ours, theirs = (sides[side] for side in SIDES)
        lines.append([ours.work, *(_time(row, ours) for row in (ours, theirs))])
    return lines


def _time(row: Row, ours: Row) -> str:
    above, below = median(row), f"best {milliseconds(row.best_ms or 0)}"
    many = ratio(row, ours)
    if row is not ours and many is not None and row.best_ms is not None and ours.best_ms is not None:
        above, below = f"{above}, {times(many)}", f"{below}, {times(row.best_ms / ours.best_ms)}"
        above = f"**{above}**" if many < 1 else above
    return f"{above}<br>{below}"


def main(arguments: Sequence[str] | None = None) -> int:
    from bench import pages
    from bench.training_cases import ARTIFACT_CASES  # imports PyTorch

    parser = argparse.ArgumentParser(prog="python -m bench.ort_training", description="Artifacts, there and here.")
    names = [case.name for case in ARTIFACT_CASES]
    parser.add_argument("networks", nargs="*", metavar="network", help=f"{', '.join(names)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="a short look: nothing is written")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.networks if name not in names]:
        parser.error(f"there is no network {unknown[0]!r}, expected {', '.join(names)}")
    console = Console(width=None if sys.stdout.isatty() else 170)
    if (share := psutil.cpu_percent(interval=0.5)) > 100 * NOTICEABLE:
        console.print(f"[yellow]Something else uses {share:.0f} % of the processor: figures will be noisy.[/]")
    rows: list[Row] = []
    refusals: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            contest = Contest(options.quick, Path(folder), console)
        except CannotRunError as reason:
            console.print(f"[bold red]{reason}.[/]")
            return 1
        try:
            for case in (c for c in ARTIFACT_CASES if not options.networks or c.name in options.networks):
                console.print(case.work)
                try:
                    rows += contest.run(case)
                except (DifferentLossesError, CannotRunError) as reason:
                    refusals.append(str(reason))
                    console.print(f"[bold red]Not timed: {reason}.[/]")
        finally:
            contest.close()
    if rows:
        console.print(terminal_table("", _columns(rows), _lines(rows)))
    if rows and not options.quick:
        measured = {row.case for row in rows}
        results.update(results.ARTIFACTS, rows, lambda row: row.case in measured, lambda row: names.index(row.case))
        pages.write()
        console.print("bench/ort_training.csv and docs/speed.md: written.")
    return 1 if refusals else 0


if __name__ == "__main__":
    sys.exit(main())
