"""`python -m bench.step_files [network …]`: training steps as files in stock onnxruntime, beside the Trainer."""

import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata

import onnxgrad
from bench import results
from bench.peers import OURS, STOCK
from bench.peers.process import Process
from bench.step_contest import StepContest


def _processes(threads: int) -> tuple[Mapping[str, Process], str]:
    versions = [
        f"onnxgrad {onnxgrad.__version__}",
        f"onnxruntime {metadata.version('onnxruntime')}",
        f"Python {platform.python_version()}",
    ]
    return {OURS: Process(), STOCK: Process()}, ", ".join(versions)


CONTEST = StepContest(
    "step_files", "Training steps as files, in stock onnxruntime.", "Files in stock onnxruntime",
    "training step, float32", (OURS, STOCK), 1e-5, results.STEP_FILES, _processes,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    from bench.training_cases import CASES  # imports PyTorch

    return CONTEST.main(arguments, CASES)


if __name__ == "__main__":
    sys.exit(main())
