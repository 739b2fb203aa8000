"""export_step(): the losses of a Trainer in plain onnxruntime, with every optimizer, schedule and kind of layer."""

import json

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import numpy_helper, parser
from tests.gradients import daily
from tests.torch_export import export
from tests.train.plain_loop import PlainLoop
from tests.train.two_layers import SIZES, batch, mlp
from torch import nn

import onnxgrad
from onnxgrad import Trainer, losses, optim, schedules

LOSS, OPTIMIZER = losses.CrossEntropy("logits"), optim.AdamW(lr=0.01)
OPTIMIZERS = {
    "sgd": optim.SGD(lr=0.1),
    "momentum": optim.SGD(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": optim.SGD(lr=0.1, momentum=0.9, nesterov=True),
    "adam": optim.Adam(lr=0.01, weight_decay=0.01),
    "adamw": optim.AdamW(lr=0.01, groups={"*.bias": {"lr": 0.03, "weight_decay": 0.0}}),
    "huggingface": optim.AdamW(lr=0.01, form="huggingface"),
    "adagrad": optim.Adagrad(lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "rmsprop": optim.RMSprop(lr=0.01),
    "centered": optim.RMSprop(lr=0.01, centered=True, momentum=0.5, weight_decay=0.01),
    "lamb": optim.Lamb(lr=0.01),
}
SCHEDULES = {
    "warmup": schedules.Constant(10),
    "linear": schedules.Linear(40, warmup=3, final=0.1),
    "cosine": schedules.Cosine(40, warmup=5),
    "step": schedules.Step(15, factor=0.3),
    "one cycle": schedules.OneCycle(50),
}


def compare(model, tmp_path, batches, steps=50, loss=LOSS, optimizer=OPTIMIZER, exact=1e-5, **settings):
    """Losses of both, and what both say of another batch; gives the trainer and the loop."""
    trainer = Trainer(model, loss, optimizer, **settings)
    files = onnxgrad.export_step(model, tmp_path / "step.onnx", loss, optimizer, **settings)
    loop = PlainLoop(files.description)
    expected = [trainer.step(batches(k)) for k in range(steps)]
    assert np.allclose([loop.step(batches(k)) for k in range(steps)], expected, rtol=exact)
    loss, predictions = loop.evaluate(batches(steps))
    seen = {}
    found = trainer.evaluate([batches(steps)], {"kept": lambda outputs, _: seen.update(outputs) or 0.0})
    assert np.isclose(loss, found["loss"], rtol=10 * exact)
    for name, array in predictions.items():
        assert np.allclose(array, seen[name], rtol=1e-3, atol=1e-4 * np.abs(array).max())
    return trainer, loop


def is_standard(path):
    model = onnx.load(path, load_external_data=False)
    return {o.domain for o in model.opset_import} == {""} and not model.functions


@pytest.mark.parametrize("name", daily(OPTIMIZERS, "adamw", "nesterov"))
def test_optimizers(name, tmp_path):
    trainer, loop = compare(mlp(), tmp_path, batch, optimizer=OPTIMIZERS[name], clip_norm=0.5, clip_value=0.3)
    assert is_standard(loop.files["step"]) and is_standard(loop.files["evaluation"])
    assert loop.state["updates"] == trainer.steps == 50


@pytest.mark.parametrize("name", daily(SCHEDULES, "one cycle"))
def test_schedules(name, tmp_path):
    compare(mlp(), tmp_path, batch, schedule=SCHEDULES[name])


def test_factors_of_the_learning_rate(tmp_path):
    optimizer = optim.AdamW(lr=0.01, groups={"*.bias": {"lr_factor": 0.5}})
    compare(mlp(), tmp_path, batch, optimizer=optimizer, layer_decay=0.5)


def test_a_learning_rate_for_each_step(tmp_path):
    files = onnxgrad.export_step(mlp(), tmp_path / "step.onnx", LOSS, optim.SGD(lr=0.1))
    loop = PlainLoop(files.description)
    before = loop.state
    loop.step(batch(0), lr=0.0)
    for name in set(before) - {"updates"}:
        assert np.array_equal(before[name], loop.state[name])


def test_dropout_drops_what_the_trainer_drops(tmp_path):
    compare(mlp(dropout=0.4), tmp_path, batch, seed=2**40 + 3)


def test_a_trainer_goes_on_as_files(tmp_path):
    """Its parameters, statistics, optimizer state and number of updates are those to begin with."""
    trainer = Trainer(mlp(dropout=0.4), LOSS, optim.AdamW(lr=0.01), schedule=schedules.Cosine(30))
    for k in range(10):
        trainer.step(batch(k))
    loop = PlainLoop(onnxgrad.export_step(trainer, tmp_path / "step.onnx").description)
    assert np.allclose(*[[one.step(batch(k)) for k in range(10, 30)] for one in (trainer, loop)], rtol=1e-5)


class Digits(nn.Sequential):
    """Images of 8×8, with BatchNormalization and Dropout.

    A bias before BatchNormalization has roundings for a gradient, which Adam would make steps of full size of.
    """

    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16),
            nn.Hardswish(), nn.AvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 10),
        )  # fmt: skip


