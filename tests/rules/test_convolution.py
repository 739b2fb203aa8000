"""Conv and ConvTranspose, with every attribute, against differences and PyTorch."""

import numpy as np
import onnx
import pytest
import torch
from tests.gradients import check_rule, daily, evaluate, model_of_node

import onnxgrad

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape)


TWICE = {"two axes", "strides and dilations", "groups", "SAME_LOWER with stride", "kernel_shape given", "output_shape"}
CONV = {
    "one axis": ([(2, 3, 7), (4, 3, 3), (4,)], {}),
    "two axes": ([(2, 3, 5, 4), (2, 3, 3, 2), (2,)], {"pads": [1, 0, 1, 2]}),
    "three axes": ([(1, 2, 4, 3, 4), (2, 2, 2, 1, 3), (2,)], {"pads": [1, 0, 1, 0, 1, 0]}),
    "pointwise": ([(2, 3, 3, 4), (4, 3, 1, 1), (4,)], {}),
    "pointwise with stride": ([(2, 3, 4, 5), (4, 3, 1, 1)], {"strides": [2, 2]}),
    "stride leaves rows out": ([(2, 2, 6, 8), (3, 2, 3, 3)], {"strides": [2, 3], "pads": [0, 1, 0, 1]}),
    "stride past the kernel": ([(2, 2, 9), (3, 2, 2)], {"strides": [4]}),
    "dilations": ([(2, 2, 7, 6), (3, 2, 3, 2)], {"dilations": [2, 3], "pads": [1, 1, 0, 2]}),
    "strides and dilations": ([(1, 2, 9, 8), (2, 2, 3, 2)], {"strides": [2, 3], "dilations": [2, 2]}),
    "groups": ([(2, 4, 4, 5), (6, 2, 2, 3), (6,)], {"group": 2, "pads": [1, 1, 0, 1], "strides": [2, 1]}),
    "depthwise": ([(2, 3, 4, 5), (3, 1, 3, 3), (3,)], {"group": 3, "pads": [1, 1, 1, 1]}),
    "depthwise, twice the channels": ([(2, 3, 8), (6, 1, 3)], {"group": 3, "dilations": [2]}),
    "VALID": ([(2, 2, 5, 4), (2, 2, 3, 2)], {"auto_pad": "VALID", "strides": [2, 1]}),
    "SAME_UPPER": ([(2, 2, 5, 4), (2, 2, 2, 3)], {"auto_pad": "SAME_UPPER"}),
    "SAME_LOWER": ([(2, 2, 5, 4), (2, 2, 2, 3)], {"auto_pad": "SAME_LOWER"}),
    "SAME_UPPER with stride": ([(2, 2, 6, 5), (2, 2, 3, 4)], {"auto_pad": "SAME_UPPER", "strides": [2, 3]}),
    "SAME_LOWER with stride": ([(2, 2, 6, 5), (2, 2, 3, 4)], {"auto_pad": "SAME_LOWER", "strides": [2, 3]}),
    "SAME_UPPER, stride past the kernel": ([(2, 2, 6), (2, 2, 1)], {"auto_pad": "SAME_UPPER", "strides": [2]}),
    "kernel_shape given": ([(2, 2, 5, 4), (2, 2, 3, 2)], {"kernel_shape": [3, 2], "strides": [2, 2]}),
    "kernel_shape given, SAME_LOWER": (
        [(1, 2, 6, 5), (2, 2, 3, 2)],
        {"kernel_shape": [3, 2], "auto_pad": "SAME_LOWER", "strides": [2, 2]},
    ),
    "large kernel": ([(1, 2, 20), (2, 1, 15)], {"kernel_shape": [15], "strides": [2], "pads": [1, 2], "group": 2}),
}


@pytest.mark.parametrize(
    "case",
    daily(
        CONV, "two axes", "strides and dilations", "groups", "depthwise", "SAME_LOWER with stride", "kernel_shape given"
    ),
)
def test_conv(case):
    shapes, attributes = CONV[case]
    check_rule("Conv", *(normal(*s) for s in shapes), twice=case in TWICE, **attributes)


