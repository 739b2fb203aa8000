"""Training steps in a loop of PyTorch, of torch.Module and torch.wrap, beside Trainer.step and PyTorch's own.

`python -m bench.torch_module [NETWORK …]` prints how many times Trainer's time each takes: medians of steps taken in
turns. It writes no page.
"""

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from bench.clock import timed, wait_until_idle
from bench.training_cases import CASES, OPSET, TrainingCase
from bench.training_steps import DECAY, EPS, LEARNING_RATE, Step, onnxgrad_step
from onnxgrad.torch import Module, wrap

STEPS, WARM_UP = 12, 3
NETWORKS = ("transformer", "gru")


def main(names: list[str]) -> None:
    """Measures these networks."""
    threads = torch.get_num_threads()
    for case in (case for case in CASES if case.name in (names or NETWORKS)):
        with tempfile.TemporaryDirectory() as folder:
            times = measured(steps_of(case, Path(folder), threads))
        base = times["Trainer"]
        ratios = ", ".join(f"{name} {seconds / base:.2f}" for name, seconds in times.items())
        print(f"{case.work}: Trainer {1000 * base:.0f} ms; as many times that: {ratios}")


def steps_of(case: TrainingCase, folder: Path, threads: int) -> dict[str, Step]:
    """The sides, each with weights of its own."""
    path, batch = folder / "model.onnx", case.batch(case.full)
    path.write_bytes(case.exported(case.full, OPSET))
    return {
        "Trainer": onnxgrad_step(path, batch, threads),
        "Module": loop_step(Module(path), batch),
        "wrap": loop_step(wrap(case.module(case.full)), batch),
        "PyTorch": loop_step(case.module(case.full), batch),
    }


def loop_step(module: torch.nn.Module, batch: dict[str, Any]) -> Step:
    """A step as people write it."""
    x, target = torch.from_numpy(batch["x"]), torch.from_numpy(batch["target"])
    optimizer = torch.optim.AdamW(module.parameters(), LEARNING_RATE, eps=EPS, weight_decay=DECAY)

    def step() -> float:
        optimizer.zero_grad()
        loss = functional.cross_entropy(module(x), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def measured(steps: dict[str, Step]) -> dict[str, float]:
    """Seconds of a step, the sides in turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(WARM_UP + STEPS):
        for name, step in steps.items():
            wait_until_idle()  # the threads of the side before it
            times[name] += timed(step, 1)
    return {name: statistics.median(found[WARM_UP:]) for name, found in times.items()}


if __name__ == "__main__":
    main(sys.argv[1:])
