"""`python -m bench.building`: how long building a Trainer takes as chains of nodes grow, into building.csv.

Two chains: Tanh alone behind one product, and mixed operators with weights of their own, as layers of a network have.
Each size is built in a process of its own, which ends at a limit. Beside it, how long onnxruntime takes to open the
same model by itself, without gradients.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from bench import machine, report, results
from bench.quiet import Neighbours
from bench.results import Row, new_row

ROOT = Path(__file__).resolve().parents[1]
SIZES = (500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
MIXED, TANH = "mixed operators", "Tanh alone"
TRAINER, ALONE = "Trainer", "onnxruntime alone"
WIDTH, LIMIT = 16, 600.0


class _Chain:
    """A model of nodes that each read what the one before wrote."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def weight(self, array: np.ndarray) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def numbers(self, *shape: int) -> str:
        return self.weight((self._rng.standard_normal(shape) / WIDTH**0.5).astype(np.float32))

    def append(self, operator: str, *others: str) -> None:
        before, count = "x" if not self.nodes else f"h{len(self.nodes) - 1}", len(self.nodes)
        self.nodes.append(helper.make_node(operator, [before, *others], [f"h{count}"], f"n{count}"))


def _mixed(chain: _Chain) -> Iterator[None]:
    """Appends node after node, for as long as it is asked."""
    halves, whole = (chain.weight(np.array(dims)) for dims in ([-1, 2, WIDTH // 2], [-1, WIDTH]))
    while True:
        for operator, others in (
            ("MatMul", [(WIDTH, WIDTH)]),
            ("Add", [(WIDTH,)]),
            ("Relu", []),
            ("LayerNormalization", [(WIDTH,), (WIDTH,)]),
        ):
            chain.append(operator, *(chain.numbers(*shape) for shape in others))
            yield
        for operator, *names in (("Reshape", halves), ("Tanh",), ("Reshape", whole)):
            chain.append(operator, *names)
            yield


def _tanh(chain: _Chain) -> Iterator[None]:
    chain.append("MatMul", chain.numbers(WIDTH, WIDTH))
    yield
    while True:
        chain.append("Tanh")
        yield


def model(kind: str, nodes: int) -> onnx.ModelProto:
    """A chain of so many nodes."""
    chain = _Chain()
    for _, _ in zip(range(nodes), (_mixed if kind == MIXED else _tanh)(chain), strict=False):
        pass
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", WIDTH])
    y = helper.make_tensor_value_info(f"h{nodes - 1}", onnx.TensorProto.FLOAT, None)
    graph = helper.make_graph(chain.nodes, "chain", [x], [y], chain.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def child_main(kind: str, nodes: int) -> None:
    """Prints a line of seconds as soon as there is one: of the Trainer, then of onnxruntime alone."""
    import onnxruntime

    import onnxgrad

    def build(made: onnx.ModelProto) -> None:
        onnxgrad.Trainer(made, onnxgrad.losses.MSE(made.graph.output[0].name), onnxgrad.optim.AdamW())

    build(model(kind, 7))  # imports, and loads kernels
    made = model(kind, nodes)
    start = time.perf_counter()
    build(made)
    print(json.dumps({TRAINER: time.perf_counter() - start}), flush=True)
    data = made.SerializeToString()
    start = time.perf_counter()
    onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    print(json.dumps({ALONE: time.perf_counter() - start}), flush=True)


def _measure(kind: str, nodes: int, limit: float) -> list[Row]:
    command = [sys.executable, "-m", "bench.building", "--child", kind, "--sizes", str(nodes)]
    neighbours, note = Neighbours(), ""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False)
        told, errors = done.stdout, done.stderr.strip().splitlines()
        if done.returncode:
            note = errors[-1] if errors else f"exit code {done.returncode}"
    except subprocess.TimeoutExpired as expired:
        told, note = (expired.stdout or b"").decode(), f"over {limit:.0f} s"
    seconds = {side: found for line in told.splitlines() for side, found in json.loads(line).items()}
    rows = []
    for side in (TRAINER, ALONE):
        row = new_row(
            f"{kind}/{nodes}", f"{kind}, {nodes:,} nodes", "float32", side, machine.versions("onnx", "onnxruntime")
        )
        if side in seconds:
            row.median_ms, row.calls = 1e3 * seconds[side], 1
            row.note = neighbours.note()
        else:
            row.note = note
        rows.append(row)
    return rows


def _columns() -> list[str]:
    return ["nodes", *(f"{kind}, {what}" for kind in (MIXED, TANH) for what in ("s", "growth", ALONE))]


def _lines(rows: Sequence[Row]) -> report.Lines:
    """A line for each size: seconds, and how many times those of the size before."""
    found = {(row.case, row.side): row for row in rows}
    sizes = sorted({int(row.case.split("/")[1]) for row in rows})
    lines = []
    for before, nodes in zip([0, *sizes], sizes, strict=False):
        cells = [f"{nodes:,}"]
        for kind in (MIXED, TANH):
            now, earlier, alone = (
                found.get(key)
                for key in ((f"{kind}/{nodes}", TRAINER), (f"{kind}/{before}", TRAINER), (f"{kind}/{nodes}", ALONE))
            )
            many = report.ratio(now, earlier)
            grows = "" if many is None else f"{report.times(many)} for {report.times(nodes / before)}"
            cells += [_seconds(now), grows, _seconds(alone)]
        lines.append(cells)
    return lines


def _seconds(row: Row | None) -> str:
    if row is None:
        return report.NOTHING
    return row.note if row.median_ms is None else f"{row.median_ms / 1e3:.3g}"


def tables(rows: Sequence[Row]) -> str:
    """A section for each kind of processor."""
    return report.sections(rows, "Building on", "building", lambda r: report.markdown_table(_columns(), _lines(r)))


def main() -> int:
    from bench import pages  # which imports this module for its tables

    parser = argparse.ArgumentParser(prog="python -m bench.building", description="Seconds to build a Trainer.")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of nodes")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds that a size may take (default: 600)")
    parser.add_argument("--quick", action="store_true", help="a short look: nothing is written")
    parser.add_argument("--child", choices=(MIXED, TANH), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child_main(options.child, options.sizes[0])
        return 0
    rows = []
    for kind in (MIXED, TANH):
        for nodes in options.sizes:
            rows += (new := _measure(kind, nodes, options.limit))
            print(f"{kind}, {nodes:,} nodes: {_seconds(new[0])} s, {ALONE} {_seconds(new[1])} s", flush=True)
            if new[0].median_ms is None:
                break  # longer chains would end at the limit too
    report.terminal().print(report.terminal_table("", _columns(), _lines(rows)))
    if not options.quick:
        results.update(results.BUILDING, rows, lambda row: True, lambda row: 0)
        pages.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
