"""Scripts of onnxruntime-training run unchanged: by `python -m onnxgrad.ort_training`, or after install()."""

import subprocess
import sys

import pytest

import onnxgrad.ort_training

SCRIPT = """
import sys
import onnxruntime
import onnxruntime.training.onnxblock as onnxblock
from onnxruntime.training import artifacts
from onnxruntime.training.api import CheckpointState, LinearLRScheduler, Module, Optimizer
from onnxruntime.training.api.checkpoint_state import Parameter
from onnxruntime.training.onnxblock.loss import MSELoss
import neighbour

print(artifacts.LossType.MSELoss.name, Module.__module__, sys.argv[1:], neighbour.NAME)
assert onnxruntime.training.onnxblock is onnxblock and onnxruntime.training.api.Module is Module
"""


def _run(*arguments, folder):
    command = [sys.executable, "-m", "onnxgrad.ort_training", *arguments]
    return subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True)


@pytest.mark.slow
def test_a_script_runs_unchanged(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "script.py").write_text(SCRIPT)
    (tmp_path / "code" / "neighbour.py").write_text("NAME = 'beside'")
    found = _run("code/script.py", "--epochs", "3", folder=tmp_path)
    assert found.stdout == "MSELoss onnxgrad.ort_training.api.module ['--epochs', '3'] beside\n", found.stderr
    found = _run("-m", "script", "x", folder=tmp_path / "code")
    assert found.stdout == "MSELoss onnxgrad.ort_training.api.module ['x'] beside\n", found.stderr


def test_wrong_use_is_one_sentence(tmp_path):
    assert _run(folder=tmp_path).stderr.startswith("usage: python -m onnxgrad.ort_training script.py")
    assert _run("away.py", folder=tmp_path).stderr.startswith("'away.py' does not exist, expected a script\nusage")


def test_what_is_not_there_says_what_to_do():
    with pytest.raises(ImportError, match=r"onnxgrad\.ort_training has no ORTModule: export the module"):
        from onnxgrad.ort_training import ORTModule  # noqa: F401
    assert onnxgrad.ort_training.onnxblock.loss.MSELoss
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        onnxgrad.ort_training.nothing  # noqa: B018
