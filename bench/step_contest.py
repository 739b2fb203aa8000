"""Sides that train the same networks by turns, each in a process of its own: the contest and its table.

Where the losses of the first steps differ, nothing is timed.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

import onnxgrad
from bench import report, results
from bench.measure import Effort, time_sides
from bench.peers import CannotRunError
from bench.peers.process import Process
from bench.quiet import Neighbours, warn_if_busy
from bench.results import Row, new_row
from bench.training_report import LONG_RUN, RUNS, SHORT_RUN, step_legend, step_time

if TYPE_CHECKING:
    from bench.training_cases import TrainingCase

TimeCase = Callable[["TrainingCase"], list[Row]]

FULL, QUICK = Effort(RUNS, 3.0, calls=LONG_RUN, slow_calls=SHORT_RUN), Effort(3, 0.3)
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

        def table(found: Sequence[Row]) -> str:
            return report.markdown_table(self._columns(found), self._lines(found))

        legend = f"{step_legend(self.sides[0])} **Bold**: faster."
        return report.sections(rows, f"{self.heading} on", self.name, table, lambda found: legend)

    def _columns(self, rows: Sequence[Row]) -> list[str]:
        return [self.first_column, f"{self.sides[0]} ms", *report.headings(rows, self.sides[1:])]

    def _lines(self, rows: Sequence[Row]) -> report.Lines:
        return [
            [sides[self.sides[0]].work, *(step_time(sides[side], sides[self.sides[0]]) for side in self.sides)]
            for sides in report.by_case(rows)
        ]

    def main(self, arguments: Sequence[str] | None, cases: "Sequence[TrainingCase]") -> int:
        """The command; 1 if a case could not be timed."""

        def table(rows: Sequence[Row]) -> Table:
            return report.terminal_table("", self._columns(rows), self._lines(rows))

        return command(self.name, self.description, arguments, cases, self._timing, table, self.file)

    @contextmanager
    def _timing(self, is_quick: bool, folder: Path, console: Console) -> Iterator[TimeCase]:
        processes, versions = self.processes(onnxgrad.get_num_threads())
        try:
            effort = QUICK if is_quick else FULL
            yield lambda case: self._run(case, processes, versions, folder, effort, console)
        finally:
            for process in processes.values():
                process.close()

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
        if note := neighbours.note():
            rows[self.sides[0]].note = note
            console.print(f"[yellow]{case.work}: {note}, so take the figures for a guess.[/]")
        return list(rows.values())


def command(
    name: str,
    description: str,
    arguments: Sequence[str] | None,
    cases: "Sequence[TrainingCase]",
    timing: Callable[[bool, Path, Console], AbstractContextManager[TimeCase]],
    table: Callable[[Sequence[Row]], Table],
    file: Path,
) -> int:
    """`python -m bench.<name> [network …]`: times the networks, shows and writes the table; 1 if one was not timed.

    Within `timing`, which is told whether a short look is enough, a function times one network.
    """
    from bench import pages  # which imports those who have a contest

    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=description)
    names = [case.name for case in cases]
    parser.add_argument("networks", nargs="*", metavar="network", help=f"{', '.join(names)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="a short look at times alone: nothing is written")
    options = parser.parse_args(arguments)
    if unknown := [network for network in options.networks if network not in names]:
        parser.error(f"there is no network {unknown[0]!r}, expected {', '.join(names)}")
    console = report.terminal()
    warn_if_busy(console)
    rows: list[Row] = []
    was_refused = False
    try:
        with tempfile.TemporaryDirectory() as folder, timing(options.quick, Path(folder), console) as time_case:
            for case in (c for c in cases if not options.networks or c.name in options.networks):
                console.print(case.work)
                try:
                    rows += time_case(case)
                except (DifferentLossesError, CannotRunError) as reason:
                    was_refused = True
                    console.print(f"[bold red]Not timed: {reason}.[/]")
    except CannotRunError as reason:
        console.print(f"[bold red]{reason}.[/]")
        return 1
    if rows:
        console.print(table(rows))
    if rows and not options.quick:
        measured = {row.case for row in rows}
        results.update(file, rows, lambda row: row.case in measured, lambda row: names.index(row.case))
        pages.write()
        console.print(f"bench/{file.name} and the pages with its tables: written.")
    return 1 if was_refused else 0
