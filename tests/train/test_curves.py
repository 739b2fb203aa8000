"""Loss curves against PyTorch's: same start, same batches, four kinds of networks, every optimizer."""

import functools
import io
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
import torch
from tests.checks import same_bits
from tests.train.torch_optimizers import HuggingFaceAdamW, Lamb
from torch import Tensor, nn
from torch.nn import functional

from onnxgrad.passes import use_permuted_matmul as products
from onnxgrad.train import losses, optim
from onnxgrad.train.trainer import Trainer

pytestmark = pytest.mark.slow
STEPS, CLOSE = 100, 1e-3
FALLS = 0.7  # the last ten losses against the first ten: what is compared is training, not noise
KINK = 1e-5  # a ReLU's input or a difference within MaxPool's window that rounding might turn around
BATCH, CLASSES, WORDS, LENGTH = 16, 4, 20, 7


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def small_products_by_tiles(monkeypatch):
    """Where the processor has tiles: these networks are small, but stand for larger ones."""
    monkeypatch.setattr(products, "FEWEST", 1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, CLASSES))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.0), nn.Flatten(), nn.Linear(32, CLASSES),
    )  # fmt: skip


class GruClassifier(nn.Module):
    """Embedding, GRU, last state, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gru, self.head = nn.Embedding(WORDS, 8), nn.GRU(8, 12), nn.Linear(12, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.gru(self.embedding(tokens.T))
        return self.head(states[-1])


class Encoder(nn.Module):
    """Embedding, places, one layer of attention and one of GELU, mean, linear."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.embedding, self.places = nn.Embedding(WORDS, width), nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.places
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        scores = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(2))
        x = x + self.inner(self.between(x))
        return self.head(x.mean(1))


def vectors(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    x = rng.standard_normal((BATCH, 12)).astype(np.float32)
    return x, (x[:, 0] > 0) + 2 * (x[:, 1] + x[:, 2] > 0)


def images(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The class says which quarter is brighter."""
    label = rng.integers(0, CLASSES, BATCH)
    x = rng.standard_normal((BATCH, 1, 8, 8))
    for row, quarter in enumerate(label):
        x[row, 0, 4 * (quarter // 2) :, 4 * (quarter % 2) :][:4, :4] += 0.8
    return x.astype(np.float32), label


def words(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The class is that of the last word."""
    tokens = rng.integers(0, WORDS, (BATCH, LENGTH))
    tokens[:, 1::2] = tokens[:, -1:]
    return tokens, tokens[:, -1] % CLASSES


class Network(NamedTuple):
    """How to make one, and a batch for it."""

    make: Callable[[], nn.Module]
    batch: Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]


NETWORKS = {
    "mlp": Network(mlp, vectors),
    "cnn": Network(cnn, images),
    "gru": Network(GruClassifier, words),
    "transformer": Network(Encoder, words),
}


class Pair(NamedTuple):
    """One optimizer, ours and the other's."""

    ours: optim.Optimizer
    other: Callable[[Any], torch.optim.Optimizer]


part = functools.partial
OPTIMIZERS = {
    "sgd": Pair(optim.SGD(lr=0.05, momentum=0.9), part(torch.optim.SGD, lr=0.05, momentum=0.9)),
    "nesterov": Pair(
        optim.SGD(lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
        part(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    ),
    "adam": Pair(optim.Adam(lr=5e-3, weight_decay=1e-3), part(torch.optim.Adam, lr=5e-3, weight_decay=1e-3)),
    "adamw": Pair(optim.AdamW(lr=5e-3, weight_decay=0.1), part(torch.optim.AdamW, lr=5e-3, weight_decay=0.1)),
    "adamw_huggingface": Pair(
        optim.AdamW(lr=5e-3, eps=1e-4, weight_decay=0.1, form="huggingface"),
        part(HuggingFaceAdamW, lr=5e-3, eps=1e-4, decay=0.1),
    ),
    "adagrad": Pair(optim.Adagrad(lr=0.03), part(torch.optim.Adagrad, lr=0.03)),
    "rmsprop": Pair(optim.RMSprop(lr=2e-3), part(torch.optim.RMSprop, lr=2e-3)),
    "lamb": Pair(optim.Lamb(lr=0.01), part(Lamb, lr=0.01)),
}


def module(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name].make().train()


@functools.cache
def exported(name: str) -> onnx.ModelProto:
    file, (x, _) = io.BytesIO(), NETWORKS[name].batch(np.random.default_rng(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about itself
        torch.onnx.export(
            module(name), (torch.from_numpy(x),), file, dynamo=False, opset_version=18, input_names=["x"],
            output_names=["logits"], do_constant_folding=False, training=torch.onnx.TrainingMode.PRESERVE,
        )  # fmt: skip
    return onnx.load_from_string(file.getvalue())


def distance_from_kink(layer: nn.Module, given: Tensor) -> float:
    """How far a ReLU's inputs are from 0, or the two largest of a window from each other."""
    if isinstance(layer, nn.ReLU):
        return given.abs().min().item()
    if isinstance(layer, nn.MaxPool2d):
        windows = given.unfold(2, 2, 2).unfold(3, 2, 2).flatten(4).sort(-1).values
        return (windows[..., -1] - windows[..., -2])[windows[..., -1] > 0].min().item()
    return 1.0


def pytorch_run(name: str, optimizer: torch.optim.Optimizer, network: nn.Module) -> tuple[list[Any], list[float]]:
    """The batches of a run and its losses; batches whose gradient hangs on rounding are passed over."""
    rng, taken, found = np.random.default_rng(1), [], []
    distances: list[float] = []
    for layer in network.modules():
        layer.register_forward_hook(lambda own, given, _: distances.append(distance_from_kink(own, given[0].detach())))
    while len(found) < STEPS:
        x, target = NETWORKS[name].batch(rng)
        distances.clear()
        optimizer.zero_grad()
        loss = functional.cross_entropy(network(torch.from_numpy(x)), torch.from_numpy(target))
        if min(distances) < KINK:
            continue
        loss.backward()
        optimizer.step()
        taken.append({"x": x, "target": target})
        found.append(loss.item())
    return taken, found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NETWORKS)
def test_curve(name, optimizer):
    network, pair = module(name), OPTIMIZERS[optimizer]
    batches, expected = pytorch_run(name, pair.other(network.parameters()), network)
    first, second = (Trainer(exported(name), losses.CrossEntropy("logits"), pair.ours) for _ in range(2))
    got = [first.step(batch) for batch in batches]
    assert np.abs(np.array(got) / np.array(expected) - 1).max() < CLOSE
    assert np.mean(expected[-10:]) < FALLS * np.mean(expected[:10])
    assert [second.step(batch) for batch in batches] == got
    assert all(same_bits(a, second.parameters[n]) for n, a in first.parameters.items())
