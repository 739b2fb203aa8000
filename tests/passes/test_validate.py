"""Models that are wrong: one sentence each, from gradient, Trainer and the command line."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from onnx import helper, numpy_helper, parser
from tests.checks import raises

from onnxgrad import Trainer, check_gradient, cli, gradient, losses, optim

HEAD = '<ir_version: 9, opset_import: ["": {}]> g (float[N, 4] x) => (float[N, 4] y) <float[4] w = {{1, 2, 3, 4}}> '
TRILLION = 2**40


def model(body, opset=18):
    return parser.parse_model(HEAD.format(opset) + body)


def twice(field):
    found = model("{ y = Mul(x, w) }")
    named = getattr(found.graph, field)
    named.append(named[0])
    return found


def functions(count, body):
    """`count` functions, each written by `body` in terms of the one before."""
    found = model("{ a = Mul(x, w) y = Identity(a) }")
    found.opset_import.append(helper.make_opsetid("local", 1))
    for k in range(count):
        nodes = body(k) if k else [helper.make_node("Neg", ["a"], ["b"])]
        found.functions.append(helper.make_function("local", f"F{k}", ["a"], ["b"], nodes, found.opset_import))
    found.graph.node[1].CopyFrom(helper.make_node(f"F{count - 1}", ["a"], ["y"], domain="local"))
    return found


def doubling(k):
    names = ["a", "c", "b"]
    return [helper.make_node(f"F{k - 1}", [names[i]], [names[i + 1]], domain="local") for i in range(2)]


def recursive(k):
    return [helper.make_node(f"F{k}", ["a"], ["b"], domain="local")]


def summing(vector):
    """A model that multiplies by the sum of a vector `c`."""
    return model(f"{{ {vector} k = Cast<to = 1>(c) r = ReduceSum<keepdims = 0>(k) a = Mul(x, w) y = Mul(a, r) }}")


FILLED = f"s = Constant<value_ints = [{TRILLION}]>() c = ConstantOfShape<value = int64[1] {{1}}>(s)"
COUNTED = "z = Constant<value_int = 0>() o = Constant<value_int = 1>() "
COUNTED += f"l = Constant<value_int = {TRILLION}>() c = Range(z, l, o)"
NEWEST = onnx.defs.onnx_opset_version()
WRONG = {
    "a cycle": (model("{ a = Add(x, b) b = Add(a, w) y = Identity(b) }"), "is not valid: its graph has a cycle"),
    "a value twice": (
        model("{ y = Mul(x, w) y = Add(x, w) }"), "is not valid: the name 'y' is given more than once"),
    "an initializer twice": (twice("initializer"), "is not valid: the name 'w' is given more than once"),
    "an input twice": (twice("input"), "is not valid: the name 'x' is given more than once"),
    "opset 9999": (
        model("{ y = Mul(x, w) }", 9999),
        f"imports opset 9999, expected 1 to {NEWEST}, the newest that the installed onnx knows"),
    "opset 0": (
        model("{ y = Mul(x, w) }", 0),
        f"imports opset 0, expected 1 to {NEWEST}, the newest that the installed onnx knows"),
    "no attribute": (
        model("{ a = Mul(x, w) [cat] y = Concat(a) }"),
        "is not valid: Required attribute 'axis' is missing. (Concat, node 'cat')"),
    "an unknown attribute": (
        model("{ y = Mul<size = 1>(x, w) }"), "is not valid: it has no attribute 'size' (Mul)"),
    "an unknown operator": (
        model("{ a = Mul(x, w) y = Frobnicate(a) }"), "is not valid: opset 18 has no such operator (Frobnicate)"),
    "an unknown operator of an older opset": (
        model("{ a = Mul(x, w) y = Frobnicate(a) }", 9), "is not valid: opset 9 has no such operator (Frobnicate)"),
    "a newer operator": (
        model("{ a = Mul(x, w) y = Gelu(a) }"), "is not valid: opset 18 has no such operator (Gelu)"),
    "an input of a node that is not there": (
        model("{ y = Mul(x, v) }"), "is not valid: there is no 'v', which is an input (Mul)"),
    "functions that double 40 times": (
        functions(40, doubling), "has 5.5e+11 nodes once its functions are expanded, expected at most 1,000,000"),
    "a function that calls itself": (
        functions(2, recursive), "is not valid: the function 'F1' calls itself"),
    "a constant of a trillion": (
        summing(FILLED),
        "ConstantOfShape has a result of 1.1e+12 numbers, expected at most 67,108,864"),
    "a range of a trillion": (
        summing(COUNTED), "Range has a result of 1.1e+12 numbers, expected at most 67,108,864"),
    "a declared size that overflows": (
        model(f"{{ a = Mul(x, w) i = Constant<value_ints = [{TRILLION}, {TRILLION}]>() e = Expand(w, j) y = Add(a, e) "
              f"j = Constant<value_ints = [{TRILLION}, {TRILLION}, 4]>() }}"),
        f"'e' would have shape [{TRILLION}, {TRILLION}, 4], too large for any memory"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("train.npz", x=np.ones((3, 4), np.float32), target=np.ones((3, 4), np.float32))


@pytest.mark.parametrize("case", WRONG)
def test_one_sentence_each(case, folder):
    wrong, sentence = WRONG[case]
    onnx.save(wrong, "model.onnx")
    for call in (gradient, lambda m: Trainer(m, losses.MSE("y"), optim.SGD()),
                 lambda m: check_gradient(m, {"x": np.ones((3, 4))})):  # fmt: skip
        for source in (wrong, "model.onnx"):
            with pytest.raises(ValueError) as error:
                call(source)
            assert str(error.value).endswith(sentence) and "\n" not in str(error.value)
    for words in (["grad", "model.onnx", "-o", "out.onnx"], ["check", "model.onnx"],
                  ["train", "model.onnx", "--data", "train.npz", "--loss", "mse:y", "-o", "out.onnx"]):  # fmt: skip
        result = CliRunner().invoke(cli.main, words)
        assert result.exit_code == 2 and result.stderr.endswith(f"{sentence}\n")


def test_an_empty_file(folder):
    Path("model.onnx").touch()
    with raises(ValueError, "gradient: the file 'model.onnx' is empty, expected an ONNX model"):
        gradient("model.onnx")


def test_what_onnxruntime_takes_is_taken(folder):
    """Nodes in any order, a graph without a name, weights that an old file does not declare, outputs without shapes."""
    odd = model("{ a = Mul(x, w) y = Neg(a) }")
    nodes = list(odd.graph.node)
    del odd.graph.node[:]
    odd.graph.node.extend(nodes[::-1])
    odd.graph.name, odd.ir_version = "", 3
    odd.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(odd, "model.onnx")
    for source in (odd, "model.onnx", ir.from_proto(odd)):
        assert [o.name for o in ir.to_proto(as_ir(gradient(source))).graph.output] == ["y", "w_grad"]
        trainer = Trainer(source, losses.MSE("y"), optim.SGD(lr=0.1))
        trainer.step(dict(np.load("train.npz")))
        trainer.export("trained.onnx")
        (weight,) = onnx.load("trained.onnx").graph.initializer
        assert not np.array_equal(numpy_helper.to_array(weight), [1, 2, 3, 4])


def as_ir(found):
    return found if isinstance(found, ir.Model) else ir.from_proto(found)


def test_weights_that_are_declared_as_inputs_too():
    """As models before IR version 4 have them; those of this one are more than are read."""
    old = model("{ a = Mul(x, w) y = MatMul(a, v) }")
    old.graph.initializer.append(numpy_helper.from_array(np.eye(4, 4, dtype=np.float32), "v"))
    wide = numpy_helper.from_array(np.ones((4, 2000), np.float32), "u")
    old.graph.initializer.append(wide)
    old.graph.node.append(helper.make_node("MatMul", ["y", "u"], ["z"]))
    old.graph.output[0].CopyFrom(helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, ["N", 2000]))
    old.ir_version = 3
    for tensor in old.graph.initializer:
        old.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    assert [o.name for o in gradient(old).graph.output] == ["z", "v_grad", "u_grad"]


def test_what_onnxruntime_optimized_for_one_processor():
    found = model("{ y = Mul(x, w) }")
    found.graph.node[0].domain, found.graph.node[0].name = "com.microsoft.nchwc", "n"
    found.opset_import.append(helper.make_opsetid("com.microsoft.nchwc", 1))
    text = (
        "Trainer: Mul (node 'n') is of com.microsoft.nchwc, which onnxruntime writes for the processor at hand alone "
        "and which has no gradient, expected the file from before, or one optimized by "
        "GraphOptimizationLevel.ORT_ENABLE_EXTENDED"
    )
    with raises(ValueError, text):
        Trainer(found, losses.MSE("y"), optim.SGD(lr=0.1))


def test_integer_arithmetic_has_nothing_to_train():
    found = parser.parse_model(
        '<ir_version: 9, opset_import: ["": 18]> g (float[N, 2] x) => (float[N, 2] y) '
        "<float s = {0.1}, uint8 z = {128}, uint8[2, 2] k = {1, 2, 3, 4}> {"
        "q = QuantizeLinear(x, s, z)  p = QLinearMatMul(q, s, z, k, s, z, s, z)  y = DequantizeLinear(p, s, z) }"
    )
    text = (
        "Trainer: 'loss' depends on no parameter: the model computes in integers ('QLinearMatMul'), which have no "
        "gradient, expected the model from before it was quantized, or one quantized with quant_format=QuantFormat.QDQ"
    )
    with raises(ValueError, text):
        Trainer(found, losses.MSE("y"), optim.SGD(lr=0.1))
