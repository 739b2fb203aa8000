"""Architectures by hand in both ways, and a dozen of all by the exporter on TorchScript, train as in PyTorch."""

from pathlib import Path

import pytest
from tests.models.architectures import ARCHITECTURES, BY_HAND, TIMM, TORCHVISION, TRANSFORMERS
from tests.models.compare import check

LEGACY = [
    "vgg_bn",
    "resnet",
    "mobilenet_v3",
    "densenet",
    "vit",
    "bert",
    "distilbert",
    "lstm",
    "gru",
    "unet",
    "dcgan",
    "wavenet",
]


def test_the_page_names_all_architectures():
    page = " ".join((Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8").split())
    for library, found in {
        "torchvision": TORCHVISION, "timm": TIMM, "transformers": TRANSFORMERS, "by hand": BY_HAND
    }.items():  # fmt: skip
        assert f"- {library} ({len(found)}): {', '.join(found)}" in page
    assert f"{len(ARCHITECTURES)} architectures:" in page


@pytest.mark.slow
@pytest.mark.parametrize("way", ["recommended", "default"])
@pytest.mark.parametrize("name", BY_HAND)
def test_trains_as_in_pytorch(name, way, tmp_path):
    check(name, way, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", LEGACY)
def test_trains_as_in_pytorch_from_torchscript(name, tmp_path):
    check(name, "legacy", tmp_path)
