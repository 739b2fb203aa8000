"""`python -m bench.first_use`: from the start of a process to the loss of its first training step, into first_use.csv.

Every process is a fresh one: with the kernels that wheels ship (`make kernels` writes them), with those that an earlier
process has compiled and kept, and with none; PyTorch and torch.compile beside it, whose cache is empty too. Processor
time is counted as well: unlike seconds, it is the same on a machine that others use.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import machine, report, results
from bench.first_step import COMPILED
from bench.measure import timing
from bench.peers import OURS, TORCH
from bench.quiet import Neighbours
from bench.results import Row, new_row
from bench.training_cases import CASES, TrainingCase

ROOT = Path(__file__).resolve().parents[1]
SHIPPED, KEPT, NOTHING = (f"{OURS}, {what}" for what in ("kernels shipped", "kernels kept", "kernels compiled"))
SIDES = (SHIPPED, KEPT, NOTHING, TORCH, COMPILED)
PROCESSOR = ", processor time"


def _first_step(side: str, case: TrainingCase, folder: Path, caches: Path) -> tuple[float, float]:
    """Seconds, and those of processors."""
    environment = {
        **os.environ,
        "NUMBA_CACHE_DIR": str(caches / "numba"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "ONNXGRAD_SHIPPED_KERNELS": str(int(side == SHIPPED)),
    }
    command = [sys.executable, "-m", "bench.first_step", side, case.name, str(folder)]
    start = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        seconds = time.perf_counter() - start
    if not line:
        raise RuntimeError(f"first_use: the process of {side}, {case.name} failed, see above")
    return seconds, float(line.split()[1])


def measured(cases: Sequence[TrainingCase], sides: Sequence[str], processes: int) -> Iterator[list[Row]]:
    """The rows of each case; sides take turns."""
    with tempfile.TemporaryDirectory() as name:
        for case in cases:
            case.write(Path(name))
            neighbours = Neighbours()
            taken: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
            for turn in range(processes):
                caches = {side: Path(name) / f"{case.name}-{turn}-{SIDES.index(side)}" for side in sides}
                for side in sides:
                    at = caches[side]
                    if side == KEPT:
                        at = Path(name) / f"{case.name}-kept"
                        if turn == 0:
                            _first_step(side, case, Path(name), at)
                    taken[side].append(_first_step(side, case, Path(name), at))
            yield list(_rows(case, taken, neighbours.note()))


def _rows(case: TrainingCase, taken: dict[str, list[tuple[float, float]]], note: str) -> Iterator[Row]:
    for side, found in taken.items():
        for what, seconds in zip((side, side + PROCESSOR), zip(*found, strict=True), strict=True):
            row = new_row(case.name, case.work, "float32", what, machine.versions("onnxruntime", "numba", "torch"))
            row.set_timing(timing(list(seconds)))
            row.note = note
            yield row


def _columns() -> list[str]:
    return ["", *SIDES]


def _lines(rows: Sequence[Row]) -> report.Lines:
    found = {(row.case, row.side): row for row in rows}
    names = {row.case: row.work for row in rows}
    return [[work, *(_cell(found, name, side) for side in SIDES)] for name, work in names.items()]


def _cell(found: dict[tuple[str, str], Row], case: str, side: str) -> str:
    both = [row.median_ms for key in (side, side + PROCESSOR) if (row := found.get((case, key))) and row.median_ms]
    return f"{both[0] / 1e3:.3g} ({both[1] / 1e3:.3g})" if len(both) == 2 else report.NOTHING


def tables(rows: Sequence[Row]) -> str:
    """A section for each kind of processor."""
    return report.sections(rows, "First steps on", "first_use", lambda r: report.markdown_table(_columns(), _lines(r)))


def _available(sides: Sequence[str]) -> list[str]:
    from onnxgrad.cpu.core.levels import shipped

    if shipped() is None and SHIPPED in sides:
        print("no kernels are shipped here, or other sources have changed: `make kernels` compiles them")
        return [side for side in sides if side != SHIPPED]
    return list(sides)


def main() -> int:
    from bench import pages  # which imports this module for its table

    parser = argparse.ArgumentParser(prog="python -m bench.first_use", description="Seconds to a first training step.")
    names = [case.name for case in CASES]
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--processes", type=int, default=3, help="of each side (default: 3)")
    parser.add_argument("--quick", action="store_true", help="a short look at ours: nothing is written")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(names):
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(names)}")
    cases = [case for case in CASES if not options.cases or case.name in options.cases]
    sides = _available([SHIPPED, NOTHING] if options.quick else SIDES)
    rows: list[Row] = []
    for found in measured(cases, sides, 1 if options.quick else options.processes):
        rows += found
        report.terminal().print(report.terminal_table("seconds (of processors)", _columns(), _lines(found)))
    if not options.quick:
        here = {(row.case, row.side) for row in rows}
        results.update(results.FIRST_USE, rows, lambda row: (row.case, row.side) in here, lambda row: row.case)
        pages.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
