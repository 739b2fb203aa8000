"""Train mode and inference mode: what BatchNormalization does in them, beside PyTorch."""

import numpy as np
import onnxruntime
import pytest
import torch
from tests.torch_export import export
from torch import nn
from torch.nn import functional

from onnxgrad.train import losses, optim
from onnxgrad.train.trainer import Trainer


class Standardized(nn.Module):
    """A convolution with weight standardization, as in NFNets, and a BatchNorm2d after it."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x):
        weight = self.conv.weight.reshape(1, 4, -1)
        weight = functional.batch_norm(weight, None, None, training=True, momentum=0.0, eps=1e-6)
        x = functional.conv2d(x, weight.reshape(self.conv.weight.shape), self.conv.bias)
        return self.last(functional.relu(self.norm(x)).mean((2, 3)))


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_statistics_that_other_nodes_compute(exporter, tmp_path):
    torch.manual_seed(0)
    network, x = Standardized(), torch.randn(4, 3, 6, 6)
    export(network, x, tmp_path / "m.onnx", dynamo=exporter == "dynamo")
    loss = losses.CrossEntropy("y")
    trainer = Trainer(tmp_path / "m.onnx", loss, optim.SGD(lr=0.1), [n for n, _ in network.named_parameters()])
    for name in trainer.statistics:  # the exporter has run the module, and moved them
        network.state_dict()[name].copy_(torch.from_numpy(trainer.statistics[name]))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(3):
        x, target = torch.randn(4, 3, 6, 6), torch.randint(0, 2, (4,))
        expected = functional.cross_entropy(network(x), target)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        found = trainer.step({"x": x.numpy(), "target": target.numpy()})
        np.testing.assert_allclose(found, expected.item(), rtol=1e-5)
    for name, parameter in network.named_parameters():
        np.testing.assert_allclose(trainer.parameters[name], parameter.detach(), rtol=1e-4, atol=1e-5)
    assert list(trainer.statistics) == ["norm.running_mean", "norm.running_var"]
    trainer.export(tmp_path / "trained.onnx")
    (y,) = onnxruntime.InferenceSession(tmp_path / "trained.onnx").run(None, {"x": x.numpy()})
    np.testing.assert_allclose(y, network.eval()(x).detach(), rtol=1e-4, atol=1e-5)


def test_a_file_exported_in_train_mode_keeps_its_statistics_where_they_are_frozen(tmp_path):
    """Its BatchNormalization has outputs for them, which it must not have in inference mode."""
    torch.manual_seed(0)
    network, x = (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 2)),
        torch.randn(4, 3, 6, 6),
    )
    export(network, x, tmp_path / "m.onnx", dynamo=False, training=torch.onnx.TrainingMode.TRAINING)
    trainer = Trainer(tmp_path / "m.onnx", losses.CrossEntropy("y"), optim.SGD(), "3.*", freeze_statistics=True)
    expected = functional.cross_entropy(network.eval()(x), torch.tensor([0, 1, 0, 1]))
    found = trainer.step({"x": x.numpy(), "target": np.array([0, 1, 0, 1])})
    np.testing.assert_allclose(found, expected.item(), rtol=1e-5)
    assert not trainer.statistics
