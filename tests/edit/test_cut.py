"""cut(): parts of models compute what the whole computes."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from click.testing import CliRunner
from tests.checks import raises
from tests.models.architectures import models
from tests.torch_export import export

import onnxgrad
from onnxgrad.cli import main

KERAS = Path(__file__).parents[1] / "data" / "keras"


def run(model, feeds, names=None):
    data = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    return onnxruntime.InferenceSession(data).run(names, feeds)


TEXT = """
<ir_version: 8, opset_import: ["" : 17, "own" : 1, "other" : 2]>
m (float[n, 4] x, float[n, 3] mask) => (float[n, 3] y, float z) {
    a = MatMul(x, w1)
    h = own.twice(a)
    b = MatMul(h, w2)
    y = Add(b, mask)
    z = ReduceSum<keepdims = 0>(y)
}
<domain: "own", opset_import: ["" : 17]>
twice (v) => (r) { r = Add(v, v) }
"""


def text_model():
    model = onnx.parser.parse_model(TEXT)
    rng = np.random.default_rng(0)
    for name, shape in {"w1": (4, 8), "w2": (8, 3)}.items():
        array = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


X = np.random.default_rng(1).standard_normal((5, 4)).astype(np.float32)
MASK = np.random.default_rng(2).standard_normal((5, 3)).astype(np.float32)


def test_up_to_a_value():
    model = text_model()
    part = onnxgrad.cut(model, "h")
    onnx.checker.check_model(part, full_check=True)
    assert [v.name for v in part.graph.input] == ["x"] and [t.name for t in part.graph.initializer] == ["w1"]
    assert [d.dim_param or d.dim_value for d in part.graph.output[0].type.tensor_type.shape.dim] == ["n", 8]
    assert len(part.functions) == 1 and {o.domain for o in part.opset_import} == {"", "own"}
    expected = 2 * X @ onnx.numpy_helper.to_array(model.graph.initializer[0])
    np.testing.assert_allclose(run(part, {"x": X})[0], expected, rtol=1e-5)
    assert model == text_model()


def test_from_a_value_on():
    model = text_model()
    part = onnxgrad.cut(model, ["z", "y"], inputs="h")
    onnx.checker.check_model(part, full_check=True)
    assert [v.name for v in part.graph.input] == ["h", "mask"]  # which is still needed
    assert [v.name for v in part.graph.output] == ["z", "y"] and not part.functions
    (h,) = run(onnxgrad.cut(model, "h"), {"x": X})
    whole = run(model, {"x": X, "mask": MASK})
    found = run(part, {"h": h, "mask": MASK})
    assert np.array_equal(found[0], whole[1]) and np.array_equal(found[1], whole[0])
    between = onnxgrad.cut(ir.from_proto(model), ["b"], inputs=["h"])
    assert isinstance(between, ir.Model) and list(between.graph.initializers) == ["w2"]
    assert between.graph.inputs[0].shape == ["n", 8]


@pytest.mark.slow
def test_features_are_those_of_pytorch(tmp_path):
    torch.manual_seed(0)
    module = models.resnet18().eval()
    x = torch.randn(2, 3, 64, 64)
    model = export(module, x, tmp_path / "model.onnx", dynamo=False)
    last = next(node for node in reversed(model.graph.node) if node.op_type == "Gemm")
    features = onnxgrad.cut(tmp_path / "model.onnx", last.input[0])
    module.fc = torch.nn.Identity()
    expected = module(x).detach().numpy()
    np.testing.assert_allclose(run(features, {"x": x.numpy()})[0], expected, rtol=1e-4, atol=1e-5)
    joined = onnxgrad.join(features, onnxgrad.cut(tmp_path / "model.onnx", "y", last.input[0]))
    assert np.array_equal(run(joined, {"x": x.numpy()})[0], run(tmp_path / "model.onnx", {"x": x.numpy()})[0])


def test_what_a_subgraph_reads_stays():
    text = """
    <ir_version: 8, opset_import: ["" : 17]>
    m (float[4] x, bool c) => (float[4] y, float[4] e) {
        a = Mul(x, w)
        unused = Mul(x, v)
        y = If (c) <
            then_branch = t () => (float[4] ty) { ty = Add(a, w) },
            else_branch = f () => (float[4] fy) { fy = Neg(a) }
        >
        e = Exp(unused)
    }
    """
    model = onnx.parser.parse_model(text)
    for name in "wv":
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.arange(4, dtype=np.float32), name))
    x, c = np.ones(4, np.float32), np.array(True)
    part = onnxgrad.cut(model, "y")
    assert [t.name for t in part.graph.initializer] == ["w"]
    assert np.array_equal(run(part, {"x": x, "c": c})[0], 2 * np.arange(4))
    behind = onnxgrad.cut(model, "y", "a")
    assert [v.name for v in behind.graph.input] == ["a", "c"] or [v.name for v in behind.graph.input] == ["c", "a"]
    assert np.array_equal(run(behind, {"a": x, "c": c})[0], 1 + np.arange(4))
    with raises(ValueError, "cut: outputs names 'ty', which is inside a subgraph, which cut() does not support"):
        onnxgrad.cut(model, "ty")


def test_of_keras_with_weights_in_a_file(tmp_path, monkeypatch):
    model = onnx.load(KERAS / "mlp.onnx")
    inner = next(n.output[0] for n in model.graph.node if n.op_type == "Sigmoid")
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    monkeypatch.chdir(tmp_path.parent)
    part = onnxgrad.cut(tmp_path / "m.onnx", inner)
    x = {model.graph.input[0].name: np.load(KERAS / "mlp.npz")["x"]}
    assert np.array_equal(run(part, x)[0], run(onnxgrad.cut(KERAS / "mlp.onnx", inner), x)[0])


@pytest.mark.parametrize(
    "outputs, inputs, text",
    [
        ([], [], "outputs is empty, expected names of values in the model"),
        ("hh", [], "outputs names 'hh', which is not a value of the model; did you mean 'h'?"),
        ("x", [], "outputs names 'x', which is an input, expected what a node computes"),
        ("w1", [], "outputs names 'w1', which is an initializer, expected what a node computes"),
        ("h", "w1", "inputs names 'w1', which is an initializer, expected what a node computes"),
        ("h", ["h"], "'h' is among outputs and inputs, expected one of them"),
        ("h", ["b"], "outputs do not depend on 'b', which inputs names"),
    ],
)
def test_wrong_names(outputs, inputs, text):
    with raises(ValueError, f"cut: {text}"):
        onnxgrad.cut(text_model(), outputs, inputs)


def test_the_name_of_a_node():
    model = text_model()
    model.graph.node[0].name = "first"
    text = "cut: outputs names 'first', which is not a value of the model; did you mean its result, 'a'?"
    with raises(ValueError, text):
        onnxgrad.cut(model, "first")


def test_on_the_command_line(tmp_path):
    onnx.save(text_model(), tmp_path / "model.onnx")

    def cut(*arguments):
        return CliRunner().invoke(main, ["cut", str(tmp_path / "model.onnx"), *map(str, arguments)])

    first = cut("--output", "h", "-o", tmp_path / "first.onnx")
    assert first.exit_code == 0, first.output
    assert "float32[n, 8]" in first.output and "2 nodes" in first.output
    second = cut("--output", "y", "--input", "h", "-o", tmp_path / "second.onnx")
    assert second.exit_code == 0, second.output
    (h,) = run(tmp_path / "first.onnx", {"x": X})
    whole = run(tmp_path / "model.onnx", {"x": X, "mask": MASK}, ["y"])
    assert np.array_equal(run(tmp_path / "second.onnx", {"h": h, "mask": MASK})[0], whole[0])
    again = cut("--output", "h", "-o", tmp_path / "model.onnx")
    assert again.exit_code == 2 and "is the model itself" in again.output
    wrong = cut("--output", "nothing", "-o", tmp_path / "wrong.onnx")
    assert wrong.exit_code == 2 and not (tmp_path / "wrong.onnx").exists()


def test_a_graph_of_onnxruntime_training_on_the_command_line(tmp_path):
    """It has operators among ONNX's own that onnx does not know."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 15]>
    g (float[1,1,1,1] dY, int64[1,1,1,1] at) => (float[1,1,2,2] y) {
        dX = MaxPoolGrad <kernel_shape = [2, 2]> (dY, at)
        x = Relu (dX)
        y = Neg (x)
    }""")
    onnx.save(model, tmp_path / "model.onnx")
    arguments = ["cut", str(tmp_path / "model.onnx"), "--output", "x", "-o", str(tmp_path / "part.onnx")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    part = onnx.load(tmp_path / "part.onnx")
    assert [node.op_type for node in part.graph.node] == [node.op_type for node in onnxgrad.cut(model, "x").graph.node]
