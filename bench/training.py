"""`python -m bench.training [network …]`: whole training steps beside PyTorch and onnxruntime-training's module.

Every side trains in a process of its own, from the same weights on the same batch; where the losses of the first steps
differ, nothing is timed. Sides alternate between runs of at least 100 steps on end, of which every step is timed. Peak
memory is that of one more process. Beside them stands the floor (bench/step_floor.py). `python -m bench.avx2
bench.training` measures the same as on a processor with AVX2 alone.
"""

import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import numpy as np
from rich.console import Console

import onnxgrad
from bench import results, step_floor, training_report
from bench.cases import FLOOR
from bench.measure import time_sides
from bench.peers import ORT_TRAINING, OURS, TORCH, CannotRunError, Side
from bench.peers.ort_training_peer import OrtTrainingPeer
from bench.peers.process import Process
from bench.quiet import Neighbours
from bench.results import Row, new_row
from bench.step_contest import FULL, QUICK, STEPS, DifferentLossesError, TimeCase, command
from bench.training_cases import CASES, TrainingCase
from bench.training_memory import peak_bytes

CLOSE = 1e-3  # how far losses may be apart


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

    def run(self, case: TrainingCase) -> list[Row]:
        """Losses, time and, where there is time for it, memory of each side."""
        case.write(self._folder)
        rows = {
            side: new_row(case.name, case.work, "float32", side, self._versions)
            for side in (OURS, ORT_TRAINING, TORCH, FLOOR)
        }
        rows[ORT_TRAINING].note = self._without
        self._measure_floor(case, rows[FLOOR])
        sides = self._sides(case, rows)
        neighbours = Neighbours()
        for side, timing in time_sides(sides, QUICK if self._is_quick else FULL).items():
            rows[side].set_timing(timing)
        if note := neighbours.note():
            rows[OURS].note = note
            self._console.print(f"[yellow]{case.work}: {rows[OURS].note}, so take the figures for a guess.[/]")
        if not self._is_quick:
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

    def _measure_floor(self, case: TrainingCase, row: Row) -> None:
        work = step_floor.work_of(case.module(case.full), case.batch(case.full))
        speed = step_floor.speed_of(self._processes, self._threads)
        row.median_ms, row.note = speed.milliseconds(work), speed.describe(work)

    def _measure_memory(self, case: TrainingCase, rows: dict[str, Row]) -> None:
        for side, process in self._processes.items():
            if rows[side].median_ms is None:
                continue
            try:
                held = peak_bytes(side, process.interpreter, self._folder, case.name, self._threads)
                rows[side].memory_mb = held / 2**20
            except CannotRunError as reason:
                self._console.print(f"[yellow]{case.work}: no figure for the memory of {side}: {reason}.[/]")


@contextmanager
def _timing(is_quick: bool, folder: Path, console: Console) -> Iterator[TimeCase]:
    contest = Contest(is_quick, folder, console)
    try:
        yield contest.run
    finally:
        contest.close()


def main(arguments: Sequence[str] | None = None) -> int:
    description = "Training steps beside the peers."
    return command("training", description, arguments, CASES, _timing, training_report.on_terminal, results.TRAINING)


if __name__ == "__main__":
    sys.exit(main())
