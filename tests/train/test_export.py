"""Exported models: valid for onnx and onnxruntime at every opset, trainable again, and written all or not at all."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper, numpy_helper, parser
from tests.checks import same_bits
from tests.train.two_layers import batch, mlp

from onnxgrad import Trainer, losses, optim
from onnxgrad.train import trainer as trainer_module

NORMALIZED = """<ir_version: {ir}, opset_import: ["": {opset}]> g (float[N, 6] x) => (float[N, 3] logits)
<float[3, 6] w = {{{numbers}}}, float[3] scale = {{1, 2, 1}}, float[3] bias = {{0, 1, 0}},
 float[3] mean = {{0, 0, 0}}, float[3] var = {{1, 1, 1}}>
{{
  h = Gemm<transB = 1>(x, w, bias)
  logits = BatchNormalization(h, scale, bias, mean, var)
}}"""


def trained(model, steps=3, **settings):
    trainer = Trainer(model, losses.CrossEntropy("logits"), optim.SGD(lr=0.1), **settings)
    return trainer, [trainer.step(batch(k)) for k in range(steps)]


def outputs_of(path, x):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(["logits"], {"x": x})[0]


@pytest.mark.parametrize("opset", [9, 13, 14, 20])
def test_batch_normalization_at_every_opset(opset, tmp_path):
    """Below opset 14 it has no attribute for training, and onnx refuses it."""
    numbers = ", ".join(f"{x:.3f}" for x in np.random.default_rng(0).standard_normal(18))
    model = parser.parse_model(NORMALIZED.format(ir=8, opset=opset, numbers=numbers))
    trainer, _ = trained(model)
    path = tmp_path / "trained.onnx"
    assert trainer.export(path) == [path]
    onnx.checker.check_model(onnx.load(path), full_check=True)
    seen = {}
    trainer.evaluate([batch(5)], {"kept": lambda outputs, _: seen.update(outputs) or 0.0})
    np.testing.assert_allclose(outputs_of(path, batch(5)["x"]), seen["logits"], rtol=1e-5)


def active(how):
    """The model with Dropout that is active in the file itself, as models that were exported for training are."""
    model = mlp(dropout=0.4)
    node = next(n for n in model.graph.node if n.op_type == "Dropout")
    node.input.append("training")
    truth = numpy_helper.from_array(np.array(True), "training")
    if how == "initializer":
        model.graph.initializer.append(truth)
    else:
        model.graph.node.insert(0, helper.make_node("Constant", [], ["training"], value=truth))
    return model


def old_dropout(opset):
    """Below opset 12 the ratio is an attribute, and Dropout is always inactive."""
    model = mlp(dropout=0.4)
    node = next(n for n in model.graph.node if n.op_type == "Dropout")
    node.CopyFrom(helper.make_node("Dropout", ["a"], ["d"], name="/dropout", ratio=0.4))
    model.graph.initializer.remove(next(t for t in model.graph.initializer if t.name == "ratio"))
    model.opset_import[0].version = opset
    return model


def with_weights(model, trainer):
    for tensor in model.graph.initializer:
        if tensor.name in trainer.parameters:
            tensor.CopyFrom(numpy_helper.from_array(trainer.parameters[tensor.name], tensor.name))
    return model


MODELS = {
    "inactive": lambda: mlp(dropout=0.4),
    "initializer": lambda: active("initializer"),
    "Constant": lambda: active("Constant"),
    "opset 9": lambda: old_dropout(9),
    "opset 10": lambda: old_dropout(10),
}


@pytest.mark.parametrize("which", MODELS)
def test_an_exported_model_is_trained_again_with_its_dropout(which, tmp_path):
    model, path = MODELS[which](), tmp_path / "trained.onnx"
    first, _ = trained(model)
    first.export(path)
    exported = onnx.load(path)
    assert [n.op_type for n in exported.graph.node] == ["Gemm", "Tanh", "Dropout", "Gemm"]
    assert same_bits(*(outputs_of(path, batch(9)["x"]) for _ in range(2)))  # inactive
    _, losses_again = trained(path)
    assert losses_again == trained(with_weights(model, first))[1]
    assert losses_again != trained(with_weights(mlp(), first))[1]  # numbers are dropped


@pytest.mark.parametrize("damage", ["onnx", "onnxruntime"])
def test_a_model_that_is_refused_is_not_written(damage, tmp_path, monkeypatch):
    path = tmp_path / "trained.onnx"
    trainer, _ = trained(mlp())
    trainer.export(path)
    before = path.read_bytes()

    def spoil(model, arrays):
        if damage == "onnx":
            model.graph[0].attributes["spoilt"] = ir.AttrInt64("spoilt", 1)
        else:  # types, which onnx does not check
            model.graph.outputs[0].dtype = ir.DataType.INT64

    monkeypatch.setattr(trainer_module, "put_back", spoil)
    with pytest.raises(RuntimeError, match=f"^'{path}' is not written, because {damage} refuses the model"):
        trainer.export(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [path.name]
