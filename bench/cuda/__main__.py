"""`python -m bench.cuda [groups] [--csv FILE]`: medians of triton's do_bench, one table and one CSV."""

import argparse
import csv
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.testing import do_bench

from bench.cuda.cases import GROUPS, Case

FIELDS = ("group", "work", "dtype", "side", "ms", "floor_ms", "limit_ms", "met", "device", "torch", "triton")


def measure(case: Case) -> list[dict[str, object]]:
    """A row for each side, ours with its limit."""
    for what, (mine, theirs) in case.checks.items():
        error = float((mine - theirs).detach().norm() / theirs.detach().norm())
        if not error < 2e-3:  # tf32 on both sides
            raise SystemExit(f"{case.work}: {what} differs from torch's by {error:.2g}, nothing to time")
    times = {side: _median(call) for side, call in case.sides.items()}
    times["captured"] = _median(_captured(case.sides["onnxgrad"]))
    limit = case.most_ms
    if case.times_floor is not None:
        limit = case.times_floor * case.floor_ms
    if case.not_slower:
        limit = times["torch"]
    rows: list[dict[str, object]] = []
    for side, ms in times.items():
        bound = limit if side in ("onnxgrad", "captured") else None
        rows.append(
            {
                "group": case.group,
                "work": case.work,
                "dtype": case.dtype,
                "side": side,
                "ms": f"{ms:.4f}",
                "floor_ms": f"{case.floor_ms:.4f}" if case.bytes_moved else "",
                "limit_ms": f"{bound:.4f}" if bound else "",
                "met": "" if bound is None else "yes" if ms <= bound else "no",
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "triton": triton.__version__,
            }
        )
    return rows


def _median(call: Callable[[], Any]) -> float:
    return float(do_bench(call, warmup=50, rep=200, return_mode="median"))


def _captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """The replay of a captured call: what the GPU takes, without Python."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    replay: Callable[[], Any] = graph.replay
    return replay


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cuda", description=__doc__)
    parser.add_argument("group", nargs="*", help=f"{', '.join(GROUPS)} (default: all)")
    parser.add_argument("--csv", type=Path, help="where to write every row")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no NVIDIA GPU here, or none that torch sees")
        return 2
    rows = []
    for group in options.group or GROUPS:
        for case in GROUPS[group]():
            measured = measure(case)
            rows += measured
            print(
                f"{case.work:62} {case.dtype:9}",
                *(f"{r['side']} {r['ms']}" for r in measured),
                f"floor {measured[0]['floor_ms'] or '-'} limit {measured[0]['limit_ms'] or '-'}",
                f"{measured[0]['met']}/{measured[-1]['met']}",
                flush=True,
            )
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
