"""onnxruntime-training 1.19.2, which owns the module onnxruntime and stops at Python 3.11: a process of its own."""

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.peers import ORT_TRAINING, Array, CannotRunError, Inputs, OutputType
from bench.turn import Turn

ROOT = Path(__file__).resolve().parents[2]
INTERPRETER = ROOT / ".venv-peer" / "bin" / "python"
OLDEST = ROOT / ".oldest"
HOW_TO_GET_IT = "onnxruntime-training is not installed: make .venv-peer/ready gets it"

# What the kernels of 1.19.2 ask for where the contract is wider.
EXTRA_ATTRIBUTES = {"activations": ["sigmoid", "tanh"], "direction": "forward"}

# Its own words for what it cannot do, and ours.
REASONS = {"narrowing_error": "it has no negative steps on the innermost axis"}


class OrtTrainingPeer:
    """One-node models in ort_training_child.py, driven over its pipes by pickled messages."""

    name = ORT_TRAINING
    registers = False  # onnxgrad's operators

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._child: subprocess.Popen[bytes] | None = None

    def version(self) -> str:
        return str(self.ask({"do": "version"}))

    def prepare(
        self, operator: str, inputs: Inputs, attributes: Mapping[str, Any], outputs: Sequence[OutputType]
    ) -> tuple["_ThereSide", list[Array | None]]:
        results = self.ask(
            {
                "do": "prepare",
                "operator": _onnx_name(operator),
                "domain": "" if operator == "add" else "com.microsoft",
                "registers": self.registers,
                "inputs": list(inputs.items()),
                "outputs": [tuple(output) for output in outputs],
                "attributes": {**attributes, **(EXTRA_ATTRIBUTES if operator.startswith("gru") else {})},
                "threads": self._threads,
            }
        )
        return _ThereSide(self), results

    def prepare_training(self, model: Path, batch: Mapping[str, Array], steps: int) -> tuple["_ThereSide", list[float]]:
        """A training step of an .onnx file, and the losses of the first so many."""
        message = {"do": "prepare training", "model": str(model), "batch": dict(batch), "steps": steps}
        losses = self.ask({**message, "threads": self._threads})
        return _ThereSide(self), losses

    def ask(self, message: Mapping[str, Any]) -> Any:
        """Sends one message and waits for its answer."""
        child = self._running()
        assert child.stdin is not None and child.stdout is not None
        try:
            pickle.dump(message, child.stdin)
            child.stdin.flush()
            answer = pickle.load(child.stdout)
        except (EOFError, BrokenPipeError):
            self.close()
            raise CannotRunError("the process of onnxruntime-training died") from None
        if "cannot" in answer:
            reason = answer["cannot"].rpartition("Status Message: ")[2]
            raise CannotRunError(REASONS.get(reason, reason))
        return answer["result"]

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._child is None:
            self._child = subprocess.Popen(
                [*self._command(), "-m", "bench.peers.ort_training_child"],
                cwd=ROOT,
                env=self._environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        return self._child

    def _command(self) -> list[str]:
        if not INTERPRETER.exists():
            raise CannotRunError(HOW_TO_GET_IT)
        return [str(INTERPRETER)]

    def _environment(self) -> dict[str, str]:
        return dict(os.environ)


class StockPeer(OrtTrainingPeer):
    """The same models in a process with a stock onnxruntime, where onnxgrad brings the operators."""

    name = "onnxruntime"
    registers = True

    def __init__(self, threads: int, oldest: bool) -> None:
        super().__init__(threads)
        self._oldest = oldest

    def _command(self) -> list[str]:
        if self._oldest and not (OLDEST / "ready").exists():
            raise CannotRunError("the oldest onnxruntime is not installed: make .oldest/ready gets it")
        return [sys.executable]

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **({"PYTHONPATH": str(OLDEST)} if self._oldest else {})}


class _ThereSide:
    """The model that the other process holds ready."""

    def __init__(self, peer: OrtTrainingPeer) -> None:
        self._peer = peer

    def turn(self, seconds: float) -> Turn:
        return Turn(*self._peer.ask({"do": "turn", "seconds": seconds}))


def _onnx_name(operator: str) -> str:
    words = operator.split("_")
    return "".join(w.upper() if w == "gru" else w.capitalize() for w in words)
