"""Models of scikit-learn, converted by skl2onnx, are trained with defaults and come back as they were."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from sklearn.datasets import load_iris
from tests.checks import raises

import onnxgrad
from onnxgrad import losses, metrics, optim

pytestmark = pytest.mark.slow
X, CLASSES = load_iris(return_X_y=True)
X = X.astype(np.float32)
NUMBERS = (X @ [0.3, -0.2, 0.5, 1.0])[:, None].astype(np.float32)
REGRESSORS = [
    "LinearRegression", "Ridge", "MinMaxScaler", "Normalizer", "SimpleImputer", "PolynomialFeatures", "MLPRegressor",
    "SVR",
]  # fmt: skip
CLASSIFIERS = ["LogisticRegression", "StandardScaler", "PCA", "MLPClassifier", "OneVsRest"]
OF_CLASSES = [*(f"{name}{of}" for name in CLASSIFIERS for of in ("", " of texts", " of two")), "LinearSVC"]
OF_CLASSES += ["SGDClassifier", "SVC of two", "SVC"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sklearn")
    script = Path(__file__).with_name("sklearn_models.py")
    subprocess.run([sys.executable, str(script), str(path)], check=True)
    return path


def outputs_of(path, x=X):
    session = onnxruntime.InferenceSession(str(path))
    names = [o.name for o in session.get_outputs()]
    found = dict(zip(names, session.run(None, {"X": x}), strict=True))
    maps = found[names[-1]]
    if isinstance(maps, list):  # ZipMap's
        found[names[-1]] = np.array([list(row.values()) for row in maps], np.float32)
    return names[-1], found


def targets_of(name):
    return (CLASSES > 0).astype(np.int64) if name.endswith("of two") else CLASSES


@pytest.mark.parametrize("name", REGRESSORS)
def test_regressors(folder, tmp_path, name):
    output, before = outputs_of(folder / f"{name}.onnx")
    batch = {"X": X, "target": NUMBERS + 0.5}
    trainer = onnxgrad.Trainer(folder / f"{name}.onnx", losses.MSE(output), optim.Adam(lr=0.01))
    assert trainer.evaluate([batch])["loss"] == pytest.approx(
        np.mean((before[output] - batch["target"]) ** 2), rel=1e-4
    )
    first, *_ = [trainer.step(batch) for _ in range(20)]
    after = trainer.evaluate([batch])["loss"]
    assert after < 0.9 * first
    trainer.export(tmp_path / "trained.onnx")
    found = outputs_of(tmp_path / "trained.onnx")[1][output]
    assert np.mean((found - batch["target"]) ** 2) == pytest.approx(after, rel=1e-4)
    assert_same_graph(folder / f"{name}.onnx", tmp_path / "trained.onnx")


@pytest.mark.parametrize("name", OF_CLASSES)
def test_classifiers(folder, tmp_path, name):
    output, before = outputs_of(folder / f"{name}.onnx")
    batch = {"X": X, "target": targets_of(name)}
    is_probability = np.allclose(before[output].sum(1), 1)
    trainer = onnxgrad.Trainer(folder / f"{name}.onnx", losses.CrossEntropy(output), optim.Adam(lr=0.003))
    assert any("so that the loss takes" in remark for remark in trainer.remarks) == is_probability
    accuracy = {"accuracy": metrics.Accuracy(output)}
    found = trainer.evaluate([batch], accuracy)
    # onnxruntime iterates for the probabilities of SVMs, and stops once they are within 0.0025.
    near = {"abs": 2e-3} if name == "SVC of two" else {"rel": 1e-3}
    assert found["loss"] == pytest.approx(cross_entropy(before[output], batch["target"], is_probability), **near)
    assert found["accuracy"] == pytest.approx((before[output].argmax(1) == batch["target"]).mean())
    for _ in range(30):
        trainer.step(batch)
    after = trainer.evaluate([batch], accuracy)
    if name != "SVC":  # whose scores are votes of pairs of classes, which jump
        assert after["loss"] < found["loss"]
    trainer.export(tmp_path / "trained.onnx")
    scores = outputs_of(tmp_path / "trained.onnx")[1]
    assert cross_entropy(scores[output], batch["target"], is_probability) == pytest.approx(after["loss"], **near)
    assert (scores[output].argmax(1) == batch["target"]).mean() == pytest.approx(after["accuracy"])
    assert_same_graph(folder / f"{name}.onnx", tmp_path / "trained.onnx")
    again = onnxgrad.Trainer(tmp_path / "trained.onnx", losses.CrossEntropy(output), optim.SGD(lr=0.1))
    assert again.evaluate([batch])["loss"] == pytest.approx(after["loss"], rel=1e-5)


def cross_entropy(scores, classes, is_probability):
    scores = scores.astype(np.float64)
    chances = scores if is_probability else np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    return -np.log(chances[np.arange(len(classes)), classes]).mean()


def assert_same_graph(source, exported):
    """The operators, outputs and labels that the model came with."""
    one, other = (onnx.load(path).graph for path in (source, exported))
    assert [n.op_type for n in one.node] == [n.op_type for n in other.node]
    assert one.output == other.output


@pytest.mark.parametrize("name", [*REGRESSORS, *(n for n in OF_CLASSES if "texts" not in n)])
def test_gradients_of_inputs(folder, name):
    output, _ = outputs_of(folder / f"{name}.onnx")
    some = X[::30] + np.float32(0.01)
    found = onnxgrad.check_gradient(folder / f"{name}.onnx", {"X": some}, "X", output)
    assert found.worst < 1e-5, found


def test_a_step_of_logistic_regression(folder):
    """W - lr · (softmax(X Wᵀ + b) - onehot)ᵀ X / N, as the textbook has it."""
    output, _ = outputs_of(folder / "LogisticRegression.onnx")
    trainer = onnxgrad.Trainer(folder / "LogisticRegression.onnx", losses.CrossEntropy(output), optim.SGD(lr=0.1))
    weights, bias = (trainer.parameters[f"LinearClassifier.{name}"].copy() for name in ("coefficients", "intercepts"))
    scores = X @ weights.T + bias
    chances = np.exp(scores - scores.max(1, keepdims=True))
    error = chances / chances.sum(1, keepdims=True) - np.eye(3)[CLASSES]
    trainer.step({"X": X, "target": CLASSES})
    np.testing.assert_allclose(
        trainer.parameters["LinearClassifier.coefficients"], weights - 0.1 * error.T @ X / len(X), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        trainer.parameters["LinearClassifier.intercepts"], bias - 0.1 * error.mean(0), rtol=1e-5, atol=1e-6
    )


def test_a_step_of_logistic_regression_of_two_classes(folder, tmp_path):
    """w - lr · mean((sigmoid(X w + b) - t) X): one row of weights, though the file has two."""
    path = folder / "LogisticRegression of two.onnx"
    trainer = onnxgrad.Trainer(path, losses.CrossEntropy("probabilities"), optim.SGD(lr=0.1))
    weights, bias = (trainer.parameters[f"LinearClassifier.{name}"].copy() for name in ("coefficients", "intercepts"))
    target = (CLASSES > 0).astype(np.int64)
    error = 1 / (1 + np.exp(-(X @ weights[0] + bias))) - target
    trainer.step({"X": X, "target": target})
    expected = weights[0] - 0.1 * (error[:, None] * X).mean(0)
    np.testing.assert_allclose(trainer.parameters["LinearClassifier.coefficients"][0], expected, rtol=1e-5, atol=1e-6)
    trainer.export(tmp_path / "trained.onnx")
    (attribute,) = (a for a in onnx.load(tmp_path / "trained.onnx").graph.node[0].attribute if a.name == "coefficients")
    np.testing.assert_allclose(attribute.floats, [*-expected, *expected], rtol=1e-5, atol=1e-6)


def test_what_cannot_be_trained(folder):
    for name, sentence in {
        "RandomForest": "Trainer: TreeEnsembleClassifier (node 'TreeEnsembleClassifier'): trees are constant between "
        "their thresholds and have no gradient: train them where they came from; what is after them can be trained "
        "here",
        "SVC with probabilities": "Trainer: SVMClassifier (node 'SVMc') couples the probabilities of 3 classes by an "
        "iteration that has no gradient: convert the model without probabilities, SVC(probability=False), and train "
        "its scores",
    }.items():
        with raises(ValueError, sentence):
            onnxgrad.Trainer(folder / f"{name}.onnx", losses.CrossEntropy("output_probability"), optim.SGD(lr=0.1))
