"""Gelu, in all the ways it is written by Erf, and what only looks like it."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx import parser
from tests.gradients import evaluate

from onnxgrad.passes.fuse_gelu import fuse_gelu
from onnxgrad.passes.prepare import prepare

HEAD = '<ir_version: 8, opset_import: ["" : {opset}]> g (float[N, 8] x) => (float[N, 8] y)\n'
WRITTEN = {
    "torch": "d = Div(x, root) e = Erf(d) a = Add(e, one) m = Mul(x, a) y = Mul(m, half)",
    "half first": "h = Mul(x, half) d = Div(x, root) e = Erf(d) a = Add(one, e) y = Mul(h, a)",
    "half in the middle": "d = Mul(inverse, x) e = Erf(d) a = Add(e, one) m = Mul(a, half) y = Mul(m, x)",
    "halved": "d = Mul(x, inverse) e = Erf(d) a = Add(e, one) h = Div(x, two) y = Mul(a, h)",
}
OTHER = {
    "another root": "d = Div(x, two) e = Erf(d) a = Add(e, one) m = Mul(x, a) y = Mul(m, half)",
    "not plus one": "d = Div(x, root) e = Erf(d) a = Add(e, two) m = Mul(x, a) y = Mul(m, half)",
    "not halved": "d = Div(x, root) e = Erf(d) a = Add(e, one) m = Mul(x, a) y = Mul(m, two)",
    "halved twice": "d = Div(x, root) e = Erf(d) a = Add(e, one) m = Mul(half, a) y = Mul(m, half)",
    "of something else": "n = Neg(x) d = Div(n, root) e = Erf(d) a = Add(e, one) m = Mul(x, a) y = Mul(m, half)",
    "a part is used twice": "d = Div(x, root) e = Erf(d) a = Add(e, one) m = Mul(x, a) z = Mul(m, half) y = Add(z, a)",
}


def fused(proto):
    prepared = prepare(ir.from_proto(proto), "test")
    return fuse_gelu(prepared), prepared.model


def model(body, opset=18):
    numbers = {"root": 2**0.5, "inverse": 0.5**0.5, "one": 1.0, "two": 2.0, "half": 0.5}
    constants = " ".join(f"{name} = Constant<value_float = {number!r}>()" for name, number in numbers.items())
    return parser.parse_model(f"{HEAD.format(opset=opset)} {{ {constants} {body} }}")


@pytest.mark.parametrize("opset", [18, 20])
@pytest.mark.parametrize("body", WRITTEN.values(), ids=WRITTEN)
def test_ways_to_write_it(body, opset):
    count, changed = fused(model(body, opset))
    assert count == 1
    kinds = {(n.domain, n.op_type) for n in changed.graph if any(v.is_graph_output() for v in n.outputs)}
    assert kinds == {("com.microsoft" if opset < 20 else "", "Gelu")}
    x = np.random.default_rng(3).standard_normal((5, 8)).astype(np.float32)
    (mine,), (theirs,) = (evaluate(m, {"x": x}) for m in (ir.to_proto(changed), model(body, opset)))
    assert np.allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("body", OTHER.values(), ids=OTHER)
def test_what_only_looks_like_it(body):
    assert fused(model(body))[0] == 0
