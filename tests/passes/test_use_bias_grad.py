"""Sums over all axes but the last become BiasGrad; others stay."""

import onnx
import onnx_ir as ir
import pytest

from onnxgrad.passes.draft import Draft
from onnxgrad.passes.use_bias_grad import use_bias_grad

MODEL = """
<ir_version: 9, opset_import: ["" : 18]>
sums (float[n, 4, 8] x) => (float[a] y) <int64[{count}] axes = {{{axes}}}> {{
    y = ReduceSum <keepdims = {keepdims}> (x, axes)
}}
"""


@pytest.mark.parametrize(
    ("axes", "keepdims", "count"),
    [((0, 1), 0, 1), ((-2, 0), 0, 1), ((0, 1), 1, 0), ((0,), 0, 0), ((1, 2), 0, 0), ((0, 1, 2), 0, 0)],
)
def test_which_sums(axes, keepdims, count):
    text = MODEL.format(axes=", ".join(map(str, axes)), count=len(axes), keepdims=keepdims)
    draft = Draft(ir.from_proto(onnx.parser.parse_model(text)), "test")
    assert use_bias_grad(draft) == count
    assert [node.op_type for node in draft.graph] == (["BiasGrad"] if count else ["ReduceSum"])
    assert draft.graph.outputs[0].name == "y"
