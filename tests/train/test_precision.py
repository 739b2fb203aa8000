"""Trainer(precision=): bf16 and fp16 train as float32 does, within what they round; the loss scale of fp16."""

import collections

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import onnxgrad
from onnxgrad import losses, optim
from onnxgrad.graph.files import load
from onnxgrad.passes.prepare import prepare
from onnxgrad.train import devices, loss_scale
from onnxgrad.train.checkpoint import read_checkpoint, write_checkpoint
from onnxgrad.train.fitting import TrainingStoppedError
from onnxgrad.train.graphs import LOSS_SCALE, step_graph


def mlp(width=64, classes=10):
    """Of large enough products: small ones are left alone."""
    rng = np.random.default_rng(0)
    shapes = {"W1": (48, width), "b1": (width,), "W2": (width, width), "b2": (width,), "W3": (width, classes)}
    weights = {n: (rng.standard_normal(s) / np.sqrt(s[0])).astype(np.float32) for n, s in shapes.items()}
    nodes = [
        helper.make_node("Gemm", ["X", "W1", "b1"], ["h1"]),
        helper.make_node("Relu", ["h1"], ["r1"]),
        helper.make_node("MatMul", ["r1", "W2"], ["p2"]),
        helper.make_node("Add", ["p2", "b2"], ["h2"]),
        helper.make_node("Tanh", ["h2"], ["r2"]),
        helper.make_node("MatMul", ["r2", "W3"], ["Y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["N", 48])],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["N", classes])],
        initializer=[numpy_helper.from_array(w, n) for n, w in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def batch(examples=256):
    rng = np.random.default_rng(1)
    X = rng.standard_normal((examples, 48)).astype(np.float32)
    return {"X": X, "target": (X[:, :10] + 0.1 * rng.standard_normal((examples, 10))).argmax(1)}


def trainer(precision, **options):
    return onnxgrad.Trainer(mlp(), losses.CrossEntropy("Y"), optim.AdamW(lr=1e-3), precision=precision, **options)


@pytest.fixture
def fp16_on_the_cpu(monkeypatch):
    """Where it is not offered, since it gains nothing; onnxruntime casts to float32 and back."""
    monkeypatch.setattr(devices.Cpu, "precisions", ("float32", "bf16", "fp16"))


def test_bf16_learns_what_float32_learns():
    data, curves = batch(), {}
    for precision in ("float32", "bf16"):
        trained = trainer(precision)
        curves[precision] = [trained.step(data) for _ in range(200)]
    assert curves["float32"][-1] < 0.3 * curves["float32"][0]
    assert curves["bf16"] != curves["float32"]
    np.testing.assert_allclose(curves["bf16"], curves["float32"], rtol=0.02)


def test_bf16_rounds_what_products_multiply_and_nothing_else():
    trained = trainer("bf16")
    kinds = collections.Counter(n.op_type for n in trained._model.step.model.graph)
    assert kinds["PermutedMatMul"] >= 5 and kinds["Tanh"] == 1
    assert all(v.dtype != ir.DataType.BFLOAT16 for n in trained._model.step.model.graph for v in n.outputs)
    assert {str(a.dtype) for a in trained.parameters.values()} == {"float32"}


def test_gradients_are_those_of_autocast():
    module = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10, bias=False))
    model, data = mlp(), batch()
    given = {i.name: torch.tensor(numpy_helper.to_array(i)) for i in model.graph.initializer}
    names = {"W1": "0.weight", "b1": "0.bias", "W2": "2.weight", "b2": "2.bias", "W3": "4.weight"}
    module.load_state_dict({names[n]: w.T if w.ndim == 2 else w for n, w in given.items()})
    with torch.autocast("cpu", torch.bfloat16):
        predicted = module(torch.tensor(data["X"]))
    loss = nn.functional.cross_entropy(predicted.float(), torch.tensor(data["target"]))
    loss.backward()
    trained = trainer("bf16")
    assert trained.step(data) == pytest.approx(loss.item(), rel=1e-2)
    for name, parameter in module.named_parameters():
        mine = trained.gradients[next(n for n, its in names.items() if its == name)]
        its = parameter.grad.numpy().T if mine.ndim == 2 else parameter.grad.numpy()
        assert np.linalg.norm(mine - its) <= 0.03 * np.linalg.norm(its)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_graph_for_a_gpu(precision):
    """Products, what follows them, and their gradients have the half type; outputs and losses do not."""
    step = step_graph(prepare(load(mlp(), "Trainer"), "Trainer"), losses.CrossEntropy("Y"), precision=precision)
    onnx.checker.check_model(ir.to_proto(step.model))
    half = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}[precision]
    for node in step.model.graph:
        if node.op_type in ("Gemm", "MatMul", "Relu", "ReluGrad", "Tanh", "TanhGrad"):
            assert {v.dtype for v in (*node.inputs, *node.outputs)} == {half}
    assert {v.dtype for v in step.model.graph.outputs} == {ir.DataType.FLOAT}
    casts = collections.Counter(n.inputs[0].name for n in step.model.graph if n.op_type == "Cast")
    assert all(casts[name] == 1 for name in ("W1", "W2", "W3", "b1", "b2"))
    assert any(v.name == LOSS_SCALE for v in step.model.graph.inputs) == (precision == "fp16")


@pytest.mark.slow  # kernels for half types are compiled
def test_batch_statistics_stay_float32():
    rng = np.random.default_rng(0)
    shapes = {"W": (8, 3, 3, 3), "scale": (8,), "bias": (8,), "mean": (8,), "var": (8,), "L": (288, 4)}
    arrays = {n: rng.standard_normal(s).astype(np.float32) / 4 for n, s in shapes.items()}
    arrays["var"], arrays["scale"] = np.ones(8, np.float32), np.ones(8, np.float32)
    nodes = [
        helper.make_node("Conv", ["X", "W"], ["c"]),
        helper.make_node("BatchNormalization", ["c", "scale", "bias", "mean", "var"], ["n"]),
        helper.make_node("Relu", ["n"], ["r"]),
        helper.make_node("Flatten", ["r"], ["f"]),
        helper.make_node("MatMul", ["f", "L"], ["Y"]),
    ]
    kinds = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("X", [8, 3, 8, 8]), ("Y", [8, 4]))]
    graph = helper.make_graph(
        nodes, "cnn", kinds[:1], kinds[1:], [numpy_helper.from_array(a, n) for n, a in arrays.items()]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    x = rng.standard_normal((8, 3, 8, 8)).astype(np.float32)
    prepared = prepare(load(model, "Trainer"), "Trainer")
    weights = {n: v.const_value.numpy() for n, v in prepared.graph.initializers.items()}
    found = {}
    for precision in ("float32", "fp16"):
        step = step_graph(prepared.clone(), losses.CrossEntropy("Y"), precision=precision)
        session = onnxruntime.InferenceSession(ir.to_proto(step.model).SerializeToString(), onnxgrad.register())
        feeds = {"X": x, "target": np.arange(8) % 4, LOSS_SCALE: np.ones((), np.float32)}
        inputs = {i.name for i in session.get_inputs()}
        results = session.run(None, {n: a for n, a in {**feeds, **weights}.items() if n in inputs})
        found[precision] = dict(zip([o.name for o in session.get_outputs()], results, strict=True))
    assert len(step.statistics) == 1
    for name, expected in found["float32"].items():
        assert found["fp16"][name].dtype == np.float32
        np.testing.assert_allclose(found["fp16"][name], expected, rtol=0.02, atol=0.02 * np.abs(expected).max())


@pytest.mark.usefixtures("fp16_on_the_cpu")
def test_fp16_learns_and_keeps_its_loss_scale(tmp_path, monkeypatch):
    monkeypatch.setattr(loss_scale, "PATIENCE", 3)
    data = batch()
    plain, half = trainer("float32"), trainer("fp16")
    curves = [[t.step(data) for _ in range(20)] for t in (plain, half)]
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-2)
    assert half.skipped == 0 and half._state.scale.value == 2.0**22  # 20 updates
    half.save(tmp_path / "half.safetensors")
    again = trainer("fp16")
    again.restore(tmp_path / "half.safetensors")
    assert again._state.scale == half._state.scale
    trainer("float32").restore(tmp_path / "half.safetensors")
    arrays, facts = read_checkpoint(tmp_path / "half.safetensors")
    facts["loss_scale"]["value"] = "much"
    write_checkpoint(tmp_path / "bad.safetensors", arrays, facts)
    with pytest.raises(ValueError, match="is damaged: 'loss_scale/value' is 'much'"):
        again.restore(tmp_path / "bad.safetensors")


@pytest.mark.usefixtures("fp16_on_the_cpu")
def test_an_update_is_left_out_if_gradients_are_too_large(capsys):
    half = trainer("fp16")
    half._state.scale.value = 2.0**40
    before = {n: a.copy() for n, a in half.parameters.items()}
    half.fit([batch()])
    assert half.skipped == 1 and half.steps == 0 and half._state.scale.value == 2.0**39
    assert all((a == before[n]).all() for n, a in half.parameters.items())
    assert "an update is left out: its gradients are too large for fp16" in capsys.readouterr().err


@pytest.mark.usefixtures("fp16_on_the_cpu")
def test_a_gradient_that_no_scale_makes_finite_stops_training():
    half = trainer("fp16")
    half._state.scale.value = 1.0
    half.gradients["W3"][0, 0] = np.inf
    with pytest.raises(TrainingStoppedError, match=r"norm of the gradient is inf: the gradient of 'W3' is not finite"):
        half._runner.clip(batch())


@pytest.mark.parametrize("precision", ["fp16", "bfloat16", None])
def test_refused(precision):
    with pytest.raises(ValueError, match="expected 'float32' or 'bf16' on the device 'cpu'"):
        trainer(precision)
