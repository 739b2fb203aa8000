"""What a model computes about shapes is constant where these are known, and decides which branch of an If is left."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx import parser

import onnxgrad
from onnxgrad.passes.prepare import prepare

BRANCHES = """<ir_version: 10, opset_import: ["" : 21]>
g (float[%s] x, float[4] w) => (float[4] y, float z) {
    four = Constant <value_int = 4> ()
    size = Size(x)
    small = Equal(size, four)
    y, both = If (small) <
        then_branch = a () => (float[4] same, float[4] more) { same = Identity(x) more = Identity(w) },
        else_branch = b () => (float[4] part, float[4] more) {
            start = Constant <value_ints = [0]> ()
            end = Constant <value_ints = [4]> ()
            part = Slice(x, start, end)
            inner = Mul(part, part)
            more = Mul(inner, w)
        }
    >
    z = ReduceSum <keepdims = 0> (both)
}"""


@pytest.mark.parametrize("length", [4, 6])
def test_a_branch_that_a_size_decides(length):
    model = parser.parse_model(BRANCHES % length)
    graph = prepare(ir.from_proto(model), "test").graph
    operators = {node.op_type for node in graph}
    assert "If" not in operators and ("Slice" in operators) == (length == 6)
    assert [v.name for v in graph.outputs] == ["y", "z"]
    x, w = (np.random.default_rng(0).standard_normal((2, length))).astype(np.float32)
    feeds = {"x": x, "w": w[:4]}
    assert onnxgrad.check_gradient(model, feeds, ["x", "w"], ["y", "z"]).worst < 2e-6


def test_a_branch_that_is_decided_later_stays():
    graph = prepare(ir.from_proto(parser.parse_model(BRANCHES % "N")), "test").graph
    assert "If" in {node.op_type for node in graph}


def test_squeezed_without_axes():
    """Dimensions that are not known stay, so that a product after it knows the number of them."""
    model = parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N, 1, 3] x, float[3, 2] w) => (float[N, 2] y) { a = Squeeze(x) y = MatMul(a, w) }""")
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal(s).astype(np.float32) for n, s in (("x", (4, 1, 3)), ("w", (3, 2)))}
    assert onnxgrad.check_gradient(model, feeds, ["x", "w"]).worst < 2e-6


def test_a_computation_that_fails_is_left_to_the_runtime():
    """As an exporter wrote it for a branch that is never taken."""
    model = parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        g (float[2] x, bool c) => (float[2] y) <int64[1] four = {4}, int64 second = {1}> {
            past = Gather(four, second)
            y = If (c) <
                then_branch = a () => (float[2] same) { same = Identity(x) },
                else_branch = b () => (float[2] less) { n = Cast <to = 1> (past) less = Mul(x, n) }
            >
        }""")
    assert "Gather" in {node.op_type for node in prepare(ir.from_proto(model), "test").graph}
