"""check_gradient of models that draw at random, where what is drawn is drawn once, and of what stays float32."""

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import parser
from tests.checks import raises
from tests.train.test_export import active
from tests.train.two_layers import mlp

from onnxgrad import check_gradient, cli

HEAD = '<ir_version: 9, opset_import: ["": {opset}, "local": 1]> g (float[4, 5] x, bool on) => (float y) '
BODIES = {
    "a constant": "{ on_ = Constant<value = bool {1}>() r = Constant<value_float = 0.4>() d = Dropout(x, r, on_)",
    "an input": "{ d = Dropout(x, w, on)",
    "the mask": "{ d0, mask = Dropout(x, w, on) m = Cast<to = 1>(mask) d = Mul(d0, m)",
    "RandomNormalLike": "{ n = RandomNormalLike(x) s = Mul(n, w) d = Add(x, s)",
    "RandomUniform": "{ n = RandomUniform<shape = [4, 5]>() d = Mul(x, n)",
    "Bernoulli": "{ p = Sigmoid(x) n = Bernoulli(p) d = Mul(x, n)",
    "a function": "{ d = local.Twice(x, on)",
}
FUNCTION = """
<domain: "local", opset_import: ["": {opset}]> Twice (a, on)
=> (c) {{ r = Constant<value_float = 0.5>() b = Dropout(a, r, on) c = Dropout(b, r, on) }}"""


@pytest.mark.parametrize("opset", [13, 22])
@pytest.mark.parametrize("what", BODIES)
def test_what_is_drawn_is_drawn_once(what, opset):
    opset = max(opset, 15) if what == "Bernoulli" else opset  # which it came with
    text = HEAD.format(opset=opset) + "<float w = {0.3}> " + BODIES[what]
    model = parser.parse_model(text + " t = Tanh(d) z = Mul(t, w) q = Mul(z, z) y = ReduceSum<keepdims = 0>(q) }"
                               + (FUNCTION.format(opset=opset) if what == "a function" else ""))  # fmt: skip
    feeds = {"x": np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32), "on": np.array(True)}
    assert check_gradient(model, feeds, wrt=["w", "x"]).worst < 1e-6
    assert check_gradient(model, {**feeds, "on": np.array(False)}, wrt="x").worst < 1e-6


def test_the_command_line(tmp_path):
    onnx.save(active("initializer"), tmp_path / "model.onnx")
    result = CliRunner().invoke(cli.main, ["check", str(tmp_path / "model.onnx")])
    assert result.exit_code == 0, result.output


def test_feeds_that_do_not_fit(tmp_path):
    x = np.ones((3, 6), np.float32)
    for wrong, sentence in {
        "object": "feeds has 'x' as object, expected floating-point numbers",
        "int64": "feeds has 'x' as int64, expected floating-point numbers",
    }.items():
        with raises(TypeError, f"check_gradient: {sentence}"):
            check_gradient(mlp(), {"x": x.astype(wrong)})
    for wrong in (x[:, :3], x[0]):
        shape = list(wrong.shape)
        with raises(ValueError, f"check_gradient: feeds has 'x' of shape {shape}, expected ['N', 6]"):
            check_gradient(mlp(), {"x": wrong})
    onnx.save(mlp(), tmp_path / "model.onnx")
    np.savez(tmp_path / "feeds.npz", x=x.astype(object))
    result = CliRunner().invoke(
        cli.main, ["check", str(tmp_path / "model.onnx"), "--feeds", str(tmp_path / "feeds.npz")]
    )
    assert result.stderr.endswith("cannot be read as .npz ('x' holds Python objects, expected numbers)\n")


def test_random_inputs_larger_than_memory(tmp_path):
    large = mlp()
    large.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2**40
    onnx.save(large, tmp_path / "model.onnx")
    result = CliRunner().invoke(cli.main, ["check", str(tmp_path / "model.onnx")])
    assert result.exit_code == 2
    assert result.stderr.endswith(f"the input 'x' has shape [{2**40}, 6], more numbers than there is memory for\n")


def test_results_that_are_float32_whatever_the_model_is():
    model = parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 18, "ai.onnx.ml" : 3]> g (int64[N, 1] x) => (float[N, 2] y) {
            hot = ai.onnx.ml.OneHotEncoder <cats_int64s = [0, 1, 2]> (x)
            flat = Flatten(hot)
            y = MatMul(flat, w)
        }"""
    )
    weight = np.random.default_rng(0).standard_normal((3, 2)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    assert check_gradient(model, {"x": np.array([[0], [2]])}, wrt="w").worst < 1e-6
