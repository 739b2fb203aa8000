"""onnxgrad train with data as people have it: tables, images and text, from the file to the trained model."""

import csv
import json

import numpy as np
import onnx
import pytest
import sklearn.datasets
from PIL import Image
from sklearn.utils.class_weight import compute_class_weight
from tests.checks import raises, same_bits
from tests.cli.test_train import events, run
from tests.sources.models import linear

from onnxgrad.sources import read
from onnxgrad.train import losses, optim
from onnxgrad.train.batches import Batches
from onnxgrad.train.trainer import Trainer

IRIS = sklearn.datasets.load_iris()
CHOSEN = np.concatenate([np.arange(40), np.arange(50, 80), np.arange(100, 112)])  # of each class another number
ENTROPY = ("--loss", "cross-entropy:logits")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to work in, with a model of four numbers, and iris."""
    onnx.save(linear(), tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "iris.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["sepal length", "sepal width", "petal length", "petal width", "species"])
        rows.writerows([*IRIS.data[k], IRIS.target_names[IRIS.target[k]]] for k in CHOSEN)
    return tmp_path


def test_a_table_trains_as_its_arrays_do_and_its_classes_are_kept(folder):
    how = ("--epochs", 2, "--val", "0.25", "--stratify", "--class-weights", "balanced", "--metric", "accuracy")
    result = run("train", "model.onnx", "--data", "iris.csv", *ENTROPY, *how, "-o", "a.onnx")
    left, aside = read("iris.csv", "model.onnx", losses.CrossEntropy("logits")).split(0.25, 0, "target")
    assert [np.bincount(s.column("target")).tolist() for s in (left, aside)] == [[30, 23, 9], [10, 7, 3]]
    weights = compute_class_weight("balanced", classes=np.arange(3), y=left.column("target"))
    trainer = Trainer("model.onnx", losses.CrossEntropy("logits", weights=tuple(map(float, weights))), optim.AdamW())
    records = trainer.fit(Batches(left, 32), 2, validation=Batches(aside, 32, shuffle=False), quiet=True)
    np.testing.assert_allclose([e["loss"] for e in events("a.jsonl", "epoch")], [r.loss for r in records], rtol=1e-6)
    assert json.loads((folder / "a.classes.json").read_text()) == {"target": ["setosa", "versicolor", "virginica"]}
    assert result.stderr.startswith(
        "iris.csv: 'target' is the column 'species'\n"
        "iris.csv: 'species' as 3 classes: 0 setosa, 1 versicolor, 2 virginica\n"
    )
    assert "a.classes.json" in result.stdout


def test_columns_name_what_an_input_is_made_of(folder):
    run("train", "model.onnx", "--data", "iris.csv", *ENTROPY, "-o", "a.onnx")
    columns = ("--columns", "x=sepal*,petal length,petal width", "--columns", "target=species")
    run("train", "model.onnx", "--data", "iris.csv", *ENTROPY, *columns, "-o", "b.onnx", "--val", "iris.csv")
    assert events("a.jsonl", "step") == events("b.jsonl", "step")


@pytest.fixture
def digits(folder):
    """Digits as files, in train and val."""
    digits = sklearn.datasets.load_digits()
    for k, (image, digit) in enumerate(zip(digits.images[:60], digits.target, strict=False)):
        place = folder / "digits" / ("val" if k >= 40 else "train") / str(digit)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15).astype(np.uint8)).save(place / f"{k}.png")
    onnx.save(linear(64, 10, "image", (1, 8, 8)), "digits.onnx")
    return folder


def test_images_in_folders_and_a_run_that_is_resumed_sees_the_same(digits):
    how = ("--augment", "crop,rotate", "--batch-size", 16, "--metric", "accuracy")
    base = ("train", "digits.onnx", "--data", "digits", *ENTROPY, *how)
    result = run(*base, "--epochs", 2, "-o", "whole.onnx")
    assert "\nvalidating with digits/val\ntraining 650 numbers in 2 parameters of digits.onnx on 40 examples\n" in (
        result.stderr
    )
    run(*base, "--epochs", 1, "-o", "a.onnx")
    run(*base, "--epochs", 2, "-o", "b.onnx", "--resume", "a.safetensors")
    assert events("b.jsonl", "epoch")[-1] == events("whole.jsonl", "epoch")[-1]
    other = run(*base, "--augment", "flip", "--epochs", 2, "-o", "a.onnx", "--resume", "a.safetensors", code=2)
    assert other.stderr == (
        "onnxgrad: --resume: the run had --augment crop,rotate, now it is flip, which changes its batches\n"
    )


@pytest.mark.slow
def test_workers_change_nothing(digits):
    base = ("train", "digits.onnx", "--data", "digits", *ENTROPY, "--augment", "flip,color", "--epochs", 2)
    run(*base, "-o", "a.onnx")
    run(*base, "-o", "b.onnx", "--workers", 2)
    for event in ("step", "epoch"):
        assert events("a.jsonl", event) == events("b.jsonl", event)


def test_a_step_within_an_epoch_is_where_it_goes_on(digits):
    loss = losses.CrossEntropy("logits")
    source = read("digits", "digits.onnx", loss, augment=["crop"])

    def trainer():
        return Trainer("digits.onnx", loss, optim.SGD())

    whole = trainer()
    whole.fit(Batches(source, 16, seed=3), 2, quiet=True)
    stopped = trainer()
    saving = {"checkpoint": "a.safetensors", "save_every": 2, "quiet": True}
    with raises(RuntimeError, "enough"):
        stopped.fit(Batches(source, 16, seed=3), 2, **saving, log=_stop_at_5)
    resumed = trainer()
    resumed.restore("a.safetensors")
    assert resumed.steps == 4
    resumed.fit(Batches(source, 16, seed=3), 2, quiet=True)
    assert all(same_bits(a, resumed.parameters[name]) for name, a in whole.parameters.items())


def _stop_at_5(event):
    if event.get("step") == 5:
        raise RuntimeError("enough")


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (("--columns", "x"), "--columns 'x' names no columns, expected an input and its columns as in x=a,b,c"),
        (("--stratify",), "--stratify needs examples to hold out: give their share with --val"),
        (("--stratify", "--val", "iris.csv"), "--stratify is for a share of the examples to hold out, but --val is "
         "'iris.csv'"),
        (("--tokenizer", "none.json"), "--data: 'iris.csv' is text, but the model has no input for token ids, as "
         "'input_ids' of the shape [N, length] would be: 'x'"),
        (("--image-size", "big"), "--image-size is 'big', expected pixels as in 224, or height and width as in "
         "480x640"),
    ],
)  # fmt: skip
def test_what_is_refused(folder, arguments, sentence):
    result = run("train", "model.onnx", "--data", "iris.csv", *ENTROPY, *arguments, "-o", "a.onnx", code=2)
    assert result.stderr == f"onnxgrad: {sentence}\n"
