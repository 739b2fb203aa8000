"""Small networks of the usual kinds, in PyTorch, each with its loss: module(*inputs) is a scalar."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH, LENGTH, WORDS, CLASSES = 3, 5, 11, 4
OTHER_BATCH, OTHER_LENGTH = 2, 7  # what a model with dynamic dimensions is run with


class Mlp(nn.Module):
    """Linear layers with LayerNorm and GELU, mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, CLASSES)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(self.body(x), target)


class LeNet(nn.Module):
    """Convolutions, average pooling, tanh, linear layers, cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(4, 6, 3), nn.Tanh(), nn.AvgPool2d(2)
        )
        self.classifier = nn.Sequential(nn.Linear(24, 10), nn.Tanh(), nn.Linear(10, CLASSES))

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        return functional.cross_entropy(self.classifier(self.features(image).flatten(1)), label)


class Block(nn.Module):
    """Two convolutions with BatchNorm and a way around them."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outside)
        self.second = nn.Conv2d(outside, outside, 3, padding=1, groups=2, bias=False)
        self.second_norm = nn.BatchNorm2d(outside)
        self.around = nn.Conv2d(inside, outside, 1, stride) if inside != outside else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(inner)) + self.around(x))


class ResNet(nn.Module):
    """Residual blocks, max pooling, global pooling, cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(Block(4, 4, 1), Block(4, 6, 2))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        features = functional.adaptive_avg_pool2d(self.blocks(self.stem(image)), 1).flatten(1)
        return functional.cross_entropy(self.head(features), label)


class Recurrent(nn.Module):
    """Embedding, a recurrent layer in both directions, cross entropy of its last state."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 6)
        self.layer = kind(6, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, CLASSES)

    def forward(self, tokens: Tensor, label: Tensor) -> Tensor:
        states, _ = self.layer(self.embedding(tokens))
        return functional.cross_entropy(self.head(states.mean(1)), label)


class Encoder(nn.Module):
    """Embedding and PyTorch's own encoder layer, cross entropy of the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor, label: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.layer(self.embedding(tokens)).mean(1)), label)


class Gpt(nn.Module):
    """Causal attention, predicting the next token; the head shares the embedding's weights."""

    def __init__(self, heads: int = 2, width: int = 8, longest: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.tokens, self.places = nn.Embedding(WORDS, width), nn.Embedding(longest, width)
        self.before, self.between, self.after = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.places(torch.arange(length))
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        x = x + self.inner(self.between(x))
        scores = self.after(x) @ self.tokens.weight.T
        return functional.cross_entropy(scores.flatten(0, 1), following.flatten())


class UNet(nn.Module):
    """Down, up by Resize and by ConvTranspose, joined with what came before; mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())
        self.second = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.InstanceNorm2d(6, affine=True), nn.LeakyReLU())
        self.third = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.ELU())
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 1, 1)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        first = self.first(image)
        second = self.second(functional.max_pool2d(first, 2))
        third = self.third(functional.avg_pool2d(second, 2))
        back = functional.interpolate(third, scale_factor=2.0, mode="bilinear", align_corners=False)
        joined = torch.cat([first, self.up(second + back)], 1)
        return functional.mse_loss(self.last(joined), target)


class Network(NamedTuple):
    """How to make one, its inputs for a batch and a length, and which of their dimensions these are."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], dict[str, Tensor]]
    sequence: tuple[str, ...] = ()  # inputs whose second dimension is the length
    training: bool = True


def _vectors(batch: int, length: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, 6), "target": torch.randn(batch, CLASSES)}


def _images(channels: int, size: int) -> Callable[[int, int], dict[str, Tensor]]:
    def make(batch: int, length: int) -> dict[str, Tensor]:
        return {"image": torch.randn(batch, channels, size, size), "label": torch.randint(CLASSES, (batch,))}

    return make


def _pictures(batch: int, length: int) -> dict[str, Tensor]:
    return {"image": torch.randn(batch, 1, 8, 8), "target": torch.randn(batch, 1, 8, 8)}


def _texts(batch: int, length: int) -> dict[str, Tensor]:
    return {"tokens": torch.randint(WORDS, (batch, length)), "label": torch.randint(CLASSES, (batch,))}


def _continued(batch: int, length: int) -> dict[str, Tensor]:
    return {"tokens": torch.randint(WORDS, (batch, length)), "following": torch.randint(WORDS, (batch, length))}


NETWORKS: dict[str, Network] = {
    "mlp": Network(Mlp, _vectors),
    "lenet": Network(LeNet, _images(1, 14)),
    "resnet_eval": Network(ResNet, _images(3, 8), training=False),
    "resnet_train": Network(ResNet, _images(3, 8)),
    "gru": Network(lambda: Recurrent(nn.GRU), _texts, ("tokens",)),
    "lstm": Network(lambda: Recurrent(nn.LSTM), _texts, ("tokens",)),
    "encoder": Network(Encoder, _texts, ("tokens",)),
    "gpt": Network(Gpt, _continued, ("tokens", "following")),
    "unet": Network(UNet, _pictures),
}


def made(network: Network) -> Any:
    """The module, the same each time; no two parameters alike, for exporters make one of those that are."""
    torch.manual_seed(0)
    module = network.make().train(network.training)
    for parameter in module.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    for name, buffer in module.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_()
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 2)
    return module
