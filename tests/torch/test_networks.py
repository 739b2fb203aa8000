"""Whole networks through Module and wrap: outputs, gradients and running statistics are PyTorch's to 1e-5."""

import copy

import pytest
import torch
import transformers
from tests.models import architectures  # declares what torchvision lacks beside PyTorch's CPU build
from tests.torch_export import export
from torch import nn

from onnxgrad.torch import Module, wrap

pytestmark = pytest.mark.slow
assert architectures
BERT = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
        "max_position_embeddings": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
GPT2 = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}  # fmt: skip


class Recurrent(nn.Module):
    """Words, a recurrent layer in both directions, classes."""

    def __init__(self, kind):
        super().__init__()
        self.words, self.layer, self.head = nn.Embedding(50, 8), kind(8, 12, bidirectional=True), nn.Linear(24, 5)

    def forward(self, x):
        return self.head(self.layer(self.words(x))[0][-1])


def vision(name, **settings):
    from torchvision import models

    return getattr(models, name)(num_classes=10, **settings)


def vit():
    import timm

    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)


NETWORKS = {
    "resnet18": (lambda: vision("resnet18"), lambda: torch.randn(4, 3, 48, 48)),
    "mobilenet_v3_small": (lambda: vision("mobilenet_v3_small", dropout=0.0), lambda: torch.randn(4, 3, 48, 48)),
    "vit_tiny": (vit, lambda: torch.randn(2, 3, 32, 32)),
    "bert": (lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**BERT)),
             lambda: torch.randint(0, 50, (3, 8))),
    "gpt2": (lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
             lambda: torch.randint(0, 50, (3, 8))),
    "lstm": (lambda: Recurrent(nn.LSTM), lambda: torch.randint(0, 50, (7, 3))),
    "gru": (lambda: Recurrent(nn.GRU), lambda: torch.randint(0, 50, (7, 3))),
}  # fmt: skip


def logits(module, x):
    """Of modules that return tensors, and of those of transformers."""
    return getattr(found := module(x), "logits", found)


def stepped(module, x):
    """The output, and how parameters, their gradients, buffers and the input's gradient are after a step."""
    x = x.clone().requires_grad_(x.is_floating_point())
    y = logits(module, x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    (y * weights).sum().backward()
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    found |= {name: b for name, b in module.named_buffers() if b.is_floating_point()}
    return {**found, "": y, **({} if x.grad is None else {".": x.grad})}


def expect_close(actual, exact, plain):
    """To 1e-5 of what is exact, or to 3 times as much as PyTorch's own float32 is off, where numbers cancel out."""
    for name, found in actual.items():
        expected = exact[name]
        scale = expected.abs().max()
        off = (plain[name] - expected).abs().max()
        assert (found - expected).abs().max() <= max(1e-5 * scale, 3 * off) + 1e-7, name


@pytest.mark.parametrize("way", ["Module", "wrap"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_is_that_of_pytorch(name, way, tmp_path):
    torch.manual_seed(0)
    make, draw = NETWORKS[name]
    plain, x = make().train(), draw()
    exact, ours = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    ours = Module(exported(ours, x, tmp_path)) if way == "Module" else wrap(ours)
    results = [stepped(m, x.double() if m is exact and x.is_floating_point() else x) for m in (ours, exact, plain)]
    found, expected = results[0], results[1]
    names = {"lm_head.weight": "transformer.wte.weight"} if name == "gpt2" and way == "Module" else {}  # it has both
    found = {names.get(n, n): result for n, result in found.items()}
    assert found.keys() == expected.keys()
    expect_close(found, *results[1:])


def exported(module, x, folder):
    """As users would: recurrent layers by the older exporter, as the newer one unrolls them."""
    return export(module, x, folder / "model.onnx", dynamic=False, dynamo=not isinstance(module, Recurrent))
