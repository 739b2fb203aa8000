"""The graphs of artifacts: names and order as in 1.19.2, only operators that it has, and gradients as ours."""

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgrad.ort_training.gradient_graph import build_gradient_graph

CNN = """
<ir_version: 9, opset_import: ["" : 17]>
cnn (float[n, 2, 8, 8] x, float[n, 3] target) => (float loss, float[n, 3] y) {
    c = Conv <pads = [1, 1, 1, 1]> (x, w)
    b, mean, var = BatchNormalization <training_mode = 1> (c, scale, shift, running_mean, running_var)
    r = Relu(b)
    p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
    a = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (p)
    f = Flatten(a)
    y = Gemm(f, head, bias)
    d = Sub(y, target)
    s = Mul(d, d)
    loss = ReduceMean <keepdims = 0> (s)
}
"""
SHAPES = {
    "w": (4, 2, 3, 3), "scale": (4,), "shift": (4,), "running_mean": (4,), "running_var": (4,), "head": (16, 3),
    "bias": (3,),
}  # fmt: skip
TRAINED, FROZEN = {"w", "scale", "shift", "head"}, {"running_mean", "running_var"}
LSTM = """
<ir_version: 9, opset_import: ["" : 17]>
lstm (float[5, 2, 3] x) => (float loss) {
    h = LSTM <hidden_size = 4> (x, w, r, b)
    loss = ReduceMean <keepdims = 0> (h)
}
"""


def _model(text: str, shapes: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
    model, random = onnx.parser.parse_model(text), np.random.default_rng(0)
    for name, shape in shapes.items():
        array = np.abs(random.standard_normal(shape)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


@pytest.fixture(scope="module")
def models() -> Any:
    return build_gradient_graph(_model(CNN, SHAPES), TRAINED, FROZEN, ["loss", "y"])


@pytest.mark.parametrize("trained", [TRAINED, {"head"}], ids=["trained", "frozen"])
def test_every_batch_normalization_measures_the_batch(trained: set[str]) -> None:
    text = CNN.replace("b, mean, var = BatchNormalization <training_mode = 1>", "b = BatchNormalization")
    training, _ = build_gradient_graph(_model(text, SHAPES), trained, SHAPES.keys() - trained, ["loss"])
    (norm,) = (node for node in training.graph.node if node.op_type.startswith("BatchNorm") and len(node.output) == 5)
    assert norm.op_type == "BatchNormInternal" and norm.domain == "com.microsoft"
    assert {a.name: a.i for a in norm.attribute}["training_mode"] == 1 and all(norm.output)


def test_names_and_their_order(models: Any) -> None:
    training, evaluation = models
    parameters = [name for name in SHAPES if name in TRAINED | FROZEN]
    trained = [name for name in parameters if name in TRAINED]
    buffers = [f"{name}_grad.accumulation.buffer" for name in trained]
    assert [v.name for v in training.graph.input] == ["x", "target", *parameters, *buffers, "lazy_reset_grad"]
    assert [v.name for v in training.graph.output] == [
        "loss", "y", *(f"{name}_grad.accumulation.out" for name in trained)
    ]  # fmt: skip
    assert [v.name for v in evaluation.graph.input] == ["x", "target", *parameters]
    assert [v.name for v in evaluation.graph.output] == ["loss", "y"]
    assert "bias" in {t.name for t in training.graph.initializer}, "neither trained nor frozen: a constant"
    accumulators = [n for n in training.graph.node if n.op_type == "InPlaceAccumulatorV2"]
    assert {n.input[1] for n in accumulators} == {f"{name}_grad" for name in trained}


def test_only_operators_of_1_19_2(models: Any) -> None:
    training, _ = models
    nodes = {n.op_type: n for n in training.graph.node}
    assert nodes["MaxPoolGrad"].domain == "" and nodes["MaxPoolGrad"].input[1] == nodes["MaxPool"].output[1]
    internal = nodes["BatchNormInternal"]
    assert len(internal.output) == 5 and list(nodes["BatchNormalizationGrad"].input[3:]) == list(internal.output[3:])
    assert [(f.domain, f.name) for f in training.functions] == [("onnxgrad", "AveragePoolGrad")]
    assert training.ir_version <= 10


def test_the_evaluation_model_is_in_inference_mode(models: Any) -> None:
    (norm,) = [n for n in models[1].graph.node if n.op_type == "BatchNormalization"]
    assert len(norm.output) == 1 and [a.i for a in norm.attribute if a.name == "training_mode"] == [0]


def test_a_loss_of_one_element_is_seeded_with_ones() -> None:
    model = _model(CNN.replace("keepdims = 0", "keepdims = 1").replace("float loss", "float[1, 1] loss"), SHAPES)
    training, _ = build_gradient_graph(model, TRAINED, FROZEN, ["loss"])
    assert next(v.name for v in training.graph.output) == "loss" and len(training.graph.output) == 1 + len(TRAINED)


def test_an_lstm_has_the_inputs_that_1_19_2_takes() -> None:
    shapes = {"w": (1, 16, 3), "r": (1, 16, 4), "b": (1, 32)}
    training, _ = build_gradient_graph(_model(LSTM, shapes), {"w", "r", "b"}, set(), ["loss"])
    (gradient,) = [n for n in training.graph.node if n.op_type == "LSTMGrad"]
    assert len(gradient.input) <= 12
    clipped = _model(LSTM.replace("hidden_size = 4", "hidden_size = 4, clip = 1.0"), shapes)
    with pytest.raises(ValueError, match=r"generate_artifacts: .* LSTM with clip: 1\.19\.2 has no gradient of it"):
        build_gradient_graph(clipped, {"w"}, set(), ["loss"])


@pytest.mark.parametrize("trained", [{"scale"}, {"shift"}, {"w"}])
def test_all_outputs_of_a_normalization_have_names(trained: set[str]) -> None:
    """1.19.2 has no optional ones there."""
    training, _ = build_gradient_graph(_model(CNN, SHAPES), trained, {*SHAPES} - trained, ["loss"])
    (gradient,) = [n for n in training.graph.node if n.op_type == "BatchNormalizationGrad"]
    assert len(gradient.output) == 3 and all(gradient.output)


def test_a_newer_opset_is_converted() -> None:
    training, evaluation = build_gradient_graph(
        _model(CNN.replace(": 17]", ": 23]"), SHAPES), TRAINED, FROZEN, ["loss"]
    )
    for model in (training, evaluation):
        assert [i.version for i in model.opset_import if i.domain == ""] == [21]
