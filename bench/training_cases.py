"""The networks whose training is timed: PyTorch modules, the .onnx files they are exported to, and a batch for each."""

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.peers import ORT_TRAINING, OURS, Array

OPSET = 18
PEER_OPSET = 15  # onnxruntime-training 1.19.2 does not train a LayerNormalization of one output: it gets it written out
CLASSES = 10


class GruClassifier(nn.Module):
    """Embedding, GRU, last state, linear."""

    def __init__(self, words: int, width: int, hidden: int) -> None:
        super().__init__()
        self.embedding, self.gru = nn.Embedding(words, width), nn.GRU(width, hidden)
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.gru(self.embedding(tokens))
        return self.head(states[-1])


class LstmClassifier(nn.Module):
    """Embedding, LSTM, last state, linear."""

    def __init__(self, words: int, width: int, hidden: int) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(words, width), nn.LSTM(width, hidden)
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        return self.head(states[-1])


class EncoderLayer(nn.Module):
    """Attention and two linear layers, each behind a LayerNorm and with a way around it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        attention = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1)
        x = x + self.out((attention @ v).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class Encoder(nn.Module):
    """Embedding, places, layers, mean, linear."""

    def __init__(self, words: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(words, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.Sequential(*(EncoderLayer(width, 4) for _ in range(layers)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens) + self.places).mean(1))


def _mlp(inputs: int, hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)
    )


def _cnn(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, channels, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(50 * channels, 128), nn.ReLU(), nn.Linear(128, CLASSES),
    )  # fmt: skip


def _normalized_cnn(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.BatchNorm2d(2 * channels), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(2 * channels, 4 * channels, 3, padding=1), nn.BatchNorm2d(4 * channels), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * channels, CLASSES),
    )  # fmt: skip


def _tokens(words: int, *shape: int) -> Array:
    return np.random.default_rng(0).integers(0, words, shape)


def _numbers(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@dataclass(frozen=True)
class Size:
    """One size of a network, and its input."""

    make: Callable[[], nn.Module]
    x: Callable[[], Array]


@dataclass(frozen=True)
class TrainingCase:
    """A network; `small` is its like that costs little, yet large enough to have everything loaded and compiled."""

    name: str
    work: str
    full: Size
    small: Size
    examples_axis: int = 0
    has_norms: bool = False  # BatchNormalizations, which are exported in train mode: in the other one they vanish

    def module(self, size: Size) -> nn.Module:
        """The same weights each time."""
        torch.manual_seed(0)
        return size.make()

    def batch(self, size: Size) -> dict[str, Array]:
        x = size.x()
        labels = np.random.default_rng(1).integers(0, CLASSES, x.shape[self.examples_axis])
        return {"x": x, "target": labels}

    def write(self, folder: Path) -> None:
        """The files that training_steps.step_of reads, of both sizes."""
        for name, size in (("full", self.full), ("small", self.small)):
            for opset, side in ((OPSET, OURS), (PEER_OPSET, ORT_TRAINING)):
                (folder / f"{self.name}-{name}-{side}.onnx").write_bytes(self.exported(size, opset))
            np.savez(folder / f"{self.name}-{name}.npz", **self.batch(size))

    def exported(self, size: Size, opset: int) -> bytes:
        """The .onnx file."""
        file = io.BytesIO()
        mode = torch.onnx.TrainingMode.TRAINING if self.has_norms else torch.onnx.TrainingMode.EVAL
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter, about itself
            torch.onnx.export(
                self.module(size), (torch.from_numpy(size.x()),), file, dynamo=False, opset_version=opset,
                input_names=["x"], output_names=["logits"], training=mode, do_constant_folding=not self.has_norms,
            )  # fmt: skip
        return file.getvalue()


CASES = (
    TrainingCase(
        "gru",
        "GRU classifier: 10,000 words, embedding 128, hidden 256, S64 N32",
        Size(lambda: GruClassifier(10_000, 128, 256), lambda: _tokens(10_000, 64, 32)),
        Size(lambda: GruClassifier(50, 8, 8), lambda: _tokens(50, 3, 2)),
        examples_axis=1,
    ),
    TrainingCase(
        "transformer",
        "Transformer encoder: 4 layers, 256 wide, S128 N16",
        Size(lambda: Encoder(5000, 128, 256, 4), lambda: _tokens(5000, 16, 128)),
        Size(lambda: Encoder(50, 32, 128, 1), lambda: _tokens(50, 2, 32)),
    ),
    TrainingCase(
        "mlp",
        "MLP: 784-1024-1024-10, N128",
        Size(lambda: _mlp(784, 1024), lambda: _numbers(128, 784)),
        Size(lambda: _mlp(64, 64), lambda: _numbers(32, 64)),
    ),
    TrainingCase(
        "cnn",
        "CNN: two 5×5 convolutions with 32 and 64 channels, 28×28, N64",
        Size(lambda: _cnn(32), lambda: _numbers(64, 1, 28, 28)),
        Size(lambda: _cnn(4), lambda: _numbers(32, 1, 28, 28)),
    ),
)

ARTIFACT_CASES = (
    *(case for case in CASES if case.name != "cnn"),
    TrainingCase(
        "cnn_bn",
        "CNN with BatchNormalization: three 3×3 convolutions with 32 to 128 channels, 32×32, N32",
        Size(lambda: _normalized_cnn(32), lambda: _numbers(32, 3, 32, 32)),
        Size(lambda: _normalized_cnn(4), lambda: _numbers(4, 3, 32, 32)),
        has_norms=True,
    ),
    TrainingCase(
        "lstm",
        "LSTM classifier: 10,000 words, embedding 128, hidden 256, S64 N32",
        Size(lambda: LstmClassifier(10_000, 128, 256), lambda: _tokens(10_000, 64, 32)),
        Size(lambda: LstmClassifier(50, 8, 8), lambda: _tokens(50, 3, 2)),
        examples_axis=1,
    ),
)
