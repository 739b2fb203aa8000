"""Gradients of an embedding lookup and of a GRU at real sizes: checked against the definition, then timed."""

import csv
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import onnxgrad

console = Console()
RESULTS = Path(__file__).parents[1] / "bench" / "results.csv"


def best(function: Callable[[], Any], rounds: int = 7) -> float:
    """The shortest of several runs, in milliseconds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1000 * min(times)


def relative_error(results: Any, expected: Any) -> float:
    """The largest difference over all results, each relative to its own largest element."""
    pairs = zip(results, expected, strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs if a is not None)


def embedding(random: np.random.Generator) -> tuple[str, Callable[[], Any], Callable[[], Any]]:
    """A vocabulary of 30,522 words in 768 dimensions, 4,096 tokens with the frequencies of language."""
    tokens = np.minimum(random.zipf(1.3, (8, 512)) - 1, 30521)
    dY = random.standard_normal((8, 512, 768), dtype=np.float32)
    return (
        "embedding [30522, 768], 8 × 512 tokens",
        lambda: (onnxgrad.gather_grad([30522, 768], tokens, dY),),
        lambda: (onnxgrad.gather_grad.definition([30522, 768], tokens, dY.astype(np.float64)),),
    )


def gru(random: np.random.Generator) -> tuple[str, Callable[[], Any], Callable[[], Any]]:
    """64 steps of 32 sequences of different lengths, 128 inputs, 256 hidden units: forward and back."""
    steps, rows, inputs, hidden = 64, 32, 128, 256

    def normal(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    X, W, R, B = (
        normal(steps, rows, inputs),
        normal(1, 3 * hidden, inputs),
        normal(1, 3 * hidden, hidden),
        normal(1, 6 * hidden),
    )
    lengths = random.integers(1, steps + 1, rows).astype(np.int32)
    dHAll = normal(steps, 1, rows, hidden)

    def both(training: Callable[..., Any], grad: Callable[..., Any], dtype: type) -> Any:
        given = [a.astype(dtype) for a in (X, W, R, B)]
        HAll, _, ZRH = training(*given, lengths)
        return grad(*given, lengths, None, HAll, ZRH, dHAll.astype(dtype))

    return (
        f"GRU S{steps} N{rows} I{inputs} H{hidden}, forward and gradient",
        lambda: both(onnxgrad.gru_training, onnxgrad.gru_grad, np.float32),
        lambda: both(onnxgrad.gru_training.definition, onnxgrad.gru_grad.definition, np.float64),
    )


def show_measured_speed() -> None:
    """The benchmark's table, as last measured by `make bench`."""
    if not RESULTS.exists():
        console.print("No benchmark results yet: make bench measures them.")
        return
    with RESULTS.open() as file:
        rows = [r for r in csv.DictReader(file) if r["dtype"] in ("float32", "int64") and r["side"] != "memory"]
    table = Table(title="Measured by make bench, milliseconds a call", caption=rows[0]["machine"] if rows else None)
    sides = [side for side in dict.fromkeys(r["side"] for r in rows) if side not in ("onnxgrad into", "floor")]
    table.add_column("work", min_width=30)
    for side in sides:
        table.add_column({"onnxruntime-training": "ort 1.19.2"}.get(side, side), justify="right", no_wrap=True)
    for work in dict.fromkeys(r["work"] for r in rows):
        by_side = {r["side"]: r["best_ms"] for r in rows if r["work"] == work}
        cells = [by_side.get(side) or "" for side in sides]
        table.add_row(
            work, *(f"{float(c):.3g}" if c and float(c) < 1000 else f"{float(c):.0f}" if c else "–" for c in cells)
        )
    console.print(table)


def main() -> int:
    random = np.random.default_rng(0)
    table = Table(
        title=f"onnxgrad {onnxgrad.__version__}, {onnxgrad.get_num_threads()} threads, against the float64 definition"
    )
    table.add_column("gradient of", min_width=30)
    for heading in ("ms", "NumPy's ms", "faster", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for case in (embedding, gru):
        name, ours, definition = case(random)
        with console.status(f"{name}: compiling (first run only), then computing"):
            results = ours()
        with console.status(f"{name}: checking against the definition in float64"):
            error = relative_error(results, definition())
            if not error < 1e-5:
                console.print(f"[red]{name} is off by {error:.1e} from its definition[/red]")
                return 1
            fast, slow = best(ours), best(definition, rounds=1)
        table.add_row(name, f"{fast:.2f}", f"{slow:.0f}", f"{slow / fast:.0f}×", f"{error:.1e}")
    console.print(table)
    show_measured_speed()
    return 0


if __name__ == "__main__":
    sys.exit(main())
