"""`python -m bench.training [network …]`: whole training steps beside PyTorch and onnxruntime-training's module.

Every side starts from the same weights and trains on the same batch; where the losses of the first steps differ,
nothing is timed. Sides alternate, the best of several rounds counts. Peak memory is that of a process of its own.
"""

import argparse
import csv
import datetime
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from importlib import metadata
from pathlib import Path

import numpy as np
import psutil
from rich.console import Console

import onnxgrad
from bench import machine, training_report
from bench.measure import Effort, time_sides
from bench.peers import ORT_TRAINING, TORCH, CannotRunError, HereSide, Side
from bench.peers.ort_training_peer import INTERPRETER, OrtTrainingPeer
from bench.quiet import NOTICEABLE, Neighbours
from bench.results import BUSY
from bench.training_cases import CASES, OPSET, PEER_OPSET, TrainingCase
from bench.training_memory import peak_bytes
from bench.training_report import OURS, Row
from bench.training_steps import onnxgrad_step, torch_step

FILE = Path(__file__).with_name("training.csv")
# Turns are short, a few steps: on a machine shared with others some of every side fall into quiet moments.
SECONDS, QUICK = 9.0, Effort(12, 1.0)  # for each side
STEPS, CLOSE = 5, 1e-3  # losses that are compared, and how far they may be apart


class DifferentLossesError(Exception):
    """The sides do not train alike: nothing to time."""


class Contest:
    """The cases of one invocation."""

    def __init__(self, is_quick: bool, folder: Path, console: Console) -> None:
        self._is_quick, self._folder, self._console = is_quick, folder, console
        self._threads = onnxgrad.get_num_threads()
        self.peer = OrtTrainingPeer(self._threads)

    def run(self, case: TrainingCase, with_memory: bool) -> list[Row]:
        """Losses, time and memory of each side."""
        for size in ("full", "small"):
            for opset, side in ((OPSET, OURS), (PEER_OPSET, ORT_TRAINING)):
                path = self._folder / f"{case.name}-{size}-{side}.onnx"
                path.write_bytes(case.exported(getattr(case, size), opset))
            np.savez(self._folder / f"{case.name}-{size}.npz", **case.batch(getattr(case, size)))
        rows = {side: Row(case.name, case.work, side) for side in (OURS, ORT_TRAINING, TORCH)}
        sides = self._sides(case, rows)
        neighbours = Neighbours()
        timings = time_sides(sides, QUICK if self._is_quick else Effort(case.turns, SECONDS))
        if (share := neighbours.share()) > NOTICEABLE:
            rows[OURS].note = f"{BUSY} {share:.0%} of the machine"
            self._console.print(f"[yellow]{case.work}: {rows[OURS].note}, so take the figures for a guess.[/]")
        for side, timing in timings.items():
            row = rows[side]
            row.best_ms, row.median_ms = timing.best_ms, timing.median_ms
            row.ratio_to_ours = timing.best_ms / timings[OURS].best_ms
            if side in case.bars:
                row.bar, row.passed = f"≥ {case.bars[side]:g}×", row.ratio_to_ours >= case.bars[side]
        if with_memory:
            self._measure_memory(case, rows)
        return list(rows.values())

    def _sides(self, case: TrainingCase, rows: dict[str, Row]) -> dict[str, Side]:
        batch = case.batch(case.full)
        ours = onnxgrad_step(self._folder / f"{case.name}-full-{OURS}.onnx", batch, self._threads)
        theirs = torch_step(case.module(case.full), batch, self._threads)
        sides: dict[str, Side] = {OURS: HereSide(ours), TORCH: HereSide(theirs)}
        losses = {OURS: [ours() for _ in range(STEPS)], TORCH: [theirs() for _ in range(STEPS)]}
        try:
            sides[ORT_TRAINING], losses[ORT_TRAINING] = self.peer.prepare_training(
                self._folder / f"{case.name}-full-{ORT_TRAINING}.onnx", batch, STEPS
            )
        except CannotRunError as reason:
            rows[ORT_TRAINING].note = str(reason)
        for side, found in losses.items():
            rows[side].loss = found[-1]
            worst = float(np.abs(np.array(found) / losses[TORCH] - 1).max())
            if worst > CLOSE:
                raise DifferentLossesError(f"{case.work}: the losses of {side} and {TORCH} differ by {worst:.1e}")
        return sides

    def _measure_memory(self, case: TrainingCase, rows: dict[str, Row]) -> None:
        for side, row in rows.items():
            if row.best_ms is None:
                continue
            interpreter = INTERPRETER if side == ORT_TRAINING else Path(sys.executable)
            try:
                row.peak_mb = peak_bytes(side, interpreter, self._folder, case.name, self._threads) / 2**20
            except CannotRunError as reason:
                self._console.print(f"[yellow]{case.work}: no figure for the memory of {side}: {reason}.[/]")
        ours, theirs = rows[OURS].peak_mb, rows[TORCH].peak_mb
        if ours is not None and theirs is not None:
            rows[OURS].bar, rows[OURS].passed = f"memory ≤ {TORCH}'s", ours <= theirs


