"""Module on a GPU: the losses of 1.19.2 on the CPU, and parameters that go in and out."""

import numpy as np
import pytest
from tests.checks import DEVICE
from tests.ort_training.golden import VARIANTS, batches, expected, folder_of
from tests.runtime.sessions import needs_provider

from onnxgrad.ort_training.api import CheckpointState, Module, Optimizer

if DEVICE == "cuda":
    import tests.gpu  # noqa: F401, it switches TF32 off

pytestmark = [needs_provider, pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")]


def opened(name):
    folder = folder_of(name)
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx", device="cuda")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(float(expected(name)["rate"]))
    return state, module, optimizer


@pytest.mark.parametrize("name", VARIANTS)
def test_losses_are_those_of_1_19_2(name):
    _, module, optimizer = opened(name)
    data, losses = batches(name), []
    for step in range(20):
        losses.append(float(module(*data[step % len(data)])))
        optimizer.step()
        module.lazy_reset_grad()
    np.testing.assert_allclose(losses, expected(name)["losses"][:20], rtol=1e-4)


def test_parameters_gradients_and_checkpoints(tmp_path):
    state, module, optimizer = opened("mlp_ce_adamw")
    first, second, *_ = batches("mlp_ce_adamw")
    before = module.get_contiguous_parameters()
    assert before.device_name().lower() == "cuda"
    module(*first)
    alone = state.parameters["fc1.weight"].grad
    module(*second)
    assert alone.any() and (state.parameters["fc1.weight"].grad != alone).any()
    optimizer.step()
    CheckpointState.save_checkpoint(state, tmp_path / "saved", include_optimizer_state=True)
    again = CheckpointState.load_checkpoint(tmp_path / "saved")
    np.testing.assert_array_equal(again.parameters["fc1.weight"].data, state.parameters["fc1.weight"].data)
    module.copy_buffer_to_parameters(before, trainable_only=False)
    np.testing.assert_array_equal(module.get_contiguous_parameters().numpy(), before.numpy())
    state.parameters["fc1.weight"] = np.ones((12, 6), np.float32)
    assert (state.parameters["fc1.weight"].data == 1).all()
