"""Architectures on a GPU: every node runs there, and they train as in PyTorch."""

from importlib.util import find_spec

import pytest
from tests.checks import DEVICE
from tests.runtime.sessions import needs_provider

if missing := [name for name in ("onnxscript", "timm", "torchvision", "transformers") if find_spec(name) is None]:
    pytest.skip(f"needs {', '.join(missing)}", allow_module_level=True)

from tests.models.architectures import ARCHITECTURES
from tests.models.compare import check

if DEVICE == "cuda":
    import tests.gpu  # noqa: F401, it switches TF32 off

pytestmark = [needs_provider, pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_trains_as_in_pytorch(name, tmp_path):
    remarks = check(name, "recommended", tmp_path, "cuda")
    assert not [remark for remark in remarks if "run on the CPU" in remark]
