"""`python -m bench.ort_training [network …]`: a step of Module and Optimizer with artifacts of onnxruntime-training.

Both sides train with the same files, which onnxruntime-training 1.19.2 generates, each in a process of its own.
"""

import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata

import onnxgrad
from bench import results
from bench.peers import MODULE, ORT_TRAINING
from bench.peers.ort_training_peer import OrtTrainingPeer
from bench.peers.process import Process
from bench.step_contest import StepContest


def _processes(threads: int) -> tuple[Mapping[str, Process], str]:
    peer = OrtTrainingPeer(threads)
    versions = [
        f"onnxgrad {onnxgrad.__version__}",
        f"onnxruntime {metadata.version('onnxruntime')}",
        f"{ORT_TRAINING} {peer.version()}",
        f"Python {platform.python_version()}",
    ]
    return {ORT_TRAINING: peer.process(), MODULE: Process()}, ", ".join(versions)  # the first writes the artifacts


CONTEST = StepContest(
    "ort_training", "Artifacts, there and here.", "Artifacts", "training step, float32", (MODULE, ORT_TRAINING), 1e-5,
    results.ARTIFACTS, _processes,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    from bench.training_cases import ARTIFACT_CASES  # imports PyTorch

    return CONTEST.main(arguments, ARTIFACT_CASES)


if __name__ == "__main__":
    sys.exit(main())
