"""onnxgrad train: stopping early, the best epoch by a metric, averaged weights, matrices, and the finder of rates."""

import re
import shlex
import signal
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from tests.checks import same_bits
from tests.cli.test_train import BASE, arrays, events, folder, initializers, run

from onnxgrad.cli import specs
from onnxgrad.cli.outcome import best_epoch, show_matrix
from onnxgrad.cli.plot import text_plot
from onnxgrad.train import losses, metrics, optim
from onnxgrad.train.batches import Batches
from onnxgrad.train.trainer import Trainer

__all__ = ["folder"]  # the fixture
METRICS = ("--metric", "f1", "--metric", "confusion-matrix:classes=low,mid,high:name=matrix")


def on_noise(*arguments):
    """Validates on targets that mean nothing, so that the best epoch comes early."""
    target = np.random.default_rng(5).integers(0, 3, 40)
    np.savez("val.npz", **{**arrays(40, seed=1), "target": target})
    return run(*BASE, "--val", "val.npz", "--optimizer", "sgd", "--lr", 0.5, "--epochs", 9, *arguments)


def test_it_stops_early_and_writes_the_best_epoch_by_a_metric(folder):
    result = on_noise("--early-stopping", 2, "--keep-best", "--monitor", "f1", *METRICS, "-o", "best.onnx",
                      "--tensorboard", "board")  # fmt: skip
    found = events("best.jsonl", "epoch")
    scores = [e["validation"]["f1"] for e in found]
    best = int(np.argmax(scores)) + 1
    assert len(found) == best + 2 < 9
    told = f"training ends after epoch {best + 2}, step {9 * (best + 2)}: f1 has not been better than "
    assert f"{told}{max(scores):.4f} for 2 epochs\n" in result.stderr
    assert re.search(rf"^ {best} +best ", result.stdout, re.M)
    on_noise("--epochs", best, *METRICS, "-o", "same.onnx")
    assert Path("best.onnx").read_bytes() == Path("same.onnx").read_bytes()
    matrix = found[best - 1]["validation"]["matrix"]
    assert np.sum(matrix) == 40 and f"matrix of epoch {best}, a row for each true class" in result.stdout
    row = r" +".join(["mid", *map(str, matrix[1])])
    assert re.search(r"low +mid +high", result.stdout) and re.search(row, result.stdout)
    titles = {t.text for t in ET.parse("best.svg").getroot().iter("{http://www.w3.org/2000/svg}text")}
    assert "f1" in titles and "matrix" not in titles and "matrix" not in result.stderr


def test_the_written_model_has_the_averaged_weights(folder):
    how = ("--lr", 0.02, "--epochs", 2, "--val", "train.npz", "--metric", "auc", "--ema", 0.9, "--layer-decay", 0.5)
    result = run(*BASE, *how, "--group", "*.bias:lr-factor=0.1:weight-decay=0", "-o", "trained.onnx")
    assert "layer decay: 2 layers; 'fc0.weight' has 0.5 of the learning rate, 'fc1.bias' has 1 of it" in result.stderr
    optimizer = optim.AdamW(lr=0.02, groups={"*.bias": {"lr_factor": 0.1, "weight_decay": 0.0}})
    mine = Trainer("model.onnx", losses.CrossEntropy("logits"), optimizer, ema=0.9, layer_decay=0.5)
    records = mine.fit(Batches(arrays(), 8), 2, validation=Batches(arrays(), 8, shuffle=False), quiet=True,
                       metrics={"auc": metrics.AUC("logits")})  # fmt: skip
    assert [e["validation"] for e in events("trained.jsonl", "epoch")] == [r.validation for r in records]
    trained = initializers("trained.onnx")
    assert all(same_bits(a, trained[name]) for name, a in mine.averages.items())


@pytest.mark.parametrize("at", [5, *(pytest.param(k, marks=pytest.mark.slow) for k in (7, 24))])
def test_a_run_that_was_interrupted_ends_as_the_whole_one(folder, monkeypatch, at):
    given = ("--early-stopping", 2, "--keep-best", "--ema", 0.8, *METRICS, "--seed", 3)
    on_noise(*given, "-o", "whole.onnx")
    step, count = Trainer.step, []

    def interrupted(self, one):
        count.append(1)
        if len(count) == at:
            signal.raise_signal(signal.SIGINT)
        return step(self, one)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        result = run(*BASE, "--val", "val.npz", "--optimizer", "sgd", "--lr", 0.5, "--epochs", 9, *given, "-o",
                     "parts.onnx", code=130)  # fmt: skip
    words = shlex.split(result.stderr.splitlines()[-1].partition("; to resume: ")[2])
    run(*words[1:])
    for name in ("epoch", "step"):
        assert events("parts.jsonl", name) == events("whole.jsonl", name)
    assert Path("parts.onnx").read_bytes() == Path("whole.onnx").read_bytes()
    again = run(*words[1:])  # a run that stopped early stays so
    assert len(events("parts.jsonl", "epoch")) == len(events("whole.jsonl", "epoch"))
    assert "training ends after epoch" in again.stderr