TRANSPOSED = {
    "one axis": ([(2, 3, 4), (3, 2, 3), (2,)], {}),
    "two axes": ([(2, 3, 3, 4), (3, 2, 3, 2), (2,)], {"pads": [1, 0, 1, 1]}),
    "three axes": ([(1, 2, 2, 3, 2), (2, 2, 2, 1, 3), (2,)], {"strides": [1, 2, 2]}),
    "strides": ([(2, 2, 3, 3), (2, 3, 3, 2)], {"strides": [2, 3], "pads": [1, 0, 0, 1]}),
    "dilations": ([(2, 2, 3, 3), (2, 3, 3, 2)], {"strides": [2, 1], "dilations": [2, 3]}),
    "output_padding": ([(2, 2, 3, 3), (2, 3, 3, 2)], {"strides": [2, 3], "output_padding": [1, 2], "pads": [1, 0] * 2}),
    "output_padding past the pads": ([(2, 2, 3), (2, 3, 2)], {"strides": [3], "output_padding": [2]}),
    "groups": ([(2, 4, 3, 3), (4, 3, 2, 2), (6,)], {"group": 2, "strides": [2, 2]}),
    "depthwise": ([(2, 3, 4), (3, 1, 3), (3,)], {"group": 3, "strides": [2], "output_padding": [1]}),
    "VALID": ([(2, 2, 3), (2, 2, 3)], {"auto_pad": "VALID", "strides": [2]}),
    "SAME_UPPER": ([(2, 2, 3, 4), (2, 2, 3, 4)], {"auto_pad": "SAME_UPPER", "strides": [2, 1]}),
    "SAME_LOWER": ([(2, 2, 3, 4), (2, 2, 3, 4)], {"auto_pad": "SAME_LOWER", "strides": [2, 1]}),
    "output_shape": ([(2, 2, 3, 4), (2, 2, 3, 4)], {"output_shape": [6, 9], "strides": [2, 2]}),
    "output_shape, SAME_UPPER": (
        [(2, 2, 3, 4), (2, 2, 3, 4)],
        {"output_shape": [6, 9], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
    ),
    "kernel_shape given": ([(2, 2, 3, 3), (2, 3, 3, 2)], {"kernel_shape": [3, 2], "strides": [2, 2]}),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", daily(TRANSPOSED, *(TWICE & TRANSPOSED.keys()), "dilations", "output_padding", "SAME_LOWER")
)
def test_conv_transpose(case):
    shapes, attributes = TRANSPOSED[case]
    check_rule("ConvTranspose", *(normal(*s) for s in shapes), twice=case in TWICE, **attributes)


@pytest.mark.parametrize("opset", [18, 24])
@pytest.mark.parametrize("name", ["Conv", "ConvTranspose"])
def test_other_opsets(name, opset):
    check_rule(name, normal(2, 2, 6), normal(2, 2, 3), normal(2), opset=opset, strides=[2], pads=[1, 0], twice=False)


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("name", ["Conv", "ConvTranspose"])
def test_in_half_precision(name, static):
    """The gradient's types agree, whether or not a runtime has kernels for them."""
    shapes = [(2, 4, 5, 6), (4, 2, 3, 2), (4,)]
    attributes = {"group": 2, "strides": [2, 2], "auto_pad": "SAME_UPPER"}
    if name == "ConvTranspose":
        attributes |= {"output_shape": [9, 12]}
    model, _ = model_of_node(name, [normal(*s) for s in shapes], attributes=attributes, dtype=np.float16, static=static)
    onnx.checker.check_model(onnxgrad.gradient(model, ["in_0", "in_1", "in_2"]), full_check=True)


def gradients(op_type, arrays, g, dtype=np.float64, static=True, **attributes):
    model, feeds = model_of_node(op_type, arrays, attributes=attributes, dtype=dtype, static=static)
    made = onnxgrad.gradient(model, [f"in_{k}" for k in range(len(arrays))], "out_0")
    return evaluate(made, {**feeds, "out_0_grad": g.astype(dtype)})[1:]


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize(
    ("stride", "pad", "dilation", "group"), [(1, 1, 1, 1), (2, 1, 1, 2), (3, 0, 2, 1), (2, 2, 2, 4)]
)
def test_as_torch(op_type, stride, pad, dilation, group, static):
    arrays = [normal(2, 4, 9, 10), normal(4, 4 // group, 3, 2), normal(4)]
    if op_type == "ConvTranspose":
        arrays[1:] = normal(4, 2, 3, 2), normal(2 * group)
    tensors = [torch.tensor(a, requires_grad=True) for a in arrays]
    function = torch.nn.functional.conv2d if op_type == "Conv" else torch.nn.functional.conv_transpose2d
    y = function(*tensors, stride=stride, padding=pad, dilation=dilation, groups=group)
    g = normal(*y.shape)
    y.backward(torch.tensor(g))
    attributes = {"strides": [stride] * 2, "pads": [pad] * 4, "dilations": [dilation] * 2, "group": group}
    for got, tensor in zip(gradients(op_type, arrays, g, static=static, **attributes), tensors, strict=True):
        np.testing.assert_allclose(got, tensor.grad.numpy(), rtol=1e-10, atol=1e-10)


def test_few_nodes_where_shapes_are_known():
    """All gradients are one node, whatever rows the stride leaves out."""
    model, _ = model_of_node(
        "Conv", [normal(2, 2, 6, 8), normal(3, 2, 3, 3)], attributes={"strides": [2, 3]}, dtype=np.float32
    )
    made = onnxgrad.gradient(model, ["in_0", "in_1"])
    assert [node.op_type for node in made.graph.node if node.op_type != "Constant"] == ["Conv", "ConvGrad"]


@pytest.mark.parametrize("activation", ["none", "silu", "swish"])
def test_causal_conv_with_state(activation):
    """By its definition, for which the number of channels has to be known."""
    inputs = [normal(2, 4, 5), normal(4, 1, 3), normal(4), normal(2, 4, 2)]
    attributes = {"activation": activation}
    model, feeds = model_of_node("CausalConvWithState", inputs, 2, attributes=attributes, opset=27)
    for value in (*model.graph.input, *model.graph.output):
        if len(value.type.tensor_type.shape.dim) == 3 and value.name != "in_1":
            value.type.tensor_type.shape.dim[0].dim_param = "batch"
    outputs = ["out_0", "out_1"]
    checked = onnxgrad.check_gradient(model, feeds, list(feeds), outputs)
    assert checked.worst < 1e-6, checked
    once = onnxgrad.gradient(model, list(feeds), outputs)
    seeds = {"out_0_grad": normal(2, 4, 5), "out_1_grad": normal(2, 4, 2)}
    twice = onnxgrad.check_gradient(once, {**feeds, **seeds}, ["in_0", "in_1"], ["in_0_grad", "in_1_grad"])
    assert twice.worst < 1e-5, twice
