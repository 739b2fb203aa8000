"""The trainer against PyTorch's loop: same start, same batches, same losses."""

import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from tests.checks import raises, same_bits
from tests.train.two_layers import batch, mlp, weights

from onnxgrad.graph.files import load
from onnxgrad.passes.prepare import prepare
from onnxgrad.train import devices, losses, optim, schedules
from onnxgrad.train.batches import Batches
from onnxgrad.train.session import Session
from onnxgrad.train.trainer import Trainer, TrainingStoppedError

STEPS = 60


def torch_losses(make, steps=STEPS, clip=None, schedule=None):
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    with torch.no_grad():
        for tensor, array in zip(net.parameters(), weights().values(), strict=True):
            tensor.copy_(torch.tensor(array))
    optimizer = make(net.parameters())
    schedule = schedule and schedule(optimizer)
    found = []
    for k in range(steps):
        optimizer.zero_grad()
        given = batch(k)
        loss = torch.nn.functional.cross_entropy(net(torch.tensor(given["x"])), torch.tensor(given["target"]))
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        if schedule:
            schedule.step()
        found.append(loss.item())
    return found


def my_losses(optimizer, **how):
    trainer = Trainer(mlp(), losses.CrossEntropy("logits"), optimizer, **how)
    return [trainer.step(batch(k)) for k in range(STEPS)]


