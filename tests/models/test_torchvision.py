"""Architectures of torchvision, exported in both ways, train as in PyTorch."""

import pytest
from tests.models.architectures import TORCHVISION
from tests.models.compare import check


@pytest.mark.slow
@pytest.mark.parametrize("way", ["recommended", "default"])
@pytest.mark.parametrize("name", TORCHVISION)
def test_trains_as_in_pytorch(name, way, tmp_path):
    check(name, way, tmp_path)
