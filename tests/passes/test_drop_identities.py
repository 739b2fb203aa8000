"""Nodes that change nothing are left out, but for those that give an output of the graph."""

import onnx
import onnx_ir as ir
import pytest

from onnxgrad.passes.draft import Draft
from onnxgrad.passes.drop_identities import drop_identities


def left(text):
    """What is left of a model's nodes."""
    proto = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]>\n g {text}')
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto, data_prop=True))
    drop_identities(Draft(model, "test"))
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return [(n.op_type, *n.input, *n.output) for n in proto.graph.node if n.op_type != "Constant"]


def test_identities():
    text = """(float[3] X) => (float[3] Y, float[3] Z)
    { A = Identity(X) B = Identity(A) C = Relu(B) Y = Identity(C) Z = Neg(B) }"""
    assert left(text) == [("Relu", "X", "C"), ("Identity", "C", "Y"), ("Neg", "X", "Z")]


@pytest.mark.parametrize(
    ("node", "stays"),
    [
        ("Cast<to = 1>(X)", False),
        ("Transpose<perm = [0, 1]>(X)", False),
        ("Transpose<perm = [1, 0]>(X)", True),
        ("Reshape(X, same)", False),
        ("Reshape(X, other)", True),
        ("Slice(X, zero, large, zero)", False),
        ("Slice(X, zero, large, zero, one)", False),
        ("Slice(X, one, large, zero)", True),
        ("Slice(X, zero, one, zero)", True),
        ("Slice(X, zero, large, zero, two)", True),
    ],
)
def test_nodes_that_change_nothing(node, stays):
    numbers = {"zero": 0, "one": 1, "two": 2, "large": 2**63 - 1, "same": "4, 6", "other": "6, 4"}
    constants = " ".join(f"{name} = Constant<value_ints = [{n}]>()" for name, n in numbers.items())
    kinds = [kind for kind, *_ in left(f"(float[4, 6] X) => (float[a, b] Y) {{ {constants} A = {node} Y = Relu(A) }}")]
    assert kinds == ([node.partition("<")[0].partition("(")[0]] if stays else []) + ["Relu"]
