"""`python -m bench.step_profile`: what takes the time of a training step, by onnxruntime's profiler, on one thread.

With one thread, and of each node its fastest run, a machine that others use tells the same shares as a quiet one.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import onnxgrad
from bench import machine, results
from bench.results import Row, new_row
from bench.training_cases import CASES, TrainingCase
from bench.training_steps import DECAY, EPS, LEARNING_RATE

STEPS = 30
PRODUCTS = {
    "Conv", "ConvGrad", "FusedConv", "FusedGemm", "FusedMatMul", "GRUGrad", "GRUTraining", "Gemm", "MatMul",
    "PermutedMatMul",
}  # fmt: skip
PRODUCTS_FORWARD, REST_FORWARD = "forward: products", "forward: other operators"
PRODUCTS_BACKWARD, REST_BACKWARD = "backward: products", "backward: other operators"
BETWEEN, UPDATE = "onnxruntime between nodes", "batch check and AdamW"
PARTS = (PRODUCTS_FORWARD, REST_FORWARD, PRODUCTS_BACKWARD, REST_BACKWARD, BETWEEN, UPDATE)
KERNEL = "_kernel_time"


def measured(case: TrainingCase, folder: Path) -> dict[str, float]:
    """Milliseconds by part."""
    model, batch = folder / f"{case.name}.onnx", case.batch(case.full)
    model.write_bytes(case.exported(case.full, 18))
    trainer = _profiled_trainer(model, folder)
    trainer.step(batch)  # which compiles and plans
    seconds = [_seconds(trainer, batch) for _ in range(STEPS)]
    events = json.loads(Path(trainer._runner.session._session.end_profiling()).read_text())
    runs = list(_runs(events))
    parts = dict.fromkeys(PARTS, 0.0)
    for (name, operator), milliseconds in _fastest(runs[1:]).items():
        parts[part_of(name, operator)] += milliseconds
    parts[BETWEEN] = min(run.milliseconds - sum(run.nodes.values()) for run in runs[1:])
    parts[UPDATE] = min(1e3 * step - run.milliseconds for step, run in zip(seconds, runs[1:], strict=True))
    return parts


def _profiled_trainer(model: Path, folder: Path) -> onnxgrad.Trainer:
    from onnxgrad.train import session

    own_options = session.own_options

    def options(quiet: bool) -> Any:
        found = own_options(quiet)
        found.enable_profiling, found.profile_file_prefix = True, str(folder / "profile")
        return found

    loss = onnxgrad.losses.CrossEntropy("logits")
    optimizer = onnxgrad.optim.AdamW(lr=LEARNING_RATE, eps=EPS, weight_decay=DECAY)
    with mock.patch.object(session, "own_options", options):
        return onnxgrad.Trainer(model, loss, optimizer)


def _seconds(trainer: onnxgrad.Trainer, batch: Mapping[str, Any]) -> float:
    start = time.perf_counter()
    trainer.step(batch)
    return time.perf_counter() - start


class _Run(NamedTuple):
    """A run of the session: milliseconds, and those of its nodes by name and operator."""

    milliseconds: float
    nodes: dict[tuple[str, str], float]


def _runs(events: Sequence[Mapping[str, Any]]) -> Iterator[_Run]:
    """The profiler writes the events of a run's nodes before that of the run."""
    nodes: dict[tuple[str, str], float] = {}
    for event in events:
        if event["name"] == "model_run":
            yield _Run(event["dur"] / 1e3, nodes)
            nodes = {}
        elif event["cat"] == "Node" and event["name"].endswith(KERNEL):
            nodes[event["name"].removesuffix(KERNEL), event["args"]["op_name"]] = event["dur"] / 1e3


def _fastest(runs: Sequence[_Run]) -> dict[tuple[str, str], float]:
    return {node: min(run.nodes[node] for run in runs) for node in runs[0].nodes}


def part_of(name: str, operator: str) -> str:
    """The part of a step that a node belongs to; the engine ends the names of its nodes with "_grad/…"."""
    backward = "_grad" in name or operator.endswith("Grad")
    if operator in PRODUCTS:
        return PRODUCTS_BACKWARD if backward else PRODUCTS_FORWARD
    return REST_BACKWARD if backward else REST_FORWARD


def main() -> int:
    onnxgrad.set_num_threads(1)
    versions, rows = machine.versions("onnxruntime"), list[Row]()
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            parts = measured(case, Path(folder))
        for part, milliseconds in parts.items():
            row = new_row(case.name, case.work, "float32", part, versions)
            row.best_ms, row.calls = milliseconds, STEPS
            rows.append(row)
            print(f"{case.name:12} {part:28} {milliseconds:8.3f} ms  {milliseconds / sum(parts.values()):4.0%}")
    results.update(results.PROFILE, rows, lambda old: True, lambda row: [case.name for case in CASES].index(row.case))
    return 0


if __name__ == "__main__":
    sys.exit(main())
