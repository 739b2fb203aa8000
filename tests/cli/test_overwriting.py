"""-o that is the model itself, or the file of its weights."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from tests.cli.test_train import arrays
from tests.train.two_layers import mlp

from onnxgrad import cli

COMMANDS = {
    "grad": ["grad", "--of", "logits"],
    "train": ["train", "--data", "train.npz", "--loss", "cross-entropy:logits", "--quiet"],
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    np.savez(tmp_path / "train.npz", **arrays())
    onnx.save(mlp(), tmp_path / "model.onnx")
    onnx.save(mlp(), tmp_path / "apart.onnx", save_as_external_data=True, location="new.onnx.data", size_threshold=0)
    (tmp_path / "link.onnx").symlink_to("model.onnx")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command, model, output, *more, typed=None, monkeypatch=None):
    words = COMMANDS[command]
    if typed is not None:
        monkeypatch.setattr("onnxgrad.cli.overwriting.is_terminal", lambda: True)
    return CliRunner().invoke(cli.main, [words[0], model, "-o", output, *words[1:], *more], input=typed)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("output", ["model.onnx", "./model.onnx", "link.onnx"])
def test_the_model_itself_is_not_overwritten(command, output):
    before = Path("model.onnx").read_bytes()
    result = run(command, "model.onnx", output)
    sentence = f"-o: {str(Path(output))!r} is the model itself: name another file, or add --overwrite"
    assert (result.exit_code, result.stderr) == (2, f"onnxgrad: {sentence}\n")
    assert Path("model.onnx").read_bytes() == before


@pytest.mark.parametrize("command", COMMANDS)
def test_nor_are_its_weights(command):
    before = Path("new.onnx.data").read_bytes()
    result = run(command, "apart.onnx", "new.onnx")
    sentence = "-o: 'new.onnx.data' holds the model's weights: name another file, or add --overwrite"
    assert (result.exit_code, result.stderr) == (2, f"onnxgrad: {sentence}\n")
    assert Path("new.onnx.data").read_bytes() == before


@pytest.mark.parametrize("command", COMMANDS)
def test_a_terminal_is_asked(command, monkeypatch):
    before = Path("model.onnx").read_bytes()
    result = run(command, "model.onnx", "model.onnx", typed="n\n", monkeypatch=monkeypatch)
    assert result.exit_code == 2
    assert "'model.onnx' is the model itself: overwrite it? [y/N]" in result.stderr
    assert "-o: 'model.onnx' is the model itself, and is not overwritten" in result.stderr
    assert Path("model.onnx").read_bytes() == before
    assert run(command, "model.onnx", "model.onnx", typed="y\n", monkeypatch=monkeypatch).exit_code == 0
    assert Path("model.onnx").read_bytes() != before


@pytest.mark.parametrize("command", COMMANDS)
def test_overwrite(command):
    before = Path("model.onnx").read_bytes()
    result = run(command, "model.onnx", "model.onnx", "--overwrite")
    assert result.exit_code == 0, result.output
    assert Path("model.onnx").read_bytes() != before


def test_other_files_are_not_the_model():
    result = run("train", "model.onnx", "trained.onnx", "--checkpoint", "model.onnx", "--overwrite")
    assert result.stderr == "onnxgrad: --checkpoint and MODEL are both 'model.onnx', expected files of their own\n"
