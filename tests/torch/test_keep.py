"""What is kept between the forward and the backward pass: little, and nothing that is as well computed again."""

import onnx
import pytest
import torch

from onnxgrad.torch import Module

KEPT = {
    "y = Relu(x)": {"y"},
    "y = Mul(x, x)": set(),  # inputs are there anyway
    "h = Exp(x) y = Sin(h)": {"h"},
    "h = Exp(x) s = Constant <value_ints = [-1]> () v = Reshape(h, s) y = Sin(v)": {"h"},  # not the view of it
    "h = Exp(x) t = Transpose(h) y = MatMul(h, t)": {"h"},  # what is transposed anew takes no memory
    # The mask follows from what is kept anyway.
    "h = Exp(x) z = Constant <value_float = 1.0> () m = Greater(h, z) y = Where(m, h, x)": {"h"},
    "z = Constant <value_float = 1.0> () m = Greater(x, z) y = Where(m, x, z)": set(),
    "h = Exp(x) a = ReduceSum(h) y = Div(x, a)": {"a", "h", "y"},
}


@pytest.mark.parametrize(("body", "kept"), KEPT.items(), ids=KEPT)
def test_what_is_kept(body, kept):
    proto = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 18]> m (float[n, 100] x) => (float y) {{ {body} }}'
    )
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    module, x = Module(proto), torch.rand(3, 100, requires_grad=True)
    y = module(x)
    ((plan,),) = (mode.network._plans.values() for mode in module._graphs._modes.values())
    small = {name for name in plan.kept if name not in kept}  # shapes
    assert set(plan.kept) >= kept and all("Shape" in name or "Size" in name for name in small), plan.kept
    assert torch.isfinite(torch.autograd.grad(y.sum(), x)[0]).all()
