"""gradient()'s own behaviour: what is differentiated, what comes out under which names, and what is refused."""

import subprocess
import sys

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper, parser
from tests.gradients import evaluate, names, results_of

import onnxgrad
from onnxgrad.rules import op
from onnxgrad.rules.engine import NoRuleError

HEADER = '<ir_version: 9, opset_import: ["" : 18]>\n'
RNG = np.random.default_rng(0)


def model(text: str, header: str = HEADER, **weights: np.ndarray) -> onnx.ModelProto:
    """A model written out, with these initializers besides those of the text."""
    made = parser.parse_model(header + text)
    made.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    onnx.checker.check_model(made)
    return made


def linear() -> onnx.ModelProto:
    text = """g (float[2,3] x, int64[1] k) => (float loss) {
        h = MatMul(x, layer_w)
        s = Add(h, layer_b)
        t = Tanh(s)
        unused = Exp(t)
        loss = ReduceSum <keepdims = 0> (t)
    }"""
    rng = np.random.default_rng(1)
    w, b = rng.standard_normal((3, 4)), rng.standard_normal(4)
    return model(text, layer_w=w.astype(np.float32), layer_b=b.astype(np.float32))


# What is asked for


def test_by_default_every_parameter_of_the_only_output():
    made = onnxgrad.gradient(linear())
    assert names(made.graph.output) == ["loss", "layer_w_grad", "layer_b_grad"]
    assert names(made.graph.input) == ["x", "k"]
    assert names(made.graph.initializer) == ["layer_w", "layer_b"]
    x = RNG.standard_normal((2, 3)).astype(np.float32)
    weights = {t.name: numpy_helper.to_array(t) for t in linear().graph.initializer}
    results = results_of(made, x=x, k=np.zeros(1, np.int64))
    d = 1 - np.tanh(x @ weights["layer_w"] + weights["layer_b"]) ** 2
    np.testing.assert_allclose(results["layer_w_grad"], x.T @ d, rtol=1e-5)
    np.testing.assert_allclose(results["layer_b_grad"], d.sum(0), rtol=1e-5)


@pytest.mark.parametrize(
    "wrt, expected",
    [
        ("x", ["x_grad"]),
        (["layer_b", "x"], ["layer_b_grad", "x_grad"]),
        ("layer_*", ["layer_w_grad", "layer_b_grad"]),
        ("*", ["layer_w_grad", "layer_b_grad", "x_grad"]),
        (["x", "*_b", "x"], ["x_grad", "layer_b_grad"]),
    ],
)
def test_names_and_patterns(wrt, expected):
    assert names(onnxgrad.gradient(linear(), wrt).graph.output) == ["loss", *expected]


def test_statistics_are_no_parameters():
    text = """g (float[2,3] x) => (float[2,3] y) {
        y = BatchNormalization(x, scale, bias, mean, var)
    }"""
    four = {n: np.ones(3, np.float32) for n in ("scale", "bias", "mean", "var")}
    made = onnxgrad.gradient(model(text, **four))
    assert names(made.graph.output) == ["y", "scale_grad", "bias_grad"]


def test_several_results_each_with_its_seed():
    text = """g (float[2] x, float[3] y) => (float[2] a, float s, int64[2] i, float[2,3] b) {
        a = Exp(x)
        s = ReduceSum <keepdims = 0> (y)
        i = Cast <to = 7> (x)
        two = Constant <value_ints = [2, 1]> ()
        column = Reshape(a, two)
        b = Mul(column, y)
    }"""
    made = onnxgrad.gradient(model(text), ["x", "y"], ["a", "s", "b"])
    assert names(made.graph.input) == ["x", "y", "a_grad", "b_grad"]
    assert names(made.graph.output) == ["a", "s", "i", "b", "x_grad", "y_grad"]
    x, y, ga, gb = (RNG.standard_normal(s).astype(np.float32) for s in (2, 3, 2, (2, 3)))
    results = results_of(made, x=x, y=y, a_grad=ga, b_grad=gb)
    np.testing.assert_allclose(results["x_grad"], (ga + gb @ y) * np.exp(x), rtol=1e-5)
    np.testing.assert_allclose(results["y_grad"], 1 + np.exp(x) @ gb, rtol=1e-5)


def test_a_result_that_another_depends_on():
    text = """g (float[2] x) => (float[2] h, float s) {
        h = Exp(x)
        s = ReduceSum <keepdims = 0> (h)
    }"""
    x, seed = RNG.standard_normal((2, 2)).astype(np.float32)
    results = results_of(onnxgrad.gradient(model(text), "x", ["h", "s"]), x=x, h_grad=seed)
    np.testing.assert_allclose(results["x_grad"], (seed + 1) * np.exp(x), rtol=1e-5)


