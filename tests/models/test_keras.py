"""Models of Keras, converted by tf2onnx, are trained with defaults, with the gradients that TensorFlow has.

tests/data/make_keras_models.py wrote them.
"""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from tests.gradients import daily

import onnxgrad
from onnxgrad import losses, metrics, optim

DATA = Path(__file__).parent.parent / "data" / "keras"
MODELS = ["cnn", "cnn_keras2", "mlp", "lstm", "attention"]
SOFTMAX = ("mlp", "lstm")  # at the end


def fixture(name):
    """The model's file, a batch, the numbers that TensorFlow gave for it, and its gradients by initializer."""
    with np.load(DATA / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    batch = {"x": arrays["x"], "target": arrays["target"]}
    kinds = ("gradient/", "training/")
    return (
        DATA / f"{name}.onnx",
        batch,
        arrays,
        *({key.removeprefix(kind): a for key, a in arrays.items() if key.startswith(kind)} for kind in kinds),
    )


def close(mine, theirs):
    np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=2e-5 * max(1.0, np.abs(theirs).max()))


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_tensorflow(name):
    path, batch, arrays, gradients, _ = fixture(name)
    model = onnxgrad.gradient(path, list(gradients), "y")
    session = onnxruntime.InferenceSession(model.SerializeToString(), onnxgrad.register())
    names = [o.name for o in session.get_outputs()]
    found = dict(zip(names, session.run(None, {"x": batch["x"], "y_grad": arrays["seed"]}), strict=True))
    close(found["y"], arrays["y"])
    for initializer, gradient in gradients.items():
        close(found[f"{initializer}_grad"], gradient)


@pytest.mark.parametrize("name", MODELS)
def test_training(name, tmp_path):
    path, batch, arrays, _, gradients = fixture(name)
    trainer = onnxgrad.Trainer(path, losses.CrossEntropy("y"), optim.Adam(lr=0.01))
    assert set(trainer.parameters) >= set(gradients), trainer.remarks
    of_norm = set(trainer.parameters) - set(gradients)
    assert len(of_norm) == (2 if name == "cnn" else 0), of_norm  # what Keras 3 leaves of a BatchNormalization
    assert any("comes from Softmax" in remark for remark in trainer.remarks) == (name in SOFTMAX)
    loss = trainer.step(batch)
    assert loss == pytest.approx(float(arrays["loss"]), rel=1e-4)
    for initializer, gradient in gradients.items():
        close(trainer.gradients[initializer], gradient)
    for _ in range(30):
        trainer.step(batch)
    after = trainer.evaluate([batch], {"accuracy": metrics.Accuracy("y")})
    assert after["loss"] < 0.8 * loss
    trainer.export(tmp_path / "trained.onnx")
    (y,) = onnxruntime.InferenceSession(str(tmp_path / "trained.onnx")).run(None, {"x": batch["x"]})
    assert (y.argmax(1) == batch["target"]).mean() == pytest.approx(after["accuracy"])


# Of the LSTM, kernels for float64 are compiled.
@pytest.mark.parametrize("name", daily(MODELS, *(name for name in MODELS if name != "lstm")))
def test_gradients_against_differences(name):
    path, batch, _, _, _ = fixture(name)
    found = onnxgrad.check_gradient(path, {"x": batch["x"][:2]}, None, "y")
    assert found.worst < 1e-5, found
