"""The moving average of parameters, against PyTorch's AveragedModel; evaluated, exported, saved and resumed with it."""

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from tests.checks import on_threads, raises, same_bits
from tests.train.test_optim import SHAPES, fill, gradients, start
from tests.train.two_layers import batch, mlp

from onnxgrad.train import losses, metrics, optim
from onnxgrad.train.buffers import Buffers
from onnxgrad.train.trainer import Trainer

DECAY = 0.9


def trainer(**how):
    return Trainer(mlp(dropout=0.2), losses.CrossEntropy("logits"), optim.AdamW(lr=0.05), **{"ema": DECAY, **how})


def averaged(decay, steps, dtype, device=None):
    buffers = Buffers(SHAPES, dtype, device)
    fill(buffers, buffers.data, start(dtype))
    state = optim.Adam(lr=0.01).start(buffers, decay=decay)
    for step in range(steps):
        fill(buffers, buffers.grad, gradients(step, dtype))
        state.step()
    return {name: buffers.device.to_numpy(a) for name, a in buffers.views(state.slots[optim.AVERAGE]).items()}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("decay", [0.3, 0.9, 0.999])
def test_as_in_pytorch(decay, dtype):
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.tensor(a)) for a in start(dtype).values()])
    average = torch.optim.swa_utils.AveragedModel(
        module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay)
    )
    peer = torch.optim.Adam(module.parameters(), lr=0.01)
    for step in range(20):
        for parameter, gradient in zip(module, gradients(step, dtype).values(), strict=True):
            parameter.grad = torch.tensor(gradient)
        peer.step()
        average.update_parameters(module)
    tolerance = 1e-6 if dtype == np.float32 else 1e-12
    for mine, theirs in zip(averaged(decay, 20, dtype).values(), average.module, strict=True):
        assert np.allclose(mine, theirs.detach().numpy(), rtol=tolerance, atol=tolerance)


def test_threads_change_no_bit():
    found = []
    for count in (1, 2):
        with on_threads(count):
            found.append(averaged(DECAY, 3, np.float32))
    assert all(same_bits(found[0][name], found[1][name]) for name in SHAPES)


def test_evaluation_and_export_use_the_average(tmp_path):
    mine, plain = trainer(), trainer(ema=None)
    assert plain.averages == {}
    assert all(same_bits(mine.averages[name], a) for name, a in mine.parameters.items())
    for k in range(6):
        assert mine.step(batch(k)) == plain.step(batch(k))
    assert all(same_bits(mine.parameters[name], a) for name, a in plain.parameters.items())
    accuracy = {"accuracy": metrics.Accuracy("logits")}
    found = mine.evaluate([batch(9, 50)], accuracy)
    mine.export(tmp_path / "averaged.onnx")
    for name, average in mine.averages.items():
        assert not np.allclose(average, mine.parameters[name])
        plain.parameters[name][...] = average
    assert plain.evaluate([batch(9, 50)], accuracy) == found
    plain.export(tmp_path / "plain.onnx")
    assert (tmp_path / "plain.onnx").read_bytes() == (tmp_path / "averaged.onnx").read_bytes()
    exported = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "averaged.onnx").graph.initializer}
    assert all(same_bits(exported[name], a) for name, a in mine.averages.items())


def test_a_resumed_run_has_the_same_average(tmp_path):
    path = tmp_path / "run.safetensors"
    whole, first = trainer(accumulate=2), trainer(accumulate=2)
    for k in range(9):
        whole.step(batch(k))
    for k in range(5):
        first.step(batch(k))
    first.save(path)
    second = trainer(accumulate=2)
    second.restore(path)
    for k in range(5, 9):
        second.step(batch(k))
    assert all(same_bits(second.averages[name], a) for name, a in whole.averages.items())
    with raises(ValueError, f"{str(path)!r} has a moving average of the parameters: set ema to its decay, or start "
                "anew"):  # fmt: skip
        trainer(accumulate=2, ema=None).restore(path)
    trainer(ema=None).save(path)
    with raises(ValueError, f"{str(path)!r} has no moving average of the parameters: leave out ema, or start anew"):
        trainer().restore(path)


@pytest.mark.parametrize("decay", [0, 1, -0.1, 1.5])
def test_what_is_refused(decay):
    with raises(ValueError, f"Trainer: ema is {decay!r}, expected a decay above 0 and under 1, such as 0.999"):
        trainer(ema=decay)
