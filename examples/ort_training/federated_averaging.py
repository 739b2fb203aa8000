"""Federated averaging: devices train on pictures that stay with them, and a server averages their parameters.

A device sends the difference between its parameters and those it was given, as one array, and is sent the next ones.
"""

import argparse
import sys
from pathlib import Path

import digits
import numpy as np
import onnxruntime

from onnxgrad.ort_training import artifacts
from onnxgrad.ort_training.api import CheckpointState, Module, Optimizer

BUILD = Path(__file__).parents[2] / "build" / "ort_training_federated"
ROUNDS, DEVICES = 8, 5


class Phone:
    """A device with pictures of its own; it knows the artifacts, and a nominal checkpoint without any parameter."""

    def __init__(self, folder: Path, examples: digits.Examples, seed: int) -> None:
        self._examples, self._random = examples, np.random.default_rng(seed)
        state = CheckpointState.load_checkpoint(folder / "nominal_checkpoint")
        self._module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
        self._optimizer = Optimizer(folder / "optimizer_model.onnx", self._module)

    def train(self, parameters: np.ndarray) -> tuple[np.ndarray, float]:
        """An epoch that begins with the server's parameters; what changed, and the loss."""
        self._module.copy_buffer_to_parameters(_value(parameters), trainable_only=False)
        self._optimizer.set_learning_rate(0.3)
        loss = digits.train(self._module, self._optimizer, self._examples, self._random)
        return self._module.get_contiguous_parameters().numpy() - parameters, loss


def _value(array: np.ndarray) -> object:
    """An array as copy_buffer_to_parameters takes it in 1.19.2."""
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)._ortvalue


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=BUILD, help="folder for the artifacts and the trained model")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    artifacts.generate_artifacts(
        digits.network(),
        requires_grad=list(digits.WEIGHTS),
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.SGD,
        artifact_directory=options.out,
        nominal_checkpoint=True,
    )

    (pictures, labels), held_out = digits.load()
    parts = np.array_split(np.argsort(labels, kind="stable"), DEVICES)  # each device sees two or three of the digits
    phones = [Phone(options.out, (pictures[part], labels[part]), seed) for seed, part in enumerate(parts)]
    state = CheckpointState.load_checkpoint(options.out / "checkpoint")
    server = Module(options.out / "training_model.onnx", state, options.out / "eval_model.onnx").eval()
    parameters = server.get_contiguous_parameters().numpy()
    for number in range(options.rounds):
        changes, losses = zip(*(phone.train(parameters) for phone in phones), strict=True)
        sizes = [len(part) for part in parts]
        parameters = (parameters + np.average(changes, axis=0, weights=sizes)).astype(np.float32)
        server.copy_buffer_to_parameters(_value(parameters), trainable_only=False)
        loss = float(server(*held_out))
        print(f"round {number + 1}: loss {np.mean(losses):.3f} on the devices, {loss:.3f} on held-out pictures")

    server.export_model_for_inferencing(options.out / "trained.onnx", ["logits"])
    print(f"{digits.accuracy(options.out / 'trained.onnx', held_out):.1%} of held-out pictures right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
