"""Architectures of timm, exported in both ways, train as in PyTorch."""

import pytest
from tests.models.architectures import TIMM
from tests.models.compare import check


@pytest.mark.slow
@pytest.mark.parametrize("way", ["recommended", "default"])
@pytest.mark.parametrize("name", TIMM)
def test_trains_as_in_pytorch(name, way, tmp_path):
    check(name, way, tmp_path)
