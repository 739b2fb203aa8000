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
        assert set(trainer.parameters) == names
        assert any("left as they are" in remark for remark in trainer.remarks)
        tied = trainer.parameters["head.weight"]
        np.testing.assert_allclose(tied, module.head.weight.detach(), rtol=1e-4, atol=1e-6)
    trainer.export(tmp_path / "trained.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {given.name: ids.numpy()})
    np.testing.assert_allclose(result, module(ids).detach(), rtol=1e-3, atol=1e-5)


class Tables(nn.Module):
    """Tables that are read at places that do not depend on the input, some rows more than once."""

    def __init__(self):
        super().__init__()
        self.words, self.positions, self.types = nn.Embedding(11, 6), nn.Embedding(9, 6), nn.Embedding(2, 6)
        self.distances = nn.Parameter(torch.randn(9, 2))
        self.register_buffer("at", torch.arange(5)[:, None] - torch.arange(5) + 4)
        self.head = nn.Linear(6, 3)

    def forward(self, ids):
        at = torch.arange(5).expand(ids.shape)
        x = self.words(ids) + self.positions(at) + self.types(torch.zeros_like(at))
        scores = (x @ x.mT)[:, None] + self.distances[self.at].permute(2, 0, 1)[None]
        return self.head(scores.softmax(-1).sum(1) @ x)


def test_rows_that_are_read_more_than_once_share_a_gradient(tmp_path):
    torch.manual_seed(0)
    module, ids, target = Tables().eval(), torch.randint(0, 11, (4, 5)), torch.randn(4, 5, 3)
    path = str(tmp_path / "m.onnx")
    graph = exported(module, ids, path, True).graph
    trainer = onnxgrad.Trainer(path, onnxgrad.losses.MSE(graph.output[0].name), onnxgrad.optim.SGD(lr=0.02))
    assert set(trainer.parameters) == {name for name, _ in module.named_parameters()}
    assert trainer.parameters["types.weight"].size == 6
    assert trainer.parameters["positions.weight"].size == 30
    assert trainer.parameters["distances"].shape == (9, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
    for _ in range(5):
        ours = trainer.step({graph.input[0].name: ids.numpy(), "target": target.numpy()})
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(module(ids), target)
        loss.backward()
        optimizer.step()
        assert ours == pytest.approx(loss.item(), rel=1e-5)


def test_the_bias_of_an_unrolled_rnn_is_one(tmp_path):
    """The exporter computes the first step's product of zeros, which leaves a bias."""
    torch.manual_seed(0)
    module, x, target = nn.RNN(3, 4, batch_first=True), torch.randn(2, 3, 3), torch.randn(2, 3, 4)
    path = str(tmp_path / "m.onnx")
    graph = exported(module, x, path, True).graph
    trainer = onnxgrad.Trainer(path, onnxgrad.losses.MSE(graph.output[0].name), onnxgrad.optim.SGD(lr=0.1))
    trainer.step({graph.input[0].name: x.numpy(), "target": target.numpy()})
    nn.functional.mse_loss(module(x)[0], target).backward()
    assert set(trainer.gradients) == {name for name, _ in module.named_parameters()}
    for name in ("bias_ih_l0", "bias_hh_l0"):
        np.testing.assert_allclose(trainer.gradients[name], getattr(module, name).grad, rtol=1e-4, atol=1e-7)


class TwoNorms(nn.Module):
    """Fresh: their statistics are the same numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

    def forward(self, x):
        return self.first(x) * self.second(x * x)


def test_each_batch_normalization_has_statistics_of_its_own(tmp_path):
    torch.manual_seed(0)
    module, x, path = TwoNorms(), torch.randn(8, 3), str(tmp_path / "m.onnx")
    graph = exported(module, x, path, True).graph
    module = TwoNorms()
    trainer = onnxgrad.Trainer(path, onnxgrad.losses.MSE(graph.output[0].name), onnxgrad.optim.SGD(lr=0.1))
    trainer.step({graph.input[0].name: x.numpy(), "target": np.zeros((8, 3), np.float32)})
    module(x)
    for name, expected in module.named_buffers():
        if "running" in name:
            np.testing.assert_allclose(trainer.statistics[name], expected, rtol=1e-5, atol=1e-7)


class Copies(nn.Module):
    """Copies of a layer, which nn.TransformerEncoder makes with the same numbers; and a bias, expanded."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x) + self.bias.expand_as(x)


def test_copies_of_a_layer_train_apart(tmp_path):
    torch.manual_seed(0)
    module, x, target = Copies(), torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    path = str(tmp_path / "m.onnx")
    graph = exported(module, x, path, True).graph
    trainer = onnxgrad.Trainer(path, onnxgrad.losses.MSE(graph.output[0].name), onnxgrad.optim.SGD(lr=0.1))
    trainer.step({graph.input[0].name: x.numpy(), "target": target.numpy()})
    nn.functional.mse_loss(module(x), target).backward()
    assert set(trainer.gradients) == {name for name, _ in module.named_parameters()}
    np.testing.assert_allclose(trainer.gradients["bias"].ravel(), module.bias.grad, rtol=1e-4, atol=1e-6)
    for k, layer in enumerate(module.encoder.layers):
        found = trainer.gradients[f"encoder.layers.{k}.self_attn.in_proj_weight"]
        np.testing.assert_allclose(found.T, layer.self_attn.in_proj_weight.grad, rtol=1e-3, atol=1e-6)


class Gates(nn.Module):
    """Two of one value, and two layers of the same numbers; a clone of a scale of ones is no parameter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.layers[1].load_state_dict(self.layers[0].state_dict())
        self.gates = nn.ParameterList(nn.Parameter(torch.zeros(())) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, gate in zip(self.layers, self.gates, strict=True):
            x = x + gate * torch.tanh(layer(x)) + layer(x)
        return x * self.scale.clone()


def test_equal_weights_of_the_exporter_on_torchscript_train_apart(tmp_path):
    torch.manual_seed(0)
    expect_same_losses(Gates(), torch.randn(3, 4), str(tmp_path / "m.onnx"), dynamo=False)


class Called(nn.Module):
    """Layers that forward calls twice, and one that starts from the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.other.load_state_dict(self.linear.state_dict())
        self.lstm = nn.LSTM(4, 4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.lstm(self.linear(x))[0]
        return self.other(x)


def test_layers_that_are_called_twice_are_one(tmp_path):
    torch.manual_seed(0)
    trainer = expect_same_losses(Called(), torch.randn(3, 2, 4), str(tmp_path / "m.onnx"), dynamo=False)
    recurrent = {f"lstm.{kind}_l{k}" for kind in ("weight_ih", "weight_hh", "bias") for k in range(2)}
    assert set(trainer.parameters) == {"linear.weight", "other.weight", *recurrent}


class Appended(nn.Module):
    """Sequences come first: a bias that attention appends to the keys is repeated along the second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, add_bias_kv=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def test_a_bias_repeated_along_the_second_axis_is_one(tmp_path):
    torch.manual_seed(0)
    trainer = expect_same_losses(Appended(), torch.randn(5, 3, 8), str(tmp_path / "m.onnx"), dynamo=True)
    assert trainer.parameters["attention.bias_k"].size == 8


class Cross(nn.Module):
    """Copies of attention to something else, whose weight the exporter cuts into that of queries and of the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 8, 0.0), 2)
        for parameter in self.parameters():
            if parameter.ndim == 1:
                nn.init.normal_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(x, x.tanh())


def test_parts_of_equal_weights_train_apart(tmp_path):
    torch.manual_seed(0)
    expect_same_losses(Cross(), torch.randn(3, 2, 8), str(tmp_path / "m.onnx"), dynamo=False)


class Frames(nn.Module):
    """A token beside each frame of each example."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.linear = nn.Parameter(torch.randn(1, 1, 4)), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(0, 1)
        return self.linear(torch.cat([self.token.expand(len(x), -1, -1), x], 1))


def test_a_token_for_each_frame_is_one(tmp_path):
    torch.manual_seed(0)
    trainer = expect_same_losses(Frames(), torch.randn(2, 3, 5, 4), str(tmp_path / "m.onnx"), dynamo=True)
    assert trainer.parameters["token"].size == 4


def expect_same_losses(module: nn.Module, x: torch.Tensor, path: str, dynamo: bool) -> onnxgrad.Trainer:
    """Those of a few steps, exported by default and trained by default, beside PyTorch's."""
    graph = exported(module, x, path, dynamo).graph
    (given,), (output,) = graph.input, graph.output
    target = torch.randn(module(x).shape)
    trainer = onnxgrad.Trainer(path, onnxgrad.losses.MSE(output.name), onnxgrad.optim.SGD(lr=0.5))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(5):
        ours = trainer.step({given.name: x.numpy(), "target": target.numpy()})
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(module(x), target)
        loss.backward()
        optimizer.step()
        assert ours == pytest.approx(loss.item(), rel=1e-5)
    return trainer


class Positions(nn.Module):
    """A table of sines beside an embedding that is also the last layer: its name is gone, its numbers are not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        angles = torch.arange(20)[:, None] / 10000 ** (torch.arange(4) / 4)
        self.register_buffer("positions", torch.cat([angles.sin(), angles.cos()], 1), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        at = torch.arange(ids.shape[1]).unsqueeze(0) + 2
        return self.head(self.embedding(ids) + self.positions.index_select(0, at.view(-1)).view(1, -1, 8).detach())


def test_a_table_beside_a_shared_embedding_is_no_parameter(tmp_path):
    torch.manual_seed(0)
    path = str(tmp_path / "m.onnx")
    graph = exported(Positions().eval(), torch.randint(0, 11, (2, 5)), path, True).graph
    trainer = onnxgrad.Trainer(
        path, onnxgrad.losses.CrossEntropy(graph.output[0].name, axis=-1), onnxgrad.optim.SGD(lr=0.1)
    )
    assert sum(array.size for array in trainer.parameters.values()) == 11 * 8


class Causal(nn.Module):
    """Attention with a mask that forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]


@pytest.mark.parametrize("dynamo", [True, False], ids=["torch.export", "TorchScript"])
def test_nothing_is_said_of_masks_that_the_code_makes(tmp_path, dynamo):
    path = str(tmp_path / "m.onnx")
    (output,) = exported(Causal(), torch.randn(2, 3, 8), path, dynamo).graph.output
    trainer = onnxgrad.Trainer(path, onnxgrad.losses.MSE(output.name), onnxgrad.optim.SGD(lr=0.1))
    assert not trainer.remarks


def test_layers_of_nested_sequences_have_their_names(tmp_path):
    """The exporter on TorchScript repeats a Sequential's name in those of its layers: /0/0.0/MatMul."""
    module = nn.Sequential(nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh()), nn.Linear(4, 2, bias=False))
    path = str(tmp_path / "m.onnx")
    graph = exported(module, torch.randn(2, 5, 3), path, False).graph
    trainer = onnxgrad.Trainer(path, onnxgrad.losses.MSE(graph.output[0].name), onnxgrad.optim.SGD(lr=0.1))
    assert set(trainer.parameters) == {"0.0.weight", "1.weight"}
