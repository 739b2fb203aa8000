"""`python -m bench.precision [network …]`: training steps in bf16 beside float32 and PyTorch's autocast, on the CPU."""

import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata

import onnxgrad
from bench import results
from bench.peers import OURS, OURS_BF16, TORCH, TORCH_BF16
from bench.peers.process import Process
from bench.step_contest import StepContest

SIDES = (OURS_BF16, OURS, TORCH_BF16, TORCH)


def _processes(threads: int) -> tuple[Mapping[str, Process], str]:
    versions = [
        f"onnxgrad {onnxgrad.__version__}",
        f"onnxruntime {metadata.version('onnxruntime')}",
        f"{TORCH} {metadata.version('torch')}",
        f"Python {platform.python_version()}",
    ]
    return {side: Process() for side in SIDES}, ", ".join(versions)


CONTEST = StepContest(
    "precision", "Training steps in bf16 and in float32.", "bf16", "training step", SIDES, 0.02, results.PRECISION,
    _processes,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    from bench.training_cases import CASES  # imports PyTorch

    return CONTEST.main(arguments, [case for case in CASES if case.name in ("transformer", "mlp")])


if __name__ == "__main__":
    sys.exit(main())
