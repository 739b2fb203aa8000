"""An ONNX model as a layer in a training loop of PyTorch: the network of cnn_digits.py.

A layer of PyTorch before it learns the contrast of pictures: gradients pass through the ONNX model to it.
"""

import argparse
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from cnn_digits import HELD_OUT, write_network
from sklearn.datasets import load_digits
from torch import nn

import onnxgrad.torch

BUILD = Path(__file__).parents[1] / "build" / "torch_loop"
BATCH = 32


class Contrast(nn.Module):
    """Brightness and contrast of a picture, which are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(()))

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        """The picture as the network gets it."""
        return picture * self.factor + self.shift


def main() -> None:
    """Trains, and writes the ONNX model with its new weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--out", type=Path, default=BUILD)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    write_network(options.out / "digits.onnx", np.random.default_rng(0))

    torch.manual_seed(0)
    digits = load_digits()
    pictures = torch.from_numpy(digits.images.astype(np.float32)[:, None] / 16)
    labels = torch.from_numpy(digits.target.astype(np.int64))
    order = torch.randperm(len(labels))
    held_out, kept = order[:HELD_OUT], order[HELD_OUT:]

    layer = onnxgrad.torch.Module(options.out / "digits.onnx")
    network = nn.Sequential(Contrast(), layer)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, options.epochs * -(-len(kept) // BATCH))
    for epoch in range(1, options.epochs + 1):
        network.train()
        for part in kept[torch.randperm(len(kept))].split(BATCH):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(pictures[part]), labels[part])
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        network.eval()
        with torch.no_grad():
            right = (network(pictures[held_out]).argmax(1) == labels[held_out]).float().mean()
        print(f"epoch {epoch}: loss {loss.item():.3f}, {100 * right:.1f}% of held-out pictures right")

    layer.export(options.out / "trained.onnx")
    session = onnxruntime.InferenceSession(options.out / "trained.onnx")
    with torch.no_grad():
        given = network[0](pictures[held_out]).numpy()
    (logits,) = session.run(["logits"], {"picture": given})
    print(f"{100 * np.mean(logits.argmax(1) == labels[held_out].numpy()):.1f}% right in plain onnxruntime")


if __name__ == "__main__":
    main()