@pytest.mark.parametrize(
    "mine, theirs",
    [
        (optim.SGD(lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (optim.Adam(lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
        (optim.AdamW(lr=0.01), lambda p: torch.optim.AdamW(p, lr=0.01)),
        (optim.Adagrad(lr=0.05), lambda p: torch.optim.Adagrad(p, lr=0.05)),
        (optim.RMSprop(lr=0.005), lambda p: torch.optim.RMSprop(p, lr=0.005)),
    ],
    ids=lambda o: getattr(o, "name", ""),
)
def test_losses_as_in_pytorch(mine, theirs):
    expected = torch_losses(theirs)
    assert np.allclose(my_losses(mine), expected, rtol=1e-3)
    assert expected[-1] < expected[0]


def test_clipping_and_schedules_as_in_pytorch():
    plain = lambda p: torch.optim.SGD(p, lr=0.5)  # noqa: E731
    expected = torch_losses(plain, clip=0.3)
    assert np.allclose(my_losses(optim.SGD(lr=0.5), clip_norm=0.3), expected, rtol=1e-3)
    expected = torch_losses(plain, schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 10, 0.5))
    assert np.allclose(my_losses(optim.SGD(lr=0.5), schedule=schedules.Step(10, 0.5)), expected, rtol=1e-3)


def test_the_same_bits_on_repeat():
    first, second = my_losses(optim.Adam(lr=0.01)), my_losses(optim.Adam(lr=0.01))
    assert first == second


def test_micro_batches_make_one_update():
    whole = Trainer(mlp(), losses.CrossEntropy("logits"), optim.SGD(lr=0.1))
    parts = Trainer(mlp(), losses.CrossEntropy("logits"), optim.SGD(lr=0.1), accumulate=2)
    for k in range(5):
        given = batch(k)
        whole.step(given)
        for half in (slice(0, 4), slice(4, 8)):
            parts.step({name: a[half] for name, a in given.items()})
        assert parts.steps == whole.steps == k + 1
    for name, array in whole.parameters.items():
        assert np.allclose(array, parts.parameters[name], rtol=1e-5, atol=1e-7)


def norm_of(gradients):
    return np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in gradients.values()))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_gradient_norm(accumulate):
    def after_an_update(**settings):
        trainer = Trainer(mlp(), losses.CrossEntropy("logits"), optim.SGD(lr=0.0), accumulate=accumulate, **settings)
        for k in range(accumulate):
            trainer.step(batch(k))
        return trainer

    plain, clipped = after_an_update(), after_an_update(clip_norm=0.01)
    assert abs(plain.gradient_norm / norm_of(plain.gradients) - 1) < 1e-7
    assert abs(clipped.gradient_norm / plain.gradient_norm - 1) < 1e-7
    for name, norm in plain.gradient_norms().items():
        assert abs(norm / norm_of({name: plain.gradients[name]}) - 1) < 1e-7
        assert abs(clipped.gradient_norms()[name] / norm - 1) < 1e-7
    assert abs(norm_of(clipped.gradients) / 0.01 - 1) < 1e-5


def test_a_gradient_norm_beyond_float32():
    """Squares are added up in float64."""
    trainer = Trainer(mlp(), losses.CrossEntropy("logits"), optim.SGD(lr=0.0))
    trainer.step(batch(0))
    for gradient in trainer.gradients.values():
        gradient[...] *= np.float32(1e30)
    trainer._runner.clip({})
    assert np.isfinite(trainer.gradient_norm) and abs(trainer.gradient_norm / norm_of(trainer.gradients) - 1) < 1e-7
    name, gradient = next(iter(trainer.gradients.items()))
    gradient.flat[3] = np.nan
    with pytest.raises(
        TrainingStoppedError, match=f"the norm of the gradient is .*: the gradient of '{name}' is not finite"
    ):
        trainer._runner.clip({})


def test_frozen_parameters_stay():
    trainer = Trainer(mlp(), losses.CrossEntropy("logits"), optim.SGD(lr=0.1), trainable="fc1.*")
    trainer.step(batch(0))
    assert list(trainer.parameters) == ["fc1.weight", "fc1.bias"]
    assert not same_bits(trainer.parameters["fc1.bias"], weights()["fc1.bias"])


def test_fit_evaluate_export(tmp_path):
    trainer = Trainer(mlp(dropout=0.2), losses.CrossEntropy("logits"), optim.Adam(lr=0.02))
    data = batch(0, 300)

    def accuracy(outputs, given):
        return np.mean(outputs["logits"].argmax(1) == given["target"])

    held_out = Batches(batch(1, 100), 32, shuffle=False)
    before = trainer.evaluate(held_out, {"accuracy": accuracy})
    records = trainer.fit(Batches(data, 32), epochs=8, validation=held_out, metrics={"accuracy": accuracy}, quiet=True)
    assert [r.epoch for r in records] == list(range(1, 9)) and records[-1].steps == 80
    assert records[-1].validation["accuracy"] > before["accuracy"] and records[-1].loss < records[0].loss
    trainer.export(tmp_path / "trained.onnx")
    exported = onnx.load(tmp_path / "trained.onnx")
    onnx.checker.check_model(exported, full_check=True)
    assert [n.op_type for n in exported.graph.node] == ["Gemm", "Tanh", "Dropout", "Gemm"]
    assert exported.producer_name == "me" and exported.metadata_props[0].value == "me"
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    x = batch(1, 100)
    mine = accuracy({"logits": session.run(["logits"], {"x": x["x"]})[0]}, x)
    assert mine == pytest.approx(records[-1].validation["accuracy"])


def test_batches_without_examples_count_for_nothing():
    trainer = Trainer(mlp(), losses.CrossEntropy("logits"), optim.SGD())
    empty = {name: array[:0] for name, array in batch(0).items()}
    assert trainer.evaluate([batch(0), empty]) == trainer.evaluate([batch(0)])
    with raises(ValueError, "evaluate: there are no examples"):
        trainer.evaluate([empty])


def test_bad_batches_and_settings():
    trainer = Trainer(mlp(), losses.CrossEntropy("logits"), optim.SGD())
    good = batch(0)
    with raises(ValueError, "the batch lacks 'target', expected x, target"):
        trainer.step({"x": good["x"]})
    with raises(ValueError, "the batch has 'y', expected x, target"):
        trainer.step({**good, "y": 1})
    with raises(ValueError, "the batch's x has shape [8, 5], expected ['N', 6]"):
        trainer.step({**good, "x": good["x"][:, :5]})
    with raises(ValueError, "the batch's target has shape [4], but N is 8 in x"):
        trainer.step({**good, "target": good["target"][:4]})
    advice = "the numbers of classes; CrossEntropy(…, probabilities=True) takes a distribution over them"
    with raises(TypeError, f"the batch's target holds float32, expected int64, {advice}"):
        trainer.step({**good, "target": good["target"].astype(np.float32)})
    with raises(
        ValueError, "the batch's target has shape [8, 1], expected 1 dimensions; leave out its last one, of size 1"
    ):
        trainer.step({**good, "target": good["target"][:, None]})
    with raises(TypeError, "the batch's x holds object, expected float32"):
        trainer.step({**good, "x": good["x"].astype(object)})
    with raises(TypeError, "the batch's x holds lists of different lengths, expected float32"):
        trainer.step({**good, "x": [[1, 2], [3]]})
    wrong = good["target"].copy()
    for label, expected in ((3, "0 to 2"), (-100, "0 to 2")):
        wrong[5] = label
        text = f"the batch's target has the class {label} at [5], expected {expected}; CrossEntropy(…, ignore_index="
        with raises(ValueError, f"{text}{label}) leaves it out"):
            trainer.step({**good, "target": wrong})
    assert trainer.steps == 0
    Trainer(mlp(), losses.CrossEntropy("logits", ignore_index=-100), optim.SGD()).step({**good, "target": wrong})
    with raises(TypeError, "Trainer: optimizer is a str, expected one of onnxgrad.optim"):
        Trainer(mlp(), losses.CrossEntropy("logits"), "adam")


def test_a_loss_that_is_not_finite_stops():
    trainer = Trainer(mlp(), losses.CrossEntropy("logits"), optim.SGD())
    trainer.step(batch(0))
    before = {name: a.copy() for name, a in trainer.parameters.items()}
    bad = batch(1)
    bad["x"][0, 0] = np.nan
    end = "; the parameters are those before the step"
    with raises(TrainingStoppedError, f"step 2: the loss is nan: the batch's x is nan in example 0, at [0, 0]{end}"):
        trainer.step(bad)
    good, bias = batch(1), trainer.parameters["fc1.bias"]
    before["fc1.bias"][0] = bias[0] = np.inf
    with raises(TrainingStoppedError, f"step 2: the loss is nan: the parameter 'fc1.bias' is not finite{end}"):
        trainer.step(good)
    assert all(same_bits(before[name], a) for name, a in trainer.parameters.items())


def test_operators_with_a_rule_stay_what_they_are():
    """Rules are there before the graph is made ready: without them Gelu would be written by its definition."""
    code = """
import onnxgrad
from onnx import parser
model = parser.parse_model('''<ir_version: 9, opset_import: ["": 20]> g (float[N, 4] x) => (float[N, 4] y)
    <float[4] b = {0, 0, 0, 0}> { s = Add(x, b) y = Gelu(s) }''')
trainer = onnxgrad.Trainer(model, onnxgrad.losses.MSE("y"), onnxgrad.optim.SGD())
print(sorted(n.op_type for n in trainer._model.step.model.graph if "Gelu" in n.op_type))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['Gelu', 'GeluGrad']\n"


def normed() -> onnx.ModelProto:
    random = np.random.default_rng(3)
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> m (float[N, 4, 3] x) => (float[N, 5, 3] y) {'
        "h = Conv(x, first)  b = BatchNormalization(h, scale, bias, mean, var)  y = Conv(b, last) }"
    )
    shapes = {"first": (6, 4, 1), "scale": (6,), "bias": (6,), "mean": (6,), "var": (6,), "last": (5, 6, 1)}
    for name, shape in shapes.items():
        array = random.uniform(0.5, 1.5, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


@pytest.mark.parametrize(
    ("settings", "trained", "measures"),
    [
        ({}, {"first", "scale", "bias", "last"}, True),
        ({"freeze": ["scale", "bias"]}, {"first", "last"}, True),
        ({"freeze": "mean"}, {"first", "scale", "bias", "last"}, False),
        ({"freeze": ["scale", "bias"], "freeze_statistics": True}, {"first", "last"}, False),
        ({"freeze": ["scale"], "freeze_statistics": True}, {"first", "bias", "last"}, True),
        ({"trainable": "last", "freeze_statistics": True}, {"last"}, False),
    ],
)
def test_frozen_statistics_stay_and_are_used(settings, trained, measures):
    random = np.random.default_rng(4)
    batch = {
        "x": random.standard_normal((8, 4, 3), np.float32),
        "target": random.standard_normal((8, 5, 3), np.float32),
    }
    trainer = Trainer(normed(), losses.MSE("y"), optim.SGD(lr=0.1), **settings)
    before = trainer.evaluate([batch])["loss"]
    loss = trainer.step(batch)
    assert set(trainer.parameters) == trained
    assert bool(trainer.statistics) == measures and (loss == pytest.approx(before, rel=1e-6)) == (not measures)


def test_freeze_suggests_names():
    with pytest.raises(ValueError, match=r"^Trainer: freeze names 'lost', .*; did you mean 'last'\?$"):
        Trainer(normed(), losses.MSE("y"), optim.SGD(lr=0.1), freeze="lost")


def test_nodes_that_the_cpu_provider_has_are_counted():
    """All of them, but for those that compute whole numbers; on a GPU a remark tells."""
    prepared = prepare(
        load(
            onnx.parser.parse_model("""
            <ir_version: 8, opset_import: ["" : 18]>
            counted (float[N, 3] x) => (float[M, K] y) {
                s = Shape (x)
                r = Relu (x)
                c = Cos (r)
                y = Reshape (c, s)
            }
        """),
            "test",
        ),
        "test",
    )
    model = prepared.model
    counted = Session(model, {}, {}, OnGpu(), quiet=True).nodes_on_host(model.graph)
    if hasattr(onnxruntime.InferenceSession, "get_provider_graph_assignment_info"):
        assert counted == {"Relu": 1, "Cos": 1, "Reshape": 1}
    else:
        assert not counted


class OnGpu(devices.Cpu):
    """Asks for what is asked for on a GPU, and has all nodes on the CPU."""

    name = "elsewhere"


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        (
            {"loss": losses.CrossEntropy},
            "loss is the class CrossEntropy, expected one of onnxgrad.losses with an output's ",
        ),
        ({"loss": None}, "loss is a NoneType, expected one of onnxgrad.losses with an output's name, as MSE(…), or "),
        (
            {"schedule": "cosine"},
            "schedule is 'cosine', expected one of onnxgrad.schedules or a function of the number",
        ),
        ({"schedule": schedules.Cosine}, "schedule is <class 'onnxgrad.train.schedules.Cosine'>, expected one of onnx"),
        ({"seed": "a"}, "seed is 'a', expected a whole number"),
        ({"accumulate": 1.5}, "accumulate is 1.5, expected a whole number of at least 1"),
        ({"clip_norm": "1"}, "clip_norm is '1', expected a number above 0"),
    ],
)
def test_wrong_arguments_get_a_sentence(wrong, sentence):
    given = {"loss": losses.CrossEntropy("logits"), "optimizer": optim.SGD(lr=0.1), **wrong}
    with pytest.raises((TypeError, ValueError)) as error:
        Trainer(mlp(), **given)
    assert str(error.value).startswith(f"Trainer: {sentence}")


def test_an_exponent_that_is_two_at_first_is_trained():
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 18]>
        g (float[n, 3] x) => (float[n, 3] y) <float c = {2}> { m = MatMul(x, w)  s = Softplus(m)  y = Pow(s, c) }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(3, dtype=np.float32) / 2, "w"))
    x, target = np.random.default_rng(0).standard_normal((2, 4, 3)).astype(np.float32)
    trainer = Trainer(model, losses.MSE("y"), optim.SGD(lr=0.3), trainable=["c", "w"])
    w, c = (torch.eye(3) / 2).requires_grad_(), torch.tensor(2.0, requires_grad=True)
    optimizer = torch.optim.SGD([w, c], lr=0.3)
    for _ in range(5):
        y = torch.nn.functional.softplus(torch.from_numpy(x) @ w) ** c
        loss = (y - torch.from_numpy(target)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert trainer.step({"x": x, "target": target}) == pytest.approx(loss.item(), rel=1e-5)
