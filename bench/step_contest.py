"""Sides that train the same networks by turns, each in a process of its own: the contest and its table.

Where the losses of the first steps differ, nothing is timed.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
from rich.console import Console

import onnxgrad
from bench import results
from bench.measure import Effort, time_sides
from bench.peers import CannotRunError
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
STEPS = 5  # losses that are compared


class DifferentLossesError(Exception):
    """The sides do not train alike: nothing to time."""


@dataclass(frozen=True)
class StepContest:
    """`python -m bench.<name>`: which sides there are, what is compared with the first of them, and what is said."""

    name: str
    description: str
    heading: str  # of a table, before the processor's name
    first_column: str
    sides: tuple[str, ...]  # ours first
    close: float  # how far the losses of any two may be apart
    file: Path
    processes: Callable[[int], tuple[Mapping[str, Process], str]]  # by the number of threads; and their versions

    def tables(self, rows: Sequence[Row]) -> str:
        """For docs/speed.md: a section for each kind of processor."""
        if not rows:
            return "Not measured yet."
        parts = []
        for processor, measured in by_processor(rows).items():
            table = markdown_table(self._columns(measured), self._lines(measured))
            legend = (
                "Forward, backward and AdamW, milliseconds a step: the median, and from which to which time eight "
                f"steps of ten take; then how many times {self.sides[0]}'s median. Below it the best step. **Bold**: "
                "faster."
            )
            told = "  \n".join([legend, *busy(measured), origin(measured, f"python -m bench.{self.name}")])
            parts += [f"### {self.heading} on {processor}", table, told]
        return "\n\n".join(parts)

    def _columns(self, rows: Sequence[Row]) -> list[str]:
        return [self.first_column, f"{self.sides[0]} ms", *headings(rows, self.sides[1:])]

    def _lines(self, rows: Sequence[Row]) -> Lines:
        return [
            [sides[self.sides[0]].work, *(_time(sides[side], sides[self.sides[0]]) for side in self.sides)]
            for sides in by_case(rows)
        ]

    def main(self, arguments: Sequence[str] | None, cases: "Sequence[TrainingCase]") -> int:
        """The command; 1 if a case could not be timed."""
        from bench import pages  # which imports those who have a contest

        parser = argparse.ArgumentParser(prog=f"python -m bench.{self.name}", description=self.description)
        names = [case.name for case in cases]
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
        try:
            processes, versions = self.processes(onnxgrad.get_num_threads())
        except CannotRunError as reason:
            console.print(f"[bold red]{reason}.[/]")
            return 1
        with tempfile.TemporaryDirectory() as folder:
            try:
                for case in (c for c in cases if not options.networks or c.name in options.networks):
                    console.print(case.work)
                    try:
                        effort = QUICK if options.quick else FULL
                        rows += self._run(case, processes, versions, Path(folder), effort, console)
                    except (DifferentLossesError, CannotRunError) as reason:
                        refusals.append(str(reason))
                        console.print(f"[bold red]Not timed: {reason}.[/]")
            finally:
                for process in processes.values():
                    process.close()
        if rows:
            console.print(terminal_table("", self._columns(rows), self._lines(rows)))
        if rows and not options.quick:
            measured = {row.case for row in rows}
            results.update(self.file, rows, lambda row: row.case in measured, lambda row: names.index(row.case))
            pages.write()
            console.print(f"bench/{self.file.name} and docs/speed.md: written.")
        return 1 if refusals else 0

    def _run(
        self,
        case: "TrainingCase",
        processes: Mapping[str, Process],
        versions: str,
        folder: Path,
        effort: Effort,
        console: Console,
    ) -> list[Row]:
        case.write(folder)
        rows = {side: new_row(case.name, case.work, "float32", side, versions) for side in self.sides}
        threads = onnxgrad.get_num_threads()
        losses = {
            side: np.array(process.prepare_training(side, folder, case.name, threads, STEPS))
            for side, process in processes.items()
        }
        for side in self.sides[1:]:
            worst = float(np.abs(losses[side] / losses[self.sides[0]] - 1).max())
            if worst > self.close:
                raise DifferentLossesError(f"{case.work}: the losses of {side} differ by {worst:.1e}")
        neighbours = Neighbours()
        for side, timing in time_sides(processes, effort).items():
            rows[side].set_timing(timing)
            rows[side].loss = float(losses[side][-1])
        if (share := neighbours.share()) > NOTICEABLE:
            ours = rows[self.sides[0]]
            ours.note = f"{BUSY} {share:.0%} of the machine"
            console.print(f"[yellow]{case.work}: {ours.note}, so take the figures for a guess.[/]")
        return list(rows.values())


def _time(row: Row, ours: Row) -> str:
    above, below = median(row), f"best {milliseconds(row.best_ms or 0)}"
    many = ratio(row, ours)
    if row is not ours and many is not None and row.best_ms is not None and ours.best_ms is not None:
        above, below = f"{above}, {times(many)}", f"{below}, {times(row.best_ms / ours.best_ms)}"
        above = f"**{above}**" if many < 1 else above
    return f"{above}<br>{below}"
