"""onnxgrad step: its files, its table, and how it refuses."""

import json

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from tests.train.plain_loop import PlainLoop
from tests.train.two_layers import batch, mlp

from onnxgrad import Trainer, cli, losses, optim, schedules


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(mlp(dropout=0.3), path)
    return path


def run(*arguments):
    return CliRunner().invoke(cli.main, ["step", *map(str, arguments)])


def test_the_files_have_the_settings_of_the_command_line(model, tmp_path):
    ran = run(
        model, "--loss", "cross-entropy:logits", "--optimizer", "sgd:nesterov=true", "--lr", 0.1, "--momentum", 0.9,
        "--schedule", "cosine", "--warmup", 0.1, "--updates", 40, "--trainable", "fc1.*", "--clip-norm", 0.5, "--seed",
        7, "--group", "*.bias:lr=0.3", "-o", tmp_path / "step.onnx",
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    for name in ("step.onnx", "step.eval.onnx", "step.model.onnx", "step.safetensors", "step.json"):
        assert name in ran.output and (tmp_path / name).is_file()
    trainer = Trainer(
        model, losses.CrossEntropy("logits"),
        optim.SGD(lr=0.1, momentum=0.9, nesterov=True, groups={"*.bias": {"lr": 0.3}}), "fc1.*",
        schedule=schedules.Cosine(40, warmup=4), clip_norm=0.5, seed=7,
    )  # fmt: skip
    loop = PlainLoop(tmp_path / "step.json")
    assert np.allclose(*[[one.step(batch(k)) for k in range(40)] for one in (trainer, loop)], rtol=1e-5)
    assert json.loads((tmp_path / "step.json").read_text())["learning_rate"]["default"] == 0.1


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--schedule", "cosine"], "--schedule and --warmup need --updates, the total number of updates"),
        (["--warmup", "5"], "--schedule and --warmup need --updates, the total number of updates"),
        (["--trainable", "fc9.*"], "export_step: trainable names 'fc9.*', which is not"),
        (["-o", "nowhere/step.onnx"], "the folder 'nowhere' to write 'step.onnx' into does not exist"),
    ],
)
def test_refused(arguments, sentence, model, tmp_path):
    ran = run(model, "--loss", "cross-entropy:logits", "-o", tmp_path / "step.onnx", *arguments)
    assert ran.exit_code == 2 and sentence.removeprefix("export_step: ") in ran.output, ran.output
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
