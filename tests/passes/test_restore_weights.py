"""Parameters of PyTorch modules, through both exporters, by default settings: names, number and training as there."""

import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import onnxgrad


class Shared(nn.Module):
    """Fresh norms, biases that are 0, a scale of its own, and an embedding that is also the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.gain = nn.Parameter(torch.full((8,), 0.3))
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.register_buffer("table", torch.rand(1, 6, 8))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        for layer in self.layers:
            nn.init.zeros_(layer.bias)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embedding(ids)
        h = torch.cat([self.token.expand(len(ids), -1, -1), h], 1) * self.table
        for norm, layer in zip(self.norms, self.layers, strict=True):
            h = h + torch.tanh(layer(norm(h))) * self.gain.view(1, 1, -1) * 0.5
        return self.head(h)


def exported(module: nn.Module, example: torch.Tensor, path: str, dynamo: bool) -> onnx.ModelProto:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (example,), path, dynamo=dynamo)
    return onnx.load(path, load_external_data=False)


@pytest.mark.parametrize("dynamo", [True, False], ids=["torch.export", "TorchScript"])
def test_default_exports_train_as_in_pytorch(tmp_path, dynamo):
    torch.manual_seed(0)
    module, ids = Shared().eval(), torch.randint(0, 11, (2, 5))
    path = str(tmp_path / "m.onnx")
    graph = exported(module, ids, path, dynamo).graph
    (given,), (output,) = graph.input, graph.output
    target = torch.randn(2, 6, 11)
    trainer = onnxgrad.Trainer(path, onnxgrad.losses.MSE(output.name), onnxgrad.optim.SGD(lr=0.1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(5):
        ours = trainer.step({given.name: ids.numpy(), "target": target.numpy()})
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(module(ids), target)
        loss.backward()
        optimizer.step()
        assert ours == pytest.approx(loss.item(), rel=1e-5)
    if dynamo:
        names = {name for name, _ in module.named_parameters()} - {"embedding.weight"} | {"head.weight"}
        assert names - set(trainer.parameters) == {"gain", "token"}  # computed beforehand: one of them, but which
        assert len(trainer.parameters) == len(names)
        assert any("left as they are" in remark for remark in trainer.remarks)
        tied = trainer.parameters["head.weight"]
        np.testing.assert_allclose(tied, module.head.weight.detach(), rtol=1e-4, atol=1e-6)
    trainer.export(tmp_path / "trained.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {given.name: ids.numpy()})
    np.testing.assert_allclose(result, module(ids).detach(), rtol=1e-3, atol=1e-5)