def test_rates_are_tried_and_nothing_is_trained(folder):
    result = run(*BASE, "--val", "0.2", "-o", "trained.onnx", "--find-lr")
    suggested = float(re.search(r"where the loss falls fastest: --lr (\S+)\n", result.stdout)[1])
    assert 1e-3 < suggested < 0.5
    assert "plot: trained.lr.svg" in result.stdout and result.stdout.count("•") >= 50
    assert sorted(p.name for p in folder.iterdir()) == ["model.onnx", "train.npz", "trained.lr.svg"]
    titles = {t.text for t in ET.parse("trained.lr.svg").getroot().iter("{http://www.w3.org/2000/svg}text")}
    assert {"loss", "smoothed", "suggestion", "learning rate, as a power of ten"} <= titles
    (folder / "trained.lr.svg").unlink()
    quiet = run(*BASE, "-o", "trained.onnx", "--find-lr", "--quiet", "--plot", "none")
    assert quiet.output == "" and len(list(folder.iterdir())) == 2
    assert run(*BASE, "-o", "trained.onnx", "--find-lr", "--plot", "mine.svg").exit_code == 0
    assert Path("mine.svg").exists()


def test_a_plot_in_letters():
    lines = text_plot([(k, (k - 10) ** 2) for k in range(21)], "loss", "x", width=21, height=5).splitlines()
    assert (
        lines[1] == " 100 │•                   •" and lines[5] == "   0 │       •••••••" and lines[0].strip() == "loss"
    )
    assert re.fullmatch(r" +0  +5  +10  +15  +20", lines[7]) and lines[6].startswith("     └┬") and lines[8][-1] == "x"
    assert text_plot([(0.0, 1.0)], "loss", "x").count("•") == 1


def test_the_best_epoch_by_what_is_monitored(capsys):
    found = [{"loss": 1.0, "validation": v} for v in ({"loss": 3.0, "f1": 0.2}, {"loss": None, "f1": 0.9},
                                                      {"loss": 2.0, "f1": 0.9})]  # fmt: skip
    assert best_epoch(found) is found[2] and best_epoch(found, "f1", is_max=True) is found[1]
    show_matrix("matrix", 1, np.eye(26, dtype=int).tolist(), ())
    assert capsys.readouterr().out.endswith(": 26 classes, too many for a table; the log has it\n")


def test_every_metric_as_text():
    loss = specs.loss(["bce-with-logits:y"], ["y"])
    for kind in specs.METRICS:
        (found,) = specs.metrics_by_name([kind], loss, ["y"], ["target"]).values()
        assert getattr(found, "threshold", 0) == 0
    assert {"f1", "auc", "precision", "recall", "mean-iou", "perplexity", "confusion-matrix"} <= specs.METRICS.keys()
    ignoring = specs.loss(["cross-entropy:y:ignore-index=7:axis=2"], ["y"])
    (found,) = specs.metrics_by_name(["f1:average=micro"], ignoring, ["y"], ["target"]).values()
    assert found == metrics.F1("y", axis=2, ignore_index=7, average="micro")
    (found,) = specs.metrics_by_name(["f1"], specs.loss(["bce:y"], ["y"]), ["y"], ["target"]).values()
    assert found.threshold == 0.5
    changed = specs.optimizer("sgd", {}, ["a.*:lr-factor=0.5"]).groups
    assert changed == {"a.*": {"lr_factor": 0.5}}


@pytest.mark.parametrize("arguments, sentence", [
    (("--early-stopping", "2"),
     "--early-stopping needs validation examples: name a file or a share with --val"),
    (("--monitor", "f1"), "--monitor is for --keep-best and --early-stopping"),
    (("--keep-best", "--val", "0.2", "--monitor", "f2", "--metric", "f1"),
     "--monitor: 'f2' is not measured; available: 'loss', 'f1'"),
    (("--keep-best", "--val", "0.2", "--monitor", "confusion-matrix", "--metric", "confusion-matrix"),
     "--monitor: 'confusion-matrix' is a ConfusionMatrix, not a number that can be best"),
    (("--val", "0.2", "--metric", "f1:average=mean"),
     "--metric 'f1:average=mean': average is 'mean', expected one of auto, binary, macro, micro, weighted"),
    (("--val", "0.2", "--metric", "confusion-matrix:classes=a,b"),
     "--val: ConfusionMatrix: classes has 2 names, but 'logits' has 3 classes"),
    (("--val", "0.2", "--metric", "f1:average=binary"),
     "--val: F1: average is 'binary', but 'logits' has 3 classes: take 'macro', 'micro' or 'weighted'"),
    (("--group", "*.bias:lr-factor=x"), "--group '*.bias:lr-factor=x': lr-factor is 'x', expected a number"),
    (("--lr", "0", "--find-lr"),
     "find_lr: the optimizer's lr is 0, which no schedule can raise: give it another value"),
])  # fmt: skip
def test_what_is_refused(folder, arguments, sentence):
    printed = run(*BASE, "-o", "out.onnx", *arguments, code=2).output
    assert printed == f"onnxgrad: {sentence}\n"
    assert "Invalid value for '--ema'" in run(*BASE, "-o", "out.onnx", "--ema", "1", code=2).output