def test_the_only_output_of_floating_point_is_the_default():
    text = """g (float[2] x) => (int64[2] i, float[2] y) {
        i = Cast <to = 7> (x)
        y = Exp(x)
    }"""
    assert names(onnxgrad.gradient(model(text), "x").graph.input) == ["x", "y_grad"]


def test_a_scalar_has_no_seed_but_one_element_has():
    text = "g (float[2] x) => (float[1] y) { y = ReduceSum (x) }"
    assert names(onnxgrad.gradient(model(text), "x").graph.input) == ["x", "y_grad"]
    text = "g (float[2] x) => (float y) { y = ReduceSum <keepdims = 0> (x) }"
    made = onnxgrad.gradient(model(text), "x")
    assert names(made.graph.input) == ["x"]
    np.testing.assert_array_equal(results_of(made, x=np.zeros(2, np.float32))["x_grad"], [1, 1])


def test_parameters_as_inputs():
    made = onnxgrad.gradient(linear(), "layer_b", parameters_as_inputs=True)
    assert names(made.graph.input) == ["x", "k", "layer_b"]
    assert names(made.graph.initializer) == ["layer_w"]
    info = made.graph.input[2].type.tensor_type
    assert (info.elem_type, [d.dim_value for d in info.shape.dim]) == (TensorProto.FLOAT, [4])
    plain = onnxgrad.gradient(linear(), "layer_b")
    feeds = {"x": np.ones((2, 3), np.float32), "k": np.zeros(1, np.int64)}
    b = numpy_helper.to_array(linear().graph.initializer[1])
    given = results_of(made, **feeds, layer_b=b)
    np.testing.assert_array_equal(given["layer_b_grad"], results_of(plain, **feeds)["layer_b_grad"])


def test_names_that_are_taken():
    text = """g (float[2] x, float[2] y_grad) => (float[2] y, float[2] x_grad) {
        y = Mul(x, y_grad)
        x_grad = Neg(x)
    }"""
    made = onnxgrad.gradient(model(text), ["x", "y_grad"], "y")
    assert names(made.graph.input) == ["x", "y_grad", "y_grad_2"]
    assert names(made.graph.output) == ["y", "x_grad", "x_grad_2", "y_grad_grad"]


# The graph that comes out


def test_nothing_is_computed_for_what_is_frozen():
    made = onnxgrad.gradient(linear(), "layer_b")
    assert sorted(n.op_type for n in made.graph.node).count("MatMul") == 1
    assert "Exp" not in names(made.graph.node) and all(n.op_type != "Exp" for n in made.graph.node)
    used = {i for n in made.graph.node for i in n.input} | set(names(made.graph.output))
    assert all(any(o in used for o in n.output) for n in made.graph.node)
    assert all(t.name in used for t in made.graph.initializer)


def test_what_is_computed_twice_is_computed_once():
    text = """g (float[2] x) => (float[2] y) {
        a = Exp(x)
        b = Sin(x)
        y = Mul(a, b)
    }"""
    made = onnxgrad.gradient(model(text), "x")
    kinds = [n.op_type for n in made.graph.node]
    assert len(set(kinds)) < len(kinds) and kinds.count("Exp") == 1 and kinds.count("Cos") == 1
    described = [(n.op_type, tuple(n.input), tuple(map(str, n.attribute))) for n in made.graph.node]
    assert len(set(described)) == len(described)


def test_an_input_used_more_than_once():
    text = """g (float[2] x) => (float[2] y) {
        a = Mul(x, x)
        b = Mul(a, x)
        y = Add(b, x)
    }"""
    x, seed = RNG.standard_normal((2, 2)).astype(np.float32)
    results = results_of(onnxgrad.gradient(model(text), "x"), x=x, y_grad=seed)
    np.testing.assert_allclose(results["x_grad"], seed * (3 * x * x + 1), rtol=1e-5)


def test_an_output_that_is_an_input():
    text = """g (float[2] x, float[2] z) => (float[2] x, float[2] y) {
        y = Mul(x, z)
    }"""
    made = onnxgrad.gradient(parser.parse_model(HEADER + text), "x", ["x", "y"])
    assert names(made.graph.output) == ["x", "y", "x_grad_2"]
    x, z, gx, gy = RNG.standard_normal((4, 2)).astype(np.float32)
    feeds = {"x": x, "z": z, "x_grad": gx, "y_grad": gy}
    results = dict(zip(names(made.graph.output), evaluate(made, feeds), strict=True))
    np.testing.assert_allclose(results["x_grad_2"], gx + gy * z, rtol=1e-5)


