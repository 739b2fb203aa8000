"""Trainer and artifacts: it goes on where they are, with 1.19.2's numbers, and checkpoints go both ways."""

import numpy as np
import pytest
from tests.ort_training.golden import CHECKPOINTS, VARIANTS, batches, expected, folder_of, numbers

import onnxgrad
from onnxgrad.ort_training import trainers
from onnxgrad.ort_training.api import CheckpointState, Module, Optimizer
from onnxgrad.ort_training.checkpoint_file import read_checkpoint

MLP = "mlp_ce_adamw"


def named(name):
    """The batches of a variant, as a trainer takes them."""
    inputs = {key.partition("/")[2]: array for key, array in expected(name).items() if key.startswith("input/")}
    return [dict(zip(inputs, batch, strict=True)) for batch in batches(name)]


def at_rate(rate):
    """A schedule that makes of a trainer's rate, which is 0.001, another one."""
    return lambda steps: rate / 1e-3


@pytest.mark.parametrize("name", VARIANTS)
def test_a_trainer_of_artifacts_has_the_losses_of_1_19_2(name):
    trainer = trainers.open_artifacts(folder_of(name), schedule=at_rate(float(expected(name)["rate"])))
    data = named(name)
    losses = [trainer.step(data[k % len(data)]) for k in range(20)]
    np.testing.assert_allclose(losses, expected(name)["losses"][:20], rtol=1e-5)


def test_checkpoints_go_both_ways(tmp_path):
    folder, data = folder_of(MLP), named(MLP)
    for file in ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    (tmp_path / "checkpoint").write_bytes((CHECKPOINTS / "saved").read_bytes())
    trainer = trainers.open_artifacts(tmp_path, schedule=at_rate(0.01))
    assert trainer.steps == 20
    losses = [trainer.step(data[k % len(data)]) for k in range(20, 25)]
    np.testing.assert_allclose(losses, numbers()["resumed"][:5], rtol=1e-5)

    trainers.save_checkpoint(trainer, tmp_path / "later", like=CHECKPOINTS / "saved")
    saved = read_checkpoint(tmp_path / "later")
    assert saved.properties["name"] == "digits" and saved.groups["group0"].step == 25
    state = CheckpointState.load_checkpoint(tmp_path / "later")
    module = Module(folder / "training_model.onnx", state)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.01)
    more = []
    for k in range(25, 30):
        more.append(float(module(*data[k % len(data)].values())))
        optimizer.step()
        module.lazy_reset_grad()
    np.testing.assert_allclose(more, numbers()["resumed"][5:], rtol=1e-5)

    trainer.save(tmp_path / "own.safetensors")
    again = trainers.open_artifacts(folder)
    trainers.load_checkpoint(again, tmp_path / "later")
    assert again.steps == 25
    for name, array in trainer.parameters.items():
        np.testing.assert_array_equal(again.parameters[name], array)
    again.restore(tmp_path / "own.safetensors")  # of the same kind


def test_without_a_model_checkpoint_all_that_is_trained_is_saved(tmp_path):
    trainer = trainers.open_artifacts(folder_of("cnn_ce_sgd"))
    trainer.step(named("cnn_ce_sgd")[0])
    trainers.save_checkpoint(trainer, tmp_path / "saved")
    found = read_checkpoint(tmp_path / "saved")
    frozen = {name for name, p in found.parameters.items() if not p.requires_grad}
    assert frozen == {"bn.mean", "bn.variance"} and found.groups["group0"].step == 1
    assert all(not m["momentum0"].any() for m in found.groups["group0"].momenta.values())
    for name, array in (*trainer.parameters.items(), *trainer.statistics.items()):
        np.testing.assert_array_equal(found.parameters[name].data, array)


def test_refusals(tmp_path):
    trainer = trainers.open_artifacts(folder_of(MLP), optimizer=onnxgrad.optim.SGD(lr=0.1, momentum=0.9))
    with pytest.raises(ValueError, match="has no SGD with the trainer's settings"):
        trainers.save_checkpoint(trainer, tmp_path / "saved")
    other = trainers.open_artifacts(folder_of("gru_ce_adamw"))
    with pytest.raises(ValueError, match=r"checkpoint' lacks the parameter 'gru\."):
        trainers.load_checkpoint(other, folder_of(MLP) / "checkpoint")
    with pytest.raises(ValueError, match="lacks the parameter 'gru"):
        trainers.save_checkpoint(other, tmp_path / "saved", like=folder_of(MLP) / "checkpoint")
    with pytest.raises(FileNotFoundError, match="checkpoint' does not exist"):
        trainers.open_artifacts(tmp_path)
