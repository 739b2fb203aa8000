"""Transposes behind cuts: the same results, and none left before what takes a tensor apart."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import onnxgrad
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.finish import drop_dead
from onnxgrad.passes.sink_transposes import sink_transposes

RNG = np.random.default_rng(0)


def constant(name, values):
    return numpy_helper.from_array(np.array(values, np.int64), name)


def model_of(nodes, outputs, constants, shape):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, shape)],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        initializer=constants,
    )
    imports = [helper.make_opsetid("", 18)]
    return onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=imports, ir_version=9))


def moved(model, shape=(2, 5, 3, 4)):
    """The nodes after the moves; the model still computes the same, of known and of unknown shapes."""
    made = ir.from_proto(model)
    sink_transposes(Draft(made, "test"))
    drop_dead(Draft(made, "test"))
    proto = ir.to_proto(made)
    onnx.checker.check_model(proto, full_check=True)
    feeds = {"X": RNG.standard_normal(shape).astype(np.float32)}
    assert [o.name for o in proto.graph.output] == [o.name for o in model.graph.output]
    expected, found = (ReferenceEvaluator(m).run(None, feeds) for m in (model, proto))
    for before, after in zip(expected, found, strict=True):
        np.testing.assert_array_equal(before, after)
    return [n.op_type for n in proto.graph.node if n.op_type != "Constant"]


@pytest.mark.parametrize("shape", [[2, 5, 3, 4], ["N", None, 3, 4]], ids=["known", "unknown"])
def test_queries_keys_and_values(shape):
    nodes = [
        helper.make_node("Transpose", ["X"], ["T"], perm=[2, 0, 3, 1]),
        helper.make_node("Split", ["T"], ["a", "b", "c"], axis=0, num_outputs=3),
        *(helper.make_node("Squeeze", [part, "axes"], [f"{part}_out"]) for part in "abc"),
    ]
    kinds = moved(model_of(nodes, ["a_out", "b_out", "c_out"], [constant("axes", [0])], shape))
    assert kinds[0] == "Split" and sorted(kinds[1:]) == ["Squeeze"] * 3 + ["Transpose"] * 3


def test_single_indices():
    nodes = [
        helper.make_node("Transpose", ["X"], ["T"], perm=[2, 0, 3, 1]),
        helper.make_node("Gather", ["T", "one"], ["A"], axis=0),
        helper.make_node("Gather", ["T", "two"], ["B"], axis=-4),
    ]
    constants = [constant("one", 1), constant("two", -1)]
    assert sorted(moved(model_of(nodes, ["A", "B"], constants, [2, 5, 3, 4]))) == ["Gather"] * 2 + ["Transpose"] * 2


def test_the_axes_of_a_default_permutation_and_of_several_squeezed():
    nodes = [helper.make_node("Transpose", ["X"], ["T"]), helper.make_node("Squeeze", ["T", "axes"], ["Y"])]
    assert moved(model_of(nodes, ["Y"], [constant("axes", [-1, 1])], [1, 5, 1, 4]), (1, 5, 1, 4)) == [
        "Squeeze",
        "Transpose",
    ]


@pytest.mark.parametrize(
    "other",
    [helper.make_node("Relu", ["T"], ["Z"]), helper.make_node("Gather", ["T", "list"], ["Z"], axis=0)],
    ids=["another user", "several indices"],
)
def test_a_transpose_that_is_needed_as_it_is_stays(other):
    nodes = [
        helper.make_node("Transpose", ["X"], ["T"], perm=[2, 0, 3, 1]),
        helper.make_node("Gather", ["T", "one"], ["Y"], axis=0),
        other,
    ]
    constants = [constant("one", 1), constant("list", [0, 2])]
    assert moved(model_of(nodes, ["Y", "Z"], constants, [2, 5, 3, 4]))[0] == "Transpose"


def test_a_transposed_result_stays():
    nodes = [
        helper.make_node("Transpose", ["X"], ["T"], perm=[2, 0, 3, 1]),
        helper.make_node("Gather", ["T", "one"], ["Y"], axis=0),
    ]
    assert moved(model_of(nodes, ["Y", "T"], [constant("one", 1)], [2, 5, 3, 4])) == ["Transpose", "Gather"]


def test_gradients_stay_what_they_are():
    nodes = [
        helper.make_node("Transpose", ["X"], ["T"], perm=[2, 0, 3, 1]),
        helper.make_node("Split", ["T"], ["a", "b", "c"], axis=0, num_outputs=3),
        helper.make_node("Mul", ["a", "b"], ["ab"]),
        helper.make_node("Sub", ["ab", "c"], ["d"]),
        helper.make_node("ReduceSumSquare", ["d"], ["Y"], keepdims=0),
    ]
    model = model_of(nodes, ["Y"], [], [2, 5, 3, 4])
    made = ir.from_proto(model)
    assert sink_transposes(Draft(made, "test")) == 1
    drop_dead(Draft(made, "test"))
    feeds = {"X": RNG.standard_normal((2, 5, 3, 4)).astype(np.float32)}
    found = [
        ReferenceEvaluator(onnxgrad.gradient(m, "X"), new_ops=onnxgrad.reference_ops()).run(["X_grad"], feeds)[0]
        for m in (model, ir.to_proto(made))
    ]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)


def test_what_a_loop_takes_apart_stays():
    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 18]> g (float[2, 5, 3, 4] X, int64 n) => (float[2, 3, 4] y)
            <float[2, 3, 4] zero = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}> {
            t = Transpose <perm = [1, 0, 2, 3]> (X)
            y = Loop (n, , zero) <body = b (int64 i, bool c, float[2, 3, 4] h) => (bool d, float[2, 3, 4] s) {
                d = Identity(c)
                part = Gather(t, i)
                s = Add(h, part)
            }>
        }"""
    )
    made = ir.from_proto(onnx.shape_inference.infer_shapes(model))
    assert sink_transposes(Draft(made, "test")) == 0
