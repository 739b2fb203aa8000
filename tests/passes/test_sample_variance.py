"""Running variances: PyTorch's in models that it exported, ONNX's in others."""

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from tests.torch_export import export
from torch import nn

from onnxgrad.train import losses, optim
from onnxgrad.train.trainer import Trainer


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=0.3)]
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(5), nn.BatchNorm1d(5))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_three_steps_beside_pytorch(exporter, dynamic, tmp_path):
    module, x = network(), torch.randn(4, 2, 6, 6)
    module(x)  # for the lazy layer
    model = export(module, x, tmp_path / "m.onnx", dynamo=exporter == "dynamo", dynamic=dynamic)
    parameters = [name for name, _ in module.named_parameters()]
    trainer = Trainer(model, losses.MSE("y"), optim.SGD(lr=0.1), parameters)
    assert len(trainer.statistics) == 6
    for name, array in trainer.statistics.items():
        module.state_dict()[name].copy_(torch.from_numpy(array))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        x, target = torch.randn(4, 2, 6, 6), torch.randn(4, 5)
        loss = nn.functional.mse_loss(module(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trainer.step({"x": x.numpy(), "target": target.numpy()})
    for name, array in trainer.statistics.items():
        np.testing.assert_allclose(array, module.state_dict()[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("producer", ["pytorch", "other"])
@pytest.mark.parametrize("shape", [["N", 3], [None, 3, None], [4, 3, 2], [1, 3], ["N", 3, 1]])
def test_both_forms(producer, shape):
    names = ["scale", "bias", "mean", "var"]
    arrays = [numpy_helper.from_array(np.full(3, k, np.float32), n) for n, k in zip(names, (1, 0, 0, 2), strict=True)]
    node = helper.make_node("BatchNormalization", ["x", *names], ["y"], name="norm", momentum=0.7)
    infos = [[helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, shape)] for n in "xy"]
    graph = helper.make_graph([node], "graph", *infos, arrays)
    opset = [helper.make_opsetid("", 20)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=10, producer_name=producer)
    trainer = Trainer(model, losses.MSE("y"), optim.SGD(lr=0.0), ["scale"])
    given = [d if isinstance(d, int) else 4 for d in shape]
    x = np.random.default_rng(0).standard_normal(given).astype(np.float32)
    trainer.step({"x": x, "target": x})
    n, rest = x.size // 3, tuple(k for k in range(x.ndim) if k != 1)
    factor = n / max(n - 1, 1) if producer == "pytorch" else 1
    np.testing.assert_allclose(trainer.statistics["var"], 0.7 * 2 + 0.3 * factor * x.var(rest), rtol=1e-5)
