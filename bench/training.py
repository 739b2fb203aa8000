"""`python -m bench.training [network …]`: whole training steps beside PyTorch and onnxruntime-training's module.

Every side trains in a process of its own, from the same weights on the same batch; where the losses of the first steps
differ, nothing is timed. Sides alternate between runs of at least 100 steps on end, of which every step is timed. Peak
memory is that of one more process.
"""

import argparse
import platform
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import numpy as np
import psutil
from rich.console import Console

import onnxgrad
from bench import pages, results, training_report
from bench.measure import Effort, time_sides
from bench.peers import ORT_TRAINING, OURS, TORCH, CannotRunError, Side
from bench.peers.ort_training_peer import OrtTrainingPeer
from bench.peers.process import Process
from bench.quiet import NOTICEABLE, Neighbours
from bench.results import BUSY, Row, new_row
from bench.training_cases import CASES, TrainingCase
from bench.training_memory import peak_bytes
from bench.training_report import LONG_RUN, RUNS, SHORT_RUN

FULL = Effort(RUNS, 3.0, calls=LONG_RUN, slow_calls=SHORT_RUN)
QUICK = Effort(3, 0.3)
STEPS, CLOSE = 5, 1e-3  # losses that are compared, and how far they may be apart


class DifferentLossesError(Exception):
    """The sides do not train alike: nothing to time."""


class Contest:
    """The cases of one invocation."""

    def __init__(self, is_quick: bool, folder: Path, console: Console) -> None:
        self._is_quick, self._folder, self._console = is_quick, folder, console
        self._threads = onnxgrad.get_num_threads()
        self._processes = {OURS: Process(), TORCH: Process()}
        versions = [f"onnxgrad {onnxgrad.__version__}", f"onnxruntime {metadata.version('onnxruntime')}"]
        self._without: str = ""  # why there is no onnxruntime-training
        try:
            peer = OrtTrainingPeer(self._threads)
            versions.append(f"{ORT_TRAINING} {peer.version()}")
            self._processes[ORT_TRAINING] = peer.process()
        except CannotRunError as reason:
            self._without = str(reason)
            console.print(f"[yellow]{reason}.[/]")
        versions += [f"{TORCH} {metadata.version('torch')}", f"Python {platform.python_version()}"]
        self._versions = ", ".join(versions)

    def close(self) -> None:
        for process in self._processes.values():
            process.close()

    def run(self, case: TrainingCase, with_memory: bool) -> list[Row]:
        """Losses, time and memory of each side."""
        case.write(self._folder)
        rows = {
            side: new_row(case.name, case.work, "float32", side, self._versions) for side in (OURS, ORT_TRAINING, TORCH)
        }
        rows[ORT_TRAINING].note = self._without
        sides = self._sides(case, rows)
        neighbours = Neighbours()
        for side, timing in time_sides(sides, QUICK if self._is_quick else FULL).items():
            rows[side].set_timing(timing)
        if (share := neighbours.share()) > NOTICEABLE:
            rows[OURS].note = f"{BUSY} {share:.0%} of the machine"
            self._console.print(f"[yellow]{case.work}: {rows[OURS].note}, so take the figures for a guess.[/]")
        if with_memory:
            self._measure_memory(case, rows)
        return list(rows.values())

    def _sides(self, case: TrainingCase, rows: dict[str, Row]) -> dict[str, Side]:
        """The processes, ready to train; none that cannot."""
        sides: dict[str, Side] = {}
        losses: dict[str, list[float]] = {}
        for side, process in self._processes.items():
            try:
                losses[side] = process.prepare_training(side, self._folder, case.name, self._threads, STEPS)
            except CannotRunError as reason:
                rows[side].note = str(reason)
                self._console.print(f"[yellow]{case.work}: {side} cannot: {reason}.[/]")
                continue
            sides[side], rows[side].loss = process, losses[side][-1]
        for side, found in losses.items():
            worst = float(np.abs(np.array(found) / losses[TORCH] - 1).max())
            if worst > CLOSE:
                raise DifferentLossesError(f"{case.work}: the losses of {side} and {TORCH} differ by {worst:.1e}")
        return sides

    def _measure_memory(self, case: TrainingCase, rows: dict[str, Row]) -> None:
        for side, process in self._processes.items():
            if rows[side].median_ms is None:
                continue
            try:
                held = peak_bytes(side, process.interpreter, self._folder, case.name, self._threads)
                rows[side].memory_mb = held / 2**20
            except CannotRunError as reason:
                self._console.print(f"[yellow]{case.work}: no figure for the memory of {side}: {reason}.[/]")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.training", description="Training steps beside the peers.")
    names = [case.name for case in CASES]
    parser.add_argument("networks", nargs="*", metavar="network", help=f"{', '.join(names)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="a short look: nothing is written, memory is left out")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.networks if name not in names]:
        parser.error(f"there is no network {unknown[0]!r}, expected {', '.join(names)}")
    console = Console(width=None if sys.stdout.isatty() else 170)
    if (share := psutil.cpu_percent(interval=0.5)) > 100 * NOTICEABLE:
        console.print(f"[yellow]Something else uses {share:.0f} % of the processor: figures will be noisy.[/]")
    rows: list[Row] = []
    refusals: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        contest = Contest(options.quick, Path(folder), console)
        try:
            for case in (c for c in CASES if not options.networks or c.name in options.networks):
                console.print(case.work)
                try:
                    rows += contest.run(case, not options.quick)
                except DifferentLossesError as reason:
                    refusals.append(str(reason))
                    console.print(f"[bold red]Not timed: {reason}.[/]")
        finally:
            contest.close()
    console.print(training_report.on_terminal(rows))
    if not options.quick:
        measured = {row.case for row in rows}
        results.update(results.TRAINING, rows, lambda row: row.case in measured, lambda row: names.index(row.case))
        pages.write()
        console.print("bench/training.csv, docs/speed.md and README.md: written.")
    return 1 if refusals else 0


if __name__ == "__main__":
    sys.exit(main())
