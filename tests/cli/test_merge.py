"""onnxgrad train --lora and onnxgrad merge: adapters from the command line."""

import numpy as np
import onnx
import onnxruntime
import pytest
from tests.cli.test_train import arrays, initializers, run
from tests.train.two_layers import mlp

import onnxgrad

BASE = ("train", "model.onnx", "--data", "train.npz", "--loss", "cross-entropy:logits", "--batch-size", "8", "--quiet")
QUIET = ("--metrics", "none", "--plot", "none")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to work in, with a model and examples."""
    onnx.save(mlp(dropout=0), tmp_path / "model.onnx")
    np.savez(tmp_path / "train.npz", **arrays())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def logits(path):
    return onnxruntime.InferenceSession(path).run(["logits"], {"x": arrays()["x"]})[0]


def test_a_model_with_adapters_trains_on_and_is_merged(folder):
    name = next(n for n, a in initializers("model.onnx").items() if a.ndim == 2)
    run(*BASE, *QUIET, "--lora", name, "--lora-rank", 2, "--lora-alpha", 4, "-o", "adapted.onnx")
    before, after = initializers("model.onnx"), initializers("adapted.onnx")
    assert all(np.array_equal(before[n], after[n]) for n in before)
    assert [a.shape for n, a in after.items() if "lora_A" in n] == [(before[name].shape[1], 2)]
    again = run("train", "adapted.onnx", *BASE[2:], *QUIET, "-o", "again.onnx")
    assert not np.allclose(logits("again.onnx"), logits("adapted.onnx"))
    assert "adapters: 1 of rank 2" in run("inspect", "again.onnx").output
    assert "frozen: the model has adapters" in " ".join(run("inspect", "again.onnx").output.split())
    found = run("merge", "again.onnx", "-o", "merged.onnx")
    assert found.output.startswith("merged: 1 adapter; merged.onnx ") and not again.output
    assert initializers("merged.onnx").keys() == before.keys()
    assert np.allclose(logits("merged.onnx"), logits("again.onnx"), atol=1e-5)


@pytest.mark.parametrize("output", ["adapter", "adapter.safetensors"])
def test_adapters_alone(output, folder):
    result = run(*BASE[:-1], *QUIET, "--lora", "*", "-o", output)
    assert "adapters" in result.output and (folder / output).exists()
    assert not (folder / "adapter.onnx").exists()
    assert run(*BASE, *QUIET, "--lora", "*", "--overwrite", "-o", output).exit_code == 0  # over the one that is there
    run(*BASE, *QUIET, "--lora", "*", "-o", "whole.onnx")
    onnx.save(onnxgrad.load_adapter("model.onnx", output), "loaded.onnx")
    assert np.array_equal(logits("loaded.onnx"), logits("whole.onnx"))
    run("merge", "model.onnx", "--adapter", output, "-o", "merged.onnx")
    assert np.allclose(logits("merged.onnx"), logits("whole.onnx"), atol=1e-5)


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--lora-rank", 4, "-o", "x.onnx"], "--lora-rank needs --lora, which names the weights that get adapters"),
        (["-o", "x.safetensors"], "-o: 'x.safetensors' is a file for adapters, and the model has none: add some with"),
        (["--lora", "nothing", "-o", "x.onnx"], "lora: no layer is named 'nothing'"),
        (["-o", "there"], "'there' is a folder, expected the name of a file to write"),
    ],
)  # fmt: skip
def test_refused(arguments, text, folder):
    (folder / "there").mkdir()
    assert text in run(*BASE, *QUIET, *arguments, code=2).output


def test_nothing_to_merge(folder):
    assert "merge_lora: the model has no adapters" in run("merge", "model.onnx", "-o", "x.onnx", code=2).output
