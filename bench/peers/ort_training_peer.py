"""Models of one node: in onnxruntime-training 1.19.2, and in a stock onnxruntime with operators of onnxgrad."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.peers import ORT_TRAINING, Array, CannotRunError, Inputs, OutputType
from bench.peers.process import ROOT, Process

# onnxruntime-training owns the module onnxruntime and stops at Python 3.11, hence an environment of its own.
INTERPRETER = ROOT / ".venv-peer" / "bin" / "python"
OLDEST = ROOT / ".oldest"

# What the kernels of 1.19.2 ask for where the contract is wider.
EXTRA_ATTRIBUTES = {"activations": ["sigmoid", "tanh"], "direction": "forward"}

# Its own words for what it cannot do, and ours.
REASONS = {"narrowing_error": "it has no negative steps on the innermost axis"}


class OrtTrainingPeer:
    """One-node models in a process of onnxruntime-training's environment."""

    name = ORT_TRAINING
    registers = False  # onnxgrad's operators

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._process: Process | None = None

    def version(self) -> str:
        return str(self.process().ask("version"))

    def prepare(
        self, operator: str, inputs: Inputs, attributes: Mapping[str, Any], outputs: Sequence[OutputType]
    ) -> tuple[Process, list[Array | None]]:
        process = self.process()
        try:
            results = process.ask(
                "prepare_node",
                operator=_onnx_name(operator),
                domain="" if operator == "add" else "com.microsoft",
                registers=self.registers,
                inputs=list(inputs.items()),
                outputs=[tuple(output) for output in outputs],
                attributes={**attributes, **(EXTRA_ATTRIBUTES if operator.startswith("gru") else {})},
                threads=self._threads,
            )
        except CannotRunError as error:
            reason = str(error).rpartition("Status Message: ")[2]
            raise CannotRunError(REASONS.get(reason, reason)) from None
        return process, results

    def close(self) -> None:
        if self._process is not None:
            self._process.close()

    def process(self) -> Process:
        """The process that it runs in; CannotRunError with the way to get its environment."""
        self._process = self._process or self._make_process()
        return self._process

    def _make_process(self) -> Process:
        if not INTERPRETER.exists():
            raise CannotRunError("onnxruntime-training is not installed: make .venv-peer/ready gets it")
        return Process(INTERPRETER)


class StockPeer(OrtTrainingPeer):
    """The same models in a process with a stock onnxruntime, where onnxgrad brings the operators."""

    name = "onnxruntime"
    registers = True

    def __init__(self, threads: int, oldest: bool) -> None:
        super().__init__(threads)
        self._oldest = oldest

    def _make_process(self) -> Process:
        if self._oldest and not (OLDEST / "ready").exists():
            raise CannotRunError("the oldest onnxruntime is not installed: make .oldest/ready gets it")
        return Process(folder=OLDEST if self._oldest else None)


def _onnx_name(operator: str) -> str:
    words = operator.split("_")
    return "".join(w.upper() if w == "gru" else w.capitalize() for w in words)
