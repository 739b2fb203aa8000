"""Lets onnxruntime-training 1.19.2 write checkpoints and set learning rates, for tests/ort_training.

    .venv-peer/bin/python tests/data/make_checkpoints.py

checkpoints_1_19_2/saved is that of mlp_ce_adamw of artifacts_1_19_2 after 20 steps, with the optimizer's state and
properties; nominal is a nominal one of the same model. numbers.npz has the losses of the ten steps after the saved
ones, as "resumed", and the rates of LinearLRScheduler, at first and after each of 8 updates, as "<warmup>-<total>".
"""

import shutil
import tempfile
from pathlib import Path

import numpy as np
from make_artifacts import BATCHES, MODELS, model_of  # which makes the next imports possible
from onnxruntime.training import artifacts
from onnxruntime.training.api import CheckpointState, LinearLRScheduler, Module, Optimizer

TESTS = Path(__file__).parents[1] / "ort_training"
ARTIFACTS, FOLDER = TESTS / "artifacts_1_19_2" / "mlp_ce_adamw", TESTS / "checkpoints_1_19_2"
SAVED_AT, MORE = 20, 10
SCHEDULES = ((2, 5), (5, 2), (0, 4), (20, 3))
PROPERTIES = {"epoch": 3, "rate": 0.25, "name": "digits", "none": 0, "negative": -(2**40)}


def opened(checkpoint):
    """All three are to be kept: 1.19.2 does not do so itself, and dies if one of them is gone."""
    state = CheckpointState.load_checkpoint(checkpoint)
    module = Module(ARTIFACTS / "training_model.onnx", state)
    return state, module, Optimizer(ARTIFACTS / "optimizer_model.onnx", module)


def train(module, optimizer, steps):
    with np.load(ARTIFACTS / "expected.npz") as expected:
        x, labels = expected["input/x"], expected["input/labels"]
        optimizer.set_learning_rate(float(expected["rate"]))
    losses = []
    for step in steps:
        losses.append(module(x[step % BATCHES], labels[step % BATCHES]))
        optimizer.step()
        module.lazy_reset_grad()
    return np.array(losses)


def rates(warmup, total):
    state, module, optimizer = opened(ARTIFACTS / "checkpoint")
    scheduler = LinearLRScheduler(optimizer, warmup, total, 0.3)
    found = [optimizer.get_learning_rate()]
    for _ in range(8):
        optimizer.step()
        scheduler.step()
        found.append(optimizer.get_learning_rate())
    del scheduler, optimizer, module, state  # in this order
    return np.array(found)


def main():
    FOLDER.mkdir(exist_ok=True)
    state, module, optimizer = opened(ARTIFACTS / "checkpoint")
    train(module, optimizer, range(SAVED_AT))
    for name, value in PROPERTIES.items():
        state.properties[name] = value
    CheckpointState.save_checkpoint(state, FOLDER / "saved", include_optimizer_state=True)
    kept = opened(FOLDER / "saved")
    numbers = {"resumed": train(*kept[1:], range(SAVED_AT, SAVED_AT + MORE))}
    numbers |= {f"{warmup}-{total}": rates(warmup, total) for warmup, total in SCHEDULES}
    np.savez_compressed(FOLDER / "numbers.npz", **numbers)
    with tempfile.TemporaryDirectory() as folder:
        artifacts.generate_artifacts(
            model_of("mlp"), requires_grad=list(MODELS["mlp"][1]), loss=artifacts.LossType.CrossEntropyLoss,
            artifact_directory=folder, nominal_checkpoint=True,
        )  # fmt: skip
        shutil.copy(Path(folder) / "nominal_checkpoint", FOLDER / "nominal")


if __name__ == "__main__":
    main()