class Reader(nn.Module):
    """Token numbers: an embedding, a recurrent layer, attention, LayerNorm, Gelu."""

    def __init__(self):
        super().__init__()
        self.table, self.gru = nn.Embedding(20, 16), nn.GRU(16, 16, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, activation="gelu", batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        states, _ = self.gru(self.table(x))
        return self.head(self.encoder(states).mean(1))


def images(k):
    rng = np.random.default_rng(k)
    return {"x": rng.standard_normal((8, 1, 8, 8)).astype(np.float32), "target": rng.integers(0, 10, 8)}


def texts(k):
    rng = np.random.default_rng(k)
    return {"x": rng.integers(0, 20, (4, 7)), "target": rng.integers(0, 4, 4)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "module, batches", [(Digits, images), (Reader, texts)], ids=["convolutions", "recurrence and attention"]
)
def test_networks(module, batches, tmp_path):
    torch.manual_seed(0)
    example = torch.from_numpy(batches(0)["x"])
    export(module(), example, path := tmp_path / "model.onnx", dynamo=False)
    trainer, loop = compare(path, tmp_path, batches, loss=losses.CrossEntropy("y"), clip_norm=1.0, exact=2e-5)
    assert is_standard(loop.files["step"])
    trainer.export(tmp_path / "trained.onnx")
    written = onnxruntime.InferenceSession(loop.write_model(), providers=["CPUExecutionProvider"])
    trained = onnxruntime.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    found, expected = (s.run(None, {"x": batches(99)["x"]})[0] for s in (written, trained))
    assert np.allclose(found, expected, rtol=1e-3, atol=1e-3)


class Masked(nn.Module):
    """Attention with a mask, and attention without one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))

    def forward(self, x):
        return self.layers[1](self.layers[0](x, src_key_padding_mask=x[:, :, 0] > 1))


def numbers(k):
    x, target = np.random.default_rng(k).standard_normal((2, 4, 5, 8)).astype(np.float32)
    return {"x": x, "target": target}


def test_attention_with_and_without_a_mask(tmp_path):
    torch.manual_seed(0)
    export(Masked(), torch.from_numpy(numbers(0)["x"]), path := tmp_path / "model.onnx")
    _, loop = compare(path, tmp_path, numbers, 2, loss=losses.MSE("y"))
    assert is_standard(loop.files["evaluation"])


def test_the_model_is_written_over_in_place(tmp_path):
    trainer, loop = compare(mlp(), tmp_path, batch, 5)
    found = {t.name: numpy_helper.to_array(t) for t in onnx.load(loop.write_model()).graph.initializer}
    for name, array in trainer.parameters.items():
        assert np.allclose(found[name], array, rtol=1e-4, atol=1e-6)


def test_weights_in_a_file_of_their_own(tmp_path):
    model = mlp()
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    path = tmp_path / "from" / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    settings = {"trainable": "fc1.*"}
    trainer, loop = compare(path, tmp_path / "to", batch, 5, **settings)
    assert loop.described["external_data"] == {"model": ["step.model.onnx.data"]}  # others have small ones inside
    found = {t.name: numpy_helper.to_array(t) for t in onnx.load(loop.write_model()).graph.initializer}
    assert np.allclose(found["fc1.weight"], trainer.parameters["fc1.weight"], rtol=1e-4, atol=1e-6)
    assert np.array_equal(found["fc0.weight"], numpy_helper.to_array(onnx.load(path).graph.initializer[0]))


def test_frozen_weights_are_in_the_step_and_not_in_the_state(tmp_path):
    files = onnxgrad.export_step(mlp(), tmp_path / "step.onnx", LOSS, optim.SGD(), trainable="fc1.*")
    loop = PlainLoop(files.description)
    assert set(loop.state) == {"updates", "fc1.weight", "fc1.bias"}
    assert {t.name for t in onnx.load(files.step).graph.initializer} >= {"fc0.weight", "fc0.bias"}


def test_an_ir_model_and_a_loss_of_its_own(tmp_path):
    model = parser.parse_model("""<ir_version: 9, opset_import: ["": 20]> g (float[N, 2] x, float[N, 2] y) =>
        (float loss) <float[2, 2] w = {1, 2, 3, 4}> {
          p = MatMul(x, w)
          d = Sub(p, y)
          s = Mul(d, d)
          loss = ReduceMean<keepdims = 0>(s)
        }""")
    rng = np.random.default_rng(0)
    both = [{n: rng.standard_normal((4, 2)).astype(np.float32) for n in "xy"} for _ in range(11)]
    compare(ir.from_proto(model), tmp_path, both.__getitem__, 10, loss="loss", optimizer=optim.SGD(lr=0.05))


def test_the_description(tmp_path):
    files = onnxgrad.export_step(mlp(), tmp_path / "step.onnx", LOSS, optim.AdamW(lr=0.25))
    described = json.loads(files.description.read_text())
    assert [file.name for file in files] == [
        "step.onnx", "step.eval.onnx", "step.model.onnx", "step.safetensors", "step.json"
    ]  # fmt: skip
    assert described["batch"] == [
        {"input": "x", "type": "float32", "shape": ["N", SIZES[0]]},
        {"input": "target", "type": "int64", "shape": ["N"]},
    ]
    assert described["learning_rate"] == {"input": "learning_rate", "default": 0.25}
    kinds = [entry["kind"] for entry in described["state"]]
    assert [kinds.count(kind) for kind in ("counter", "parameter", "m", "v")] == [1, 4, 4, 4]
    session = onnxruntime.InferenceSession(files.step, providers=["CPUExecutionProvider"])
    inputs = {*(e["input"] for e in described["state"]), "x", "target", "learning_rate"}
    assert {i.name for i in session.get_inputs()} == inputs
    assert {o.name for o in session.get_outputs()} == {e["output"] for e in described["state"]} | {"loss"}


class Own(optim.AdamW):
    pass


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"accumulate": 2}, "a step as a file has no accumulate: make the trainer without it"),
        ({"ema": 0.9}, "a step as a file has no ema: make the trainer without it"),
        ({"schedule": lambda step: 0.5}, "the schedule is a function of Python, which a graph cannot call: leave it"),
    ],
)
def test_refused(settings, sentence, tmp_path):
    with pytest.raises(ValueError, match=f"^export_step: {sentence}"):
        onnxgrad.export_step(mlp(), tmp_path / "step.onnx", LOSS, optim.SGD(), **settings)
    assert list(tmp_path.iterdir()) == []


def test_more_is_refused(tmp_path):
    path = tmp_path / "step.onnx"
    with pytest.raises(TypeError, match="a model needs a loss and an optimizer; only a Trainer brings its own"):
        onnxgrad.export_step(mlp(), path)
    trainer = Trainer(mlp(), LOSS, optim.SGD())
    with pytest.raises(TypeError, match="a Trainer has its own loss, optimizer and settings: pass none with it"):
        onnxgrad.export_step(trainer, path, LOSS)
    trainer.precision = "bf16"
    with pytest.raises(ValueError, match="a step as a file has no precision"):
        onnxgrad.export_step(trainer, path)
    with pytest.raises(FileNotFoundError, match=r"the folder '.*none' to write 'step\.onnx' into does not exist"):
        onnxgrad.export_step(mlp(), tmp_path / "none" / "step.onnx", LOSS, optim.SGD())
    onnx.save(mlp(), tmp_path / "step.model.onnx")
    with pytest.raises(ValueError, match="is the model itself, expected the name of another file"):
        onnxgrad.export_step(tmp_path / "step.model.onnx", path, LOSS, optim.SGD())
    assert [file.name for file in tmp_path.iterdir()] == ["step.model.onnx"]


def test_an_optimizer_without_a_form_for_graphs(tmp_path, monkeypatch):
    trainer = Trainer(mlp(), LOSS, optim.SGD())
    monkeypatch.setattr(trainer, "optimizer", Own())
    with pytest.raises(ValueError, match=r"Own has no form for graphs, expected an optimizer of onnxgrad\.optim"):
        onnxgrad.export_step(trainer, tmp_path / "step.onnx")
