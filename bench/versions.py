"""`python -m bench.versions OLD NEW`: two versions of onnxgrad beside each other, given as folders to import it from.

Each version runs in a process of its own, by turns, over the training networks and some of the operators; the table
says how many times the old version's median the new one's is. Nothing is written.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import onnxgrad
from bench import report
from bench.cases import all_cases
from bench.measure import Effort, time_sides
from bench.peers import OURS, CannotRunError
from bench.peers.process import Process
from bench.quiet import Neighbours, warn_if_busy
from bench.results import Row, new_row

TRAINING, OPERATORS = Effort(9, 2.0, calls=40, slow_calls=10), Effort(9, 0.25)
QUICK = Effort(3, 0.1)
NOTICED = 1.05  # times the old median from which on a row is marked
OLD, NEW = "old", "new"


class Versions:
    """A process of each version, and the lines of the table so far."""

    def __init__(self, folders: dict[str, Path], effort: Effort | None) -> None:
        self._processes = {name: Process(folder=folder) for name, folder in folders.items()}
        self._effort = effort
        self.lines: report.Lines = []
        for name, folder in folders.items():
            if (found := self._processes[name].ask("imported_from")) != folder:
                raise SystemExit(f"the process of {folder} imported onnxgrad from {found}")

    def compare(self, work: str, prepare: Callable[[Process], object], effort: Effort) -> None:
        """Times what `prepare` gets ready in each process."""
        try:
            for process in self._processes.values():
                prepare(process)
        except CannotRunError as reason:
            self.lines.append([work, *4 * [report.NOTHING], str(reason)])
            return
        neighbours = Neighbours()
        rows: dict[str, Row] = {name: new_row(work, work, "float32", name) for name in (OLD, NEW)}
        for name, timing in time_sides(self._processes, self._effort or effort).items():
            rows[name].set_timing(timing)
        many = report.ratio(rows[NEW], rows[OLD]) or 1.0
        best = (rows[NEW].best_ms or 1.0) / (rows[OLD].best_ms or 1.0)
        remark = neighbours.note()
        told = f"{many:.3f}" + (" ✗" if many > NOTICED else "")
        self.lines.append([work, report.median(rows[OLD]), report.median(rows[NEW]), told, f"{best:.3f}", remark])
        print(*self.lines[-1], sep=" | ", flush=True)

    def close(self) -> None:
        for process in self._processes.values():
            process.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.versions", description="Two versions of onnxgrad.")
    parser.add_argument("old", type=Path, help="the folder that holds the package onnxgrad: …/src")
    parser.add_argument("new", type=Path)
    parser.add_argument("names", nargs="*", help="networks, or groups of operators (default: all)")
    parser.add_argument("--quick", action="store_true", help="a short look")
    options = parser.parse_args()
    for folder in (options.old, options.new):
        if not (folder / "onnxgrad").is_dir():
            parser.error(f"there is no package onnxgrad in {folder}")
    from bench.training_cases import CASES

    console = report.terminal()
    warn_if_busy(console)
    folders = {OLD: options.old.resolve(), NEW: options.new.resolve()}
    versions, threads = Versions(folders, QUICK if options.quick else None), onnxgrad.get_num_threads()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case in (c for c in CASES if not options.names or c.name in options.names):
            case.write(folder)

            def prepare(process: Process, network: str = case.name) -> None:
                process.prepare_training(OURS, folder, network, threads, steps=5)

            versions.compare(case.work, prepare, TRAINING)
    for operator in (c for c in all_cases() if c.dtype in ("float32", "int64")):
        if options.names and operator.group not in options.names:
            continue
        call = {
            "function": operator.operator,
            "arguments": list(operator.inputs().values()),
            "attributes": operator.attributes,
            "threads": threads,
        }
        versions.compare(operator.work, lambda process, call=call: process.ask("prepare_call", **call), OPERATORS)
    versions.close()
    columns = ["work, float32", "old ms", "new ms", "new / old, medians", "bests", ""]
    console.print(report.terminal_table("", columns, versions.lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
