"""Every block: the node that it adds, the names that it makes, and what the node computes."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from tests.checks import raises

import onnxgrad
from onnxgrad.ort_training import onnxblock
from onnxgrad.ort_training.onnxblock import _graph_utils, blocks

X = np.array([[0.5, 1.0, 2.0], [3.0, 0.25, 1.5]], np.float32)
Y = np.array([[2.0, 1.0, 4.0], [0.5, 3.0, 1.0]], np.float32)


def model_of(nodes=(), names=("x",), initializers=(), shape=X.shape):
    """Inputs, and the same as outputs or what the nodes compute."""
    inputs = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name in ("x", "y")]
    outputs = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name in names]
    graph = helper.make_graph(
        [helper.make_node("Identity", ["y"], ["same"]), *nodes], "g", inputs, outputs, initializers
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


class Forward(onnxblock.ForwardBlock):
    """The model of any block."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def build(self, *names):
        return self.block(*names)


def built(block, *names, base=None):
    forward = Forward(block)
    with onnxblock.base(base or model_of()):
        forward(*names)
    return forward.to_model_proto()


def last(model):
    node = model.graph.node[-1]
    return node, {a.name: helper.get_attribute_value(a) for a in node.attribute}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


COMPUTED = {
    "Add": (blocks.Add(), lambda x, y: x + y),
    "Sub": (blocks.Sub(), lambda x, y: x - y),
    "Mul": (blocks.Mul(), lambda x, y: x * y),
    "Div": (blocks.Div(), lambda x, y: x / y),
    "Pow": (blocks.Pow(3.0), lambda x: x**3),
    "ReduceMean": (blocks.ReduceMean(), lambda x: x.mean(keepdims=True)),
    "ReduceSum": (blocks.ReduceSum(keepdims=False), lambda x: x.sum()),
    "Sigmoid": (blocks.Sigmoid(), sigmoid),
    "Log": (blocks.Log(), np.log),
    "Neg": (blocks.Neg(), np.negative),
    "Abs": (blocks.Abs(), np.abs),
    "Clip": (blocks.Clip(0.7, 1.2), lambda x: x.clip(0.7, 1.2)),
    "Cast": (blocks.Cast(onnx.TensorProto.INT64), lambda x: x.astype(np.int64)),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_operators(name):
    block, expected = COMPUTED[name]
    binary = isinstance(block, blocks._BinaryOp)
    model = built(block, *("x", "y")[: 1 + binary])
    node, _ = last(model)
    assert node.op_type == name and node.name.startswith(f"onnx::{name}::")
    assert [output.name for output in model.graph.output] == list(node.output)
    token = "cast.output" if name == "Cast" else f"{name.lower()}_output"
    assert node.output[0].startswith(f"onnx::{token}::")
    (result,) = onnxgrad.session(model).run(None, {"x": X, "y": Y})
    assert np.allclose(result, expected(X, Y) if binary else expected(X))


def test_bounds_of_clip_may_be_absent():
    node, _ = last(built(blocks.Clip(clip_max=1.0), "x"))
    assert node.input[1] == "" and node.input[2].startswith("onnx::clip_max::")
    (initializer,) = built(blocks.Clip(clip_min=2), "x").graph.initializer
    assert initializer.name.startswith("onnx::clip_min::") and numpy_helper.to_array(initializer).tolist() == [2.0]


def test_initializers():
    (exponent,) = built(blocks.Pow(2.0), "x").graph.initializer
    assert exponent.name.startswith("onnx::pow_exponent::") and list(exponent.dims) == [1]

    class Doubled(onnxblock.Block):
        def __init__(self):  # of the many that do not call super().__init__()
            self.two, self.mul = blocks.Constant(2.0), blocks.Mul()

        def build(self, name):
            return self.mul(self.two(), name)

    model = built(Doubled(), "x")
    assert model.graph.initializer[0].name.startswith("onnx::initializer::")
    assert np.array_equal(onnxgrad.session(model).run(None, {"x": X, "y": Y})[0], 2 * X)


def test_sequences_and_norms():
    model = built(blocks.SequenceConstruct(), "x", "y")
    assert last(model)[0].output[0].startswith("onnx::sequenceconstruct_output::")
    assert model.graph.output[0].type.HasField("sequence_type")
    model = built(blocks.ReduceAllL2(), "x", "y")
    assert {o.domain: o.version for o in model.opset_import} == {"": 17, "com.microsoft": 1}
    node, _ = last(model)
    assert (node.op_type, node.domain, list(node.input)) == ("ReduceAllL2", "com.microsoft", ["x", "y"])
    assert [d.dim_value for d in model.graph.output[0].type.tensor_type.shape.dim] == [1]


def test_label_encoder():
    base = model_of()
    base.graph.input.append(helper.make_tensor_value_info("labels", onnx.TensorProto.INT64, [2]))
    encoder = blocks.LabelEncoder(default_int64=7, keys_int64s=[0, 1], values_int64s=[5, 6])
    model = built(encoder, "labels", base=base)
    node, attributes = last(model)
    assert node.domain == "ai.onnx.ml" and node.output[0].startswith("onnx::label_encoder.output::")
    assert attributes == {
        "default_float": 0.0,
        "default_int64": 7,
        "default_string": b"_Unused",
        "keys_int64s": [0, 1],
        "values_int64s": [5, 6],
    }
    (found,) = onnxgrad.session(model).run(None, {"x": X, "y": Y, "labels": np.array([1, 3])})
    assert found.tolist() == [6, 7]


@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_drawn_by_numpy(bias):
    np.random.seed(3)  # noqa: NPY002, what people have
    model = built(blocks.Linear(3, 2, bias=bias, alpha=0.5), "x")
    np.random.seed(3)  # noqa: NPY002
    drawn = [np.random.randn(*shape).astype(np.float32) for shape in ((3, 2), (2,))]  # noqa: NPY002
    node, attributes = last(model)
    assert node.op_type == "Gemm" and attributes == {"alpha": 0.5, "beta": 1.0}
    names = [tensor.name for tensor in model.graph.initializer]
    assert [name.split("::")[1] for name in names] == ["linear.weight", "linear.bias"][: 1 + bias]
    for tensor, array in zip(model.graph.initializer, drawn, strict=False):
        assert np.array_equal(numpy_helper.to_array(tensor), array)


def test_pass_through_and_inputs_like_others():
    with onnxblock.base(model_of()) as accessor:
        before = accessor.model.SerializeToString()
        assert blocks.PassThrough()("x", "y") == ("x", "y")
        assert accessor.model.SerializeToString() == before
        assert blocks.InputLike("x")("target") == "target"
        assert blocks.InputLike("same")().startswith("onnx::input::")  # inferred: neither input nor output
        shapes = [[d.dim_value for d in i.type.tensor_type.shape.dim] for i in accessor.model.graph.input]
        assert shapes == [list(X.shape)] * 4
        with raises(LookupError, "the graph has no value 'nothing' whose type is known"):
            blocks.InputLike("nothing")()


def test_names_are_new():
    """Also those of a model that another process has built, where the numbers began at 1."""
    with onnxblock.base(model_of()):
        number = int(blocks.Abs()("x").split("::")[2])
    taken = helper.make_node("Abs", ["x"], [f"onnx::neg_output::{number + 2}"])
    names = [node.output[0] for node in built(blocks.Neg(), "x", base=model_of([taken])).graph.node]
    assert len(set(names)) == len(names) == 3


def test_what_people_import():
    model = built(blocks.Neg(), "x")
    name = model.graph.output[0].name
    assert _graph_utils.get_output_from_output_name(model, name).name == name
    assert _graph_utils.get_input_from_input_name(model, "x").name == "x"
    assert _graph_utils.node_arg_exists(model, "same") and not _graph_utils.node_arg_exists(model, "other")
    assert _graph_utils.generate_graph_name("token").startswith("onnx::token::")
    with raises(LookupError, "the graph has no output 'x' whose type is known"):
        _graph_utils.get_output_from_output_name(model, "x")


def test_a_block_that_breaks_the_model_is_refused():
    class Broken(onnxblock.Block):
        def build(self, name):
            self.base.graph.node.append(helper.make_node("Neg", ["nothing"], ["negative"]))
            return "negative"

    with onnxblock.base(model_of()), pytest.raises(onnx.checker.ValidationError, match="nothing"):
        Broken()("x")


def test_large_weights_are_checked_by_their_shapes():
    weight = numpy_helper.from_array(np.zeros((3, 2000), np.float32), "weight")
    nodes = [helper.make_node("MatMul", ["x", "weight"], ["product"])]
    base = model_of(nodes, ["product"], [weight], (2, 2000))
    base.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 3]))
    model = built(blocks.ReduceSum(), "product", base=base)
    assert len(model.graph.initializer) == 1 and len(model.graph.input) == 2
    shapes = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.value_info
    }
    assert shapes["product"][1] == 2000
    with onnxblock.base(base), pytest.raises(onnx.shape_inference.InferenceError, match=r"(?i)incompatible"):
        blocks.Add()("product", "weight")


def test_a_forward_block_keeps_its_model_and_the_accessor_goes_on():
    forward = Forward(blocks.Neg())
    with raises(RuntimeError, "Forward has no model yet: call it first, within onnxblock.base(model)"):
        forward.to_model_proto()
    base = model_of()
    given = base.SerializeToString()
    with onnxblock.base(base) as accessor:
        name = forward("x")
        assert accessor.model == forward.to_model_proto()
        blocks.Abs()(name)
        assert len(accessor.model.graph.node) == len(forward.to_model_proto().graph.node) + 1
    assert base.SerializeToString() == given