def _versions(peer: OrtTrainingPeer) -> str:
    found = [f"onnxgrad {onnxgrad.__version__}", f"onnxruntime {metadata.version('onnxruntime')}"]
    try:
        found.append(f"{ORT_TRAINING} {peer.version()}")
    except CannotRunError as reason:
        print(reason)
    return ", ".join([*found, f"{TORCH} {metadata.version('torch')}", f"Python {platform.python_version()}"])


def read() -> list[Row]:
    """The rows of the file, none if there is no file."""
    if not FILE.exists():
        return []
    with FILE.open(newline="", encoding="utf-8") as file:
        return [Row.parsed(record) for record in csv.DictReader(file)]


def write(new: Sequence[Row]) -> None:
    """Replaces the rows of the cases that were run."""
    names = {row.case for row in new}
    rows = [*(row for row in read() if row.case not in names), *new]
    rows.sort(key=lambda row: [case.name for case in CASES].index(row.case))
    with FILE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(row.record() for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.training", description="Training steps beside the peers.")
    names = [case.name for case in CASES]
    parser.add_argument("networks", nargs="*", metavar="network", help=f"{', '.join(names)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="a short look: nothing is written, memory is left out")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.networks if name not in names]:
        parser.error(f"there is no network {unknown[0]!r}, expected {', '.join(names)}")
    console = Console(width=None if sys.stdout.isatty() else 170)
    if (busy := psutil.cpu_percent(interval=0.5)) > 100 * NOTICEABLE:
        console.print(f"[yellow]Something else uses {busy:.0f} % of the processor: figures will be noisy.[/]")
    rows: list[Row] = []
    refusals: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        contest = Contest(options.quick, Path(folder), console)
        try:
            facts = datetime.date.today().isoformat(), machine.description(), _versions(contest.peer)
            for case in (c for c in CASES if not options.networks or c.name in options.networks):
                with console.status(case.work):
                    try:
                        found = contest.run(case, not options.quick)
                    except DifferentLossesError as reason:
                        refusals.append(str(reason))
                        console.print(f"[bold red]Not timed: {reason}.[/]")
                        continue
                for row in found:
                    row.date, row.machine, row.versions = facts
                rows += found
        finally:
            contest.peer.close()
    console.print(training_report.terminal_table(rows))
    for line in training_report.missed(rows):
        console.print(f"Bar missed: {line}", style="red", highlight=False)
    if not options.quick:
        write(rows)
        told = "and README.md: written" if training_report.update_readme(read()) else "written"
        console.print(f"bench/training.csv {told}.")
    return 1 if refusals else 0


if __name__ == "__main__":
    sys.exit(main())
