"""Transposes of rows that undo each other: which are left out, and that the model computes the same."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onnxgrad.graph.files import load
from onnxgrad.passes.cancel_transposes import cancel_transposes
from onnxgrad.passes.prepare import prepare

HEAD = '<ir_version: 10, opset_import: ["" : 21]> model (float[5, 3, 4] x) => (float[5, 3, 4] y)'
W = "float[4, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7, 6, 5, 4, 3, 2}"
B = "float[4] b = {1, -1, 2, -2}"

# Between the Transposes: nothing, linear layers, the same with rows in one dimension.
UNDONE = {
    "at once": f"<{B}> {{ u = Transpose<perm = [1, 0, 2]>(x) v = Transpose<perm = [1, 0, 2]>(u) y = Add(v, b) }}",
    "linear": f"""<{W}, {B}> {{
        u = Transpose<perm = [1, 0, 2]>(x) p = MatMul(u, w) v = Add(p, b) q = Transpose<perm = [1, 0, 2]>(v) y = Relu(q)
    }}""",
    "rows in one": f"""<{W}, {B}, int64[2] flat = {{-1, 4}}, int64[3] back = {{3, 5, 4}}> {{
        u = Transpose<perm = [1, 0, 2]>(x) r = Reshape(u, flat) p = Gemm(r, w, b) v = Reshape(p, back)
        q = Transpose<perm = [1, 0, 2]>(v) y = Relu(q)
    }}""",
    "two pairs": f"""<{W}> {{
        a = Transpose<perm = [1, 0, 2]>(x) c = Transpose<perm = [1, 0, 2]>(a) d = MatMul(c, w)
        e = Transpose<perm = [1, 0, 2]>(d) f = Transpose<perm = [1, 0, 2]>(e) y = Relu(f)
    }}""",
}
LEFT = {
    "not undone": f"""<{W}> {{
        u = Transpose<perm = [1, 0, 2]>(x) p = MatMul(u, w) s = Relu(p) q = Transpose<perm = [1, 0, 2]>(s) y = Relu(q)
    }}""",
    "rows that are joined": """<int64[2] joined = {3, 20}, int64[3] back = {3, 5, 4}> {
        shape = Constant<value = int64[2] {20, 20}>() e = ConstantOfShape(shape) w = EyeLike<k = 1>(e)
        u = Transpose<perm = [1, 0, 2]>(x) r = Reshape(u, joined) p = MatMul(r, w)
        v = Reshape(p, back) q = Transpose<perm = [1, 0, 2]>(v) y = Relu(q)
    }""",
    "columns": "{ u = Transpose<perm = [0, 2, 1]>(x) q = Transpose<perm = [0, 2, 1]>(u) y = Relu(q) }",
    "used twice": """{
        u = Transpose<perm = [1, 0, 2]>(x) v = Transpose<perm = [1, 0, 2]>(u) s = ReduceSum(u) y = Add(v, s)
    }""",
}


def counts_and_results(body):
    """How many Transposes there are, and the result, before and after."""
    model = onnx.parser.parse_model(f"{HEAD} {body}")
    draft = prepare(load(model, "test"), "test")
    found = []
    for change in (lambda draft: None, cancel_transposes):
        change(draft)
        draft.graph.sort()
        live = {node for value in draft.graph.outputs for node in _before(value)}
        session = onnxruntime.InferenceSession(ir.to_proto(draft.model).SerializeToString())
        x = np.random.default_rng(0).standard_normal((5, 3, 4)).astype(np.float32)
        found.append((sum(node.op_type == "Transpose" for node in live), session.run(None, {"x": x})[0]))
    return found


def _before(value):
    """The nodes that a value comes from."""
    node = value.producer()
    return set() if node is None else {node}.union(*(_before(v) for v in node.inputs if v is not None))


@pytest.mark.parametrize("body", UNDONE.values(), ids=UNDONE)
def test_left_out(body):
    (_, expected), (count, result) = counts_and_results(body)
    assert count == 0
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("body", LEFT.values(), ids=LEFT)
def test_kept(body):
    (before, expected), (count, result) = counts_and_results(body)
    assert count == before
    np.testing.assert_array_equal(result, expected)