def test_gradients_that_are_the_same_value_are_outputs_of_their_own():
    text = "g (float[2] x, float[2] z) => (float[2] y) { y = Add(x, z) }"
    made = onnxgrad.gradient(model(text), ["x", "z"])
    seed = np.ones(2, np.float32)
    results = results_of(made, x=seed, z=seed, y_grad=seed)
    assert names(made.graph.output) == ["y", "x_grad", "z_grad"]
    np.testing.assert_array_equal(results["x_grad"], results["z_grad"])


def test_nameless_dimensions_stay_nameless():
    text = "g (float[?,N] x, float[N] z) => (float[?,N] y) { y = Add(x, z) }"
    made = onnxgrad.gradient(model(text), ["x", "z"])
    dims = made.graph.input[0].type.tensor_type.shape.dim
    assert [d.dim_param for d in dims] == ["", "N"] and names(made.graph.input) == ["x", "z", "y_grad"]
    seed = np.ones((5, 3), np.float32)
    assert results_of(made, x=seed, z=seed[0], y_grad=seed)["z_grad"].tolist() == [5, 5, 5]


def test_the_model_is_not_changed():
    proto = linear()
    before = proto.SerializeToString(deterministic=True)
    onnxgrad.gradient(proto, "*", parameters_as_inputs=True)
    assert proto.SerializeToString(deterministic=True) == before
    graph = ir.from_proto(linear())
    before = ir.to_proto(graph).SerializeToString(deterministic=True)
    onnxgrad.gradient(graph, "*", parameters_as_inputs=True)
    assert ir.to_proto(graph).SerializeToString(deterministic=True) == before


def test_in_kind(tmp_path):
    onnx.save(linear(), tmp_path / "m.onnx")
    from_path = onnxgrad.gradient(tmp_path / "m.onnx")
    from_text = onnxgrad.gradient(str(tmp_path / "m.onnx"))
    from_proto = onnxgrad.gradient(linear())
    from_graph = onnxgrad.gradient(ir.from_proto(linear()))
    assert isinstance(from_path, onnx.ModelProto) and isinstance(from_graph, ir.Model)
    written = {m.SerializeToString(deterministic=True) for m in (from_path, from_text, from_proto)}
    assert len(written) == 1
    assert names(ir.to_proto(from_graph).graph.node) == names(from_proto.graph.node)


def test_a_gradient_of_a_gradient():
    text = """g (float[3] x) => (float y) {
        a = Exp(x)
        b = Mul(a, x)
        s = ReduceSum <keepdims = 0> (b)
        y = Mul(s, s)
    }"""
    once = onnxgrad.gradient(model(text), "x")
    twice = onnxgrad.gradient(once, "x", "x_grad")
    assert names(twice.graph.input) == ["x", "x_grad_grad"]
    assert names(twice.graph.output) == ["y", "x_grad", "x_grad_2"]
    x, v = RNG.standard_normal((2, 3))
    e = np.exp(x)
    d, s = e * (x + 1), np.sum(e * x)
    hessian = 2 * np.outer(d, d) + 2 * s * np.diag(e * (x + 2))
    results = results_of(twice, x=x.astype(np.float32), x_grad_grad=v.astype(np.float32))
    np.testing.assert_allclose(results["x_grad_2"], hessian @ v, rtol=1e-4)


