"""What a process of bench/first_use.py runs: a first training step, and nothing imported that it does not need."""

import os
import sys
from pathlib import Path

from bench.peers import OURS, TORCH
from bench.training_steps import Step, step_of, torch_step

COMPILED = "torch.compile"


def _step(side: str, name: str, folder: Path) -> Step:
    threads = len(os.sched_getaffinity(0))
    if side != COMPILED:
        return step_of(TORCH if side == TORCH else OURS, folder, name, "full", threads)
    import torch

    from bench.training_cases import CASES

    case = next(c for c in CASES if c.name == name)
    return torch_step(torch.compile(case.module(case.full)), case.batch(case.full), threads)


def main() -> None:
    """Prints the loss, and the processor time up to there."""
    side, name, folder = sys.argv[1:]
    print(_step(side, name, Path(folder))(), sum(os.times()[:4]), flush=True)


if __name__ == "__main__":
    main()
