"""`make kernels`: compiles the kernels that wheels ship, for every level of processors.

What is shipped is what the operators' own cases and training steps ask for: no list is kept by hand.
"""

import os
import pickle
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
from bench.training_cases import CASES, OPSET
from rich.console import Console
from rich.progress import Progress
from tests.checks import FLOATS, on_threads
from tests.node_cases import NodeCase, all_cases

import onnxgrad
from onnxgrad.cpu.core import levels, warmup
from onnxgrad.cpu.core.ahead import launched
from onnxgrad.cpu.core.compilers import Wanted
from onnxgrad.cpu.core.compiling import asked_for
from onnxgrad.cpu.core.matmul import launch_matmul
from onnxgrad.cpu.core.recording import record
from onnxgrad.train import optim

TYPES = {str(dtype) for dtype in FLOATS} | {"int64", "int32", "bool"}  # those of operators' cases, as their names say

AMX = levels.LEVELS[-1].used_if_there


class Kernels:
    """Those that were asked for, in that order; those with AMX apart."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], Wanted] = {}

    def add(self, name: str, signature: object, needs: frozenset[str] = frozenset()) -> None:
        if isinstance(signature, tuple):  # not a C function, which is compiled where it is declared
            self.found.setdefault((name, repr(signature)), Wanted(name, signature, needs))


def kernels_of_cases(kernels: Kernels) -> None:
    """What the operators' cases would run, on processors without AMX and with it."""
    for has_amx, case in product((False, True), filter(is_shipped, all_cases())):
        with mock.patch.object(launch_matmul, "has_amx", lambda has_amx=has_amx: has_amx), record() as recording:
            case.op(*case.make_inputs(), **case.attributes, **chosen(case))
        for wanted in launched(recording, AMX if has_amx else frozenset()):
            kernels.add(*wanted)


def is_shipped(case: NodeCase) -> bool:
    return case.op.has_kernel("cpu") and case.parameters.get("type", "float32") in TYPES


def chosen(case: NodeCase) -> dict[str, object]:
    return {"outputs": case.outputs} if case.outputs and case.op.chooses_outputs else {}


def kernels_of_steps(kernels: Kernels) -> None:
    """What training steps run: those of the four networks, in both precisions, and all optimizers' of a small one."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "model.onnx"
        for case in CASES:
            path.write_bytes(case.exported(case.full, OPSET))  # its sizes choose kernels, too
            for precision in ("float32", "bf16"):
                train(path, case.batch(case.full), optim.AdamW(1e-3), precision)
        path.write_bytes(CASES[0].exported(CASES[0].small, OPSET))
        for optimizer in optimizers():
            train(path, CASES[0].batch(CASES[0].small), optimizer, "float32")


def optimizers() -> Iterator[optim.Optimizer]:
    for kind in vars(optim).values():
        if isinstance(kind, type) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer:
            yield kind(1e-3)


def train(path: Path, batch: dict[str, np.ndarray], optimizer: optim.Optimizer, precision: str) -> None:
    """Updates with what else a step may do, on several threads."""
    loss = onnxgrad.losses.CrossEntropy("logits")
    for clipping in ({"clip_norm": 1.0}, {"clip_value": 1.0}):
        trainer = onnxgrad.Trainer(path, loss, optimizer, precision=precision, accumulate=2, **clipping)
        with on_threads(2):
            for _ in range(2):
                trainer.step(batch)


def main() -> None:
    warmup.load_kernels()
    kernels = Kernels()
    with asked_for(lambda name, signature, found: kernels.add(name, signature)):
        kernels_of_cases(kernels)
        kernels_of_steps(kernels)
    wanted = list(kernels.found.values())
    warmup.LIST.parent.mkdir(exist_ok=True)
    warmup.LIST.write_bytes(pickle.dumps(wanted))
    console = Console(file=sys.stderr)
    for level in levels.LEVELS:
        with Progress(console=console) as progress:
            task = progress.add_task(level.name, total=len(wanted))
            warmup.build_archive(
                level, wanted, os.cpu_count() or 1, lambda module, count, task=task: progress.advance(task, count)
            )
        print(f"{level.archive}: {level.archive.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