def test_mixed_precision():
    text = """g (float16[2,3] x) => (float y) {
        wide = Cast <to = 1> (x)
        h = Mul(wide, w)
        half = Cast <to = 10> (h)
        t = Tanh(half)
        back = Cast <to = 1> (t)
        y = ReduceSum <keepdims = 0> (back)
    }"""
    w = RNG.standard_normal(3).astype(np.float32)
    made = onnxgrad.gradient(model(text, w=w), ["x", "w"])
    kinds = {o.name: o.type.tensor_type.elem_type for o in made.graph.output}
    assert kinds["x_grad"] == TensorProto.FLOAT16 and kinds["w_grad"] == TensorProto.FLOAT
    x = RNG.standard_normal((2, 3)).astype(np.float16)
    results = results_of(made, x=x)
    d = 1 - np.tanh(x * w) ** 2
    np.testing.assert_allclose(results["x_grad"], d * w, rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(results["w_grad"], (d * x).sum(0), rtol=1e-2, atol=1e-3)


# Rules of users


def test_a_rule_for_an_operator_that_has_one_takes_its_place():
    """In a process of its own: it is the first that uses onnxgrad's rules."""
    code = """
import numpy as np, onnx.parser, onnxgrad
onnxgrad.vjp("Exp", input=lambda g, n: g + n.output)
text = '<ir_version: 9, opset_import: ["" : 18]> g (float[2] x) => (float[2] y) { y = Exp(x) }'
made = onnxgrad.gradient(onnx.parser.parse_model(text), "x")
print([node.op_type for node in made.graph.node])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['Exp', 'Add']\n"


CUSTOM = """g (float[2] x, float[2] z) => (float[2] y) {
    h = Exp(x)
    y = my.domain.Double <gain = 3.0> (h, z)
}"""
CUSTOM_HEADER = '<ir_version: 9, opset_import: ["" : 18, "my.domain" : 1]>\n'


def custom() -> onnx.ModelProto:
    return parser.parse_model(CUSTOM_HEADER + CUSTOM)


def test_a_rule_of_the_user(forget_rules):
    onnxgrad.vjp("Double", domain="my.domain", a=lambda g, n: g * n.b * n.gain, b=lambda g, n: op.Sin(g))
    made = onnxgrad.gradient(custom(), ["x", "z"])
    kinds = [n.op_type for n in made.graph.node]
    assert kinds == ["Exp", "Double", "Mul", "Constant", "Mul", "Sin", "Mul"]
    assert names(made.graph.output) == ["y", "x_grad", "z_grad"]


def test_a_rule_replaces_ours(forget_rules):
    onnxgrad.vjp("Exp", input=lambda g, n: op.Sin(g))
    made = onnxgrad.gradient(model("g (float[2] x) => (float[2] y) { y = Exp(x) }"), "x")
    assert [n.op_type for n in made.graph.node] == ["Exp", "Sin"]


def test_rules_are_checked():
    with pytest.raises(TypeError, match="vjp: Exp has the inputs input, the rule names x"):
        onnxgrad.vjp("Exp", x=lambda g, n: g)
    with pytest.raises(TypeError, match="vjp: the rule for input of Exp is a int, expected a function"):
        onnxgrad.vjp("Exp", input=3)


def test_no_rule_is_an_error_where_a_gradient_must_pass_only(forget_rules):
    with pytest.raises(NoRuleError) as error:
        onnxgrad.gradient(custom(), "x")
    assert str(error.value) == (
        "gradient: my.domain.Double (node 'Double_1') has no gradient rule: add one with onnxgrad.vjp, or leave out of "
        "`wrt` what reaches the result through it"
    )
    assert isinstance(error.value, NotImplementedError)
    text = """g (float[2] x, float[2] z) => (float[2] y) {
        h = my.domain.Double(x)
        y = Mul(h, z)
    }"""
    beside = parser.parse_model(CUSTOM_HEADER + text)
    helper_info = helper.make_tensor_value_info("h", TensorProto.FLOAT, [2])
    beside.graph.value_info.append(helper_info)
    assert names(onnxgrad.gradient(beside, "z").graph.output) == ["y", "z_grad"]


# What is refused

REFUSED = {
    "`of` is missing": (
        ["x", None],
        "gradient: name the output to differentiate with `of`; available: 'y', 'i', 'z'",
    ),
    "`of` is unknown": (
        ["x", "w"],
        "gradient: `of` names 'w', expected an output of the model; available: 'y', 'i', 'z'",
    ),
    "`of` is empty": (["x", []], "gradient: `of` is empty, expected some of 'y', 'i', 'z'"),
    "`of` is integer": (["x", "i"], "gradient: the output 'i' holds int64, which has no gradient"),
    "`wrt` is unknown": (
        ["q*", "y"],
        "gradient: `wrt` names 'q*', which is not an input or initializer of the model; available: 'w', 'x', 'k'",
    ),
    "`wrt` is integer": (["k", "y"], "gradient: 'k' holds int64, which has no gradient"),
    "`wrt` does not matter": (["w", "y"], "gradient: 'y' does not depend on 'w' in a way that has a gradient"),
    "no pattern matters": (["w*", "y"], "gradient: 'y' depends on nothing that `wrt` names"),
    "no parameter matters": (
        [None, "y"],
        "gradient: 'y' depends on no parameter; it depends on 'x': name some with `wrt`",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    text = """g (float[2] x, int64 k) => (float[2] y, int64[2] i, float[2] z) {
        y = Exp(x)
        i = Cast <to = 7> (x)
        z = Exp(w)
    }"""
    arguments, message = REFUSED[case]
    with pytest.raises(ValueError) as error:
        onnxgrad.gradient(model(text, w=np.zeros(2, np.float32)), *arguments)
    assert str(error.value) == message


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"model is a list, expected a path, an onnx.ModelProto or an onnx_ir.Model"):
        onnxgrad.gradient([])
    with pytest.raises(FileNotFoundError, match=r"nothing.onnx' does not exist, expected an ONNX model"):
        onnxgrad.gradient(tmp_path / "nothing.onnx")
    (tmp_path / "text.onnx").write_bytes(b"hello")
    with pytest.raises(ValueError, match=r"text.onnx' is not an ONNX model \(DecodeError\)"):
        onnxgrad.gradient(tmp_path / "text.onnx")
