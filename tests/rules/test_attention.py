"""Gradients of PackedAttention, once and twice, beside those of FlashAttention to the parts."""

import numpy as np
import onnx
import pytest

import onnxgrad

LAYOUT = "SN3HD"
PACKED = 'y = onnxgrad.PackedAttention <scale = 0.4, is_causal = {causal}, layout = "SN3HD"> (x{mask})'
PARTS = """parts = Transpose <perm = [2, 1, 0, 3, 4]> (x)
    zero = Constant <value_int = 0> ()  one = Constant <value_int = 1> ()  two = Constant <value_int = 2> ()
    q = Gather <axis = 0> (parts, zero)  k = Gather <axis = 0> (parts, one)  v = Gather <axis = 0> (parts, two)
    found = onnxgrad.FlashAttention <scale = 0.4, is_causal = {causal}> (q, k, v{mask})
    y = Transpose <perm = [1, 0, 2, 3]> (found)"""


def hessian_products(statements, causal, has_mask, feeds):
    """The loss, gradients and Hessian-vector products of a model around the statements."""
    inputs = "float[5, 2, 3, 2, 4] x, float[5, 2, 2, 4] factor" + (", float[2, 1, 1, 5] mask" if has_mask else "")
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21, "onnxgrad" : 1]> m ({inputs}) => (float loss) {{'
        + statements.format(causal=causal, mask=", mask" if has_mask else "")
        + "  z = Mul(y, factor)  loss = ReduceSumSquare <keepdims = 0> (z) }"
    )
    found = onnxgrad.hvp(model, ["x"] + ["mask"] * has_mask, "loss")
    session = onnxgrad.session(onnxgrad.add_functions(found))
    given = {i.name: feeds[i.name] for i in session.get_inputs()}
    return {o.name: value for o, value in zip(session.get_outputs(), session.run(None, given), strict=True)}


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("causal", [0, 1])
def test_as_attention_to_the_parts(causal, has_mask):
    rng = np.random.default_rng(0)
    shapes = {"x": (5, 2, 3, 2, 4), "factor": (5, 2, 2, 4), "mask": (2, 1, 1, 5)}
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    feeds |= {f"{name}_vector": rng.standard_normal(shapes[name]).astype(np.float32) for name in ("x", "mask")}
    packed, parts = (hessian_products(s, causal, has_mask, feeds) for s in (PACKED, PARTS))
    assert packed.keys() == parts.keys()
    for name, wanted in parts.items():
        np.testing.assert_allclose(packed[name], wanted, rtol=1e-4, atol=1e-4, err_msg=name)
