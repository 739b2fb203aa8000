"""python -m bench [group …]: times every operator beside its peers and keeps the figures."""

import argparse
import platform
import sys
from collections.abc import Sequence
from importlib import metadata

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import onnxgrad
from bench import contest, pages, report, results
from bench.cases import DTYPES, GROUPS, Case, all_cases
from bench.measure import FULL, QUICK, SHORTER
from bench.peers import CannotRunError, Peer
from bench.peers.numpy_peer import NumpyPeer
from bench.peers.ort_training_peer import OrtTrainingPeer
from bench.peers.torch_peer import TorchPeer
from bench.quiet import warn_if_busy
from bench.results import Row


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Speed and memory beside the peers.")
    parser.add_argument("groups", nargs="*", metavar="group", help=f"{', '.join(GROUPS)} or all (default: all)")
    parser.add_argument("--dtype", action="append", choices=list(DTYPES), help="only this type; may be repeated")
    parser.add_argument("--quick", action="store_true", help="a short look: nothing is written, memory is left out")
    options = parser.parse_args(arguments)
    for group in options.groups:
        if group not in (*GROUPS, "all"):
            parser.error(f"there is no group {group!r}, expected {', '.join(GROUPS)} or all")
    if not options.groups or "all" in options.groups:
        options.groups = list(GROUPS)
    return options


def _versions(peers: Sequence[Peer], console: Console) -> str:
    """The versions of everything that has a part in the figures; says so where a peer is not there."""
    versions = [f"onnxgrad {onnxgrad.__version__}"]
    for peer in peers:
        try:
            versions.append(f"{peer.name} {peer.version()}")
        except CannotRunError as reason:
            console.print(f"[yellow]{reason}.[/]")
    versions += [f"Numba {metadata.version('numba')}", f"Python {platform.python_version()}"]
    return ", ".join(versions)


class Run:
    """The cases of one invocation, and what came of them."""

    def __init__(self, console: Console, quick: bool) -> None:
        self.console, self.quick = console, quick
        threads = onnxgrad.get_num_threads()
        self.peers: list[Peer] = [OrtTrainingPeer(threads), TorchPeer(threads), NumpyPeer()]
        self.versions = _versions(self.peers, console)
        self.rows: list[Row] = []
        self.remarks: list[str] = []
        self.refusals: list[str] = []
        self.missing: list[str] = []

    def close(self) -> None:
        for peer in self.peers:
            peer.close()

    def go(self, cases: Sequence[Case]) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        # Drawn between runs only: the thread that would otherwise redraw it takes time from whoever is on the clock.
        with Progress(*columns, console=self.console, transient=True, auto_refresh=False) as progress:
            task = progress.add_task("", total=len(cases))

            def on_progress(share: float) -> None:
                progress.update(task, advance=share, refresh=True)

            for group in GROUPS:
                before = len(self.rows)
                for case in (c for c in cases if c.group == group):
                    progress.update(task, description=f"{case.work}, {case.dtype}", refresh=True)
                    done = progress.tasks[0].completed
                    self._one(case, on_progress)
                    progress.update(task, completed=done + 1)
                if len(self.rows) > before:
                    self.console.print(report.operators_on_terminal(group, self.rows[before:]))

    def _one(self, case: Case, on_progress: "contest.OnProgress") -> None:
        effort = QUICK if self.quick else FULL if case.dtype in ("float32", "int64") else SHORTER
        try:
            outcome = contest.run(case, self.peers, effort, not self.quick, on_progress)
        except contest.KernelMissingError as reason:
            if str(reason) not in self.missing:
                self.missing.append(str(reason))
                self.console.print(f"[yellow]{reason}: left out.[/]")
            return
        except contest.WrongResultError as reason:
            self.refusals.append(str(reason))
            self.console.print(f"[bold red]Not timed: {reason}.[/]")
            return
        for row in outcome.rows:
            row.versions = self.versions
        self.rows += outcome.rows
        self.remarks += outcome.remarks

    def summary(self) -> None:
        for title, lines in (
            ("Worth knowing:", self.remarks),
            ("Wrong results, not timed:", self.refusals),
        ):
            if lines:
                self.console.print(f"\n[bold]{title}[/]")
                for line in lines:
                    self.console.print(f"  {line}", highlight=False, markup=False)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    console = report.terminal()
    warn_if_busy(console)
    dtypes = [*(options.dtype or DTYPES), "int64"]
    run = Run(console, options.quick)
    try:
        run.go([c for c in all_cases() if c.group in options.groups and c.dtype in dtypes])
    finally:
        run.close()
    run.summary()
    if not options.quick:
        types = [*DTYPES, "int64"]
        results.update(
            results.OPERATORS,
            run.rows,
            lambda row: row.case.split("/")[0] in options.groups and row.dtype in dtypes,
            lambda row: (GROUPS.index(row.case.split("/")[0]), types.index(row.dtype)),
        )
        pages.write()
        console.print("\nbench/results.csv and docs/speed.md: written.")
    return 1 if run.refusals else 0


if __name__ == "__main__":
    sys.exit(main())
