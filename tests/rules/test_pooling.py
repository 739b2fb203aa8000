"""Pools, with every attribute, against differences and PyTorch."""

import numpy as np
import pytest
import torch
from tests.gradients import check_model, check_rule, evaluate, model_of_node, parsed
from torch.nn import functional

import onnxgrad

OPSET = 22  # before that, onnx infers a window too many where the last one would start past the image
RNG = np.random.default_rng(0)


def spaced(*shape):
    """Numbers no two of which are close: a step of a difference quotient changes no maximum."""
    size = int(np.prod(shape))
    return (RNG.permutation(size) / size * 4 - 2 + 0.3 / size).reshape(shape)


TWICE = {"strides", "dilations and ceil_mode", "SAME_UPPER"}
POOLS = {
    "one axis": ((2, 2, 6), {"kernel_shape": [2]}),
    "two axes": ((2, 2, 5, 4), {"kernel_shape": [2, 3]}),
    "three axes": ((1, 2, 4, 3, 4), {"kernel_shape": [2, 1, 3], "strides": [2, 1, 1]}),
    "strides": ((2, 2, 6, 8), {"kernel_shape": [2, 3], "strides": [2, 3]}),
    "stride past the kernel": ((2, 2, 8), {"kernel_shape": [2], "strides": [3]}),
    "pads": ((2, 2, 5, 4), {"kernel_shape": [3, 3], "pads": [1, 0, 1, 2], "strides": [2, 1]}),
    "ceil_mode": ((2, 2, 6, 6), {"kernel_shape": [3, 2], "strides": [2, 2], "ceil_mode": 1}),
    "ceil_mode and pads": ((1, 2, 6, 8), {"kernel_shape": [3, 3], "strides": [2, 3], "ceil_mode": 1, "pads": [1] * 4}),
    "dilations": ((2, 2, 7, 6), {"kernel_shape": [3, 2], "dilations": [2, 3], "pads": [1, 0, 2, 1]}),
    "dilations and ceil_mode": (
        (1, 2, 8, 7),
        {"kernel_shape": [3, 2], "dilations": [2, 2], "strides": [2, 3], "ceil_mode": 1, "pads": [1, 1, 1, 0]},
    ),
    "VALID": ((2, 2, 5, 6), {"kernel_shape": [2, 3], "strides": [2, 2], "auto_pad": "VALID"}),
    "SAME_UPPER": ((2, 2, 5, 6), {"kernel_shape": [3, 3], "strides": [2, 1], "auto_pad": "SAME_UPPER"}),
    "SAME_LOWER": ((2, 2, 5, 6), {"kernel_shape": [2, 3], "strides": [1, 2], "auto_pad": "SAME_LOWER"}),
}  # fmt: skip


@pytest.mark.parametrize("case", POOLS)
@pytest.mark.parametrize("name", ["MaxPool", "AveragePool", "LpPool"])
def test_pool(name, case):
    shape, attributes = POOLS[case]
    check_rule(name, spaced(*shape), of=[0], opset=OPSET, twice=case in TWICE, **attributes)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in POOLS if "pad" in str(POOLS[c])])
def test_average_counts_pads(case):
    shape, attributes = POOLS[case]
    check_rule("AveragePool", spaced(*shape), count_include_pad=1, opset=OPSET, twice=False, **attributes)


@pytest.mark.parametrize("opset", [18, 24])
@pytest.mark.parametrize("name", ["MaxPool", "AveragePool", "LpPool"])
def test_pool_of_other_opsets(name, opset):
    check_rule(name, spaced(1, 2, 7), of=[0], opset=opset, twice=False, kernel_shape=[3], strides=[2], pads=[1, 0])


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2, 6), (2, 2, 5, 4), (1, 2, 4, 3, 5)])
def test_max_pool_in_columns(shape):
    check_rule("MaxPool", spaced(*shape), of=[0], kernel_shape=[2] * (len(shape) - 2), storage_order=1)


def test_max_pool_with_its_indices():
    check_rule("MaxPool", spaced(2, 2, 5, 4), outputs=2, of=[0], kernel_shape=[2, 3])


@pytest.mark.parametrize("p", [1, 3, 4])
def test_norms(p):
    check_rule("LpPool", spaced(2, 2, 6), p=p, kernel_shape=[3], strides=[2])
    check_rule("GlobalLpPool", spaced(2, 2, 6), p=p)


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 2, 3, 4), (1, 2, 3, 2, 2)])
@pytest.mark.parametrize("name", ["GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"])
def test_global_pool(name, shape):
    check_rule(name, spaced(*shape))


def test_zeros_have_no_slope():
    x = np.zeros((1, 1, 4))
    x[0, 0, 0] = 3
    (dx,) = gradients("LpPool", x, np.ones((1, 1, 2)), kernel_shape=[2], strides=[2])
    np.testing.assert_array_equal(dx, [[[1, 0, 0, 0]]])


def test_dilated_same_pads_are_refused():
    model, _ = model_of_node(
        "AveragePool",
        [spaced(1, 1, 8)],
        attributes={"kernel_shape": [2], "dilations": [2], "auto_pad": "SAME_UPPER"},
    )
    with pytest.raises(ValueError, match=r"auto_pad SAME_UPPER with dilations .* set pads instead"):
        onnxgrad.gradient(model, "in_0")


def gradients(op_type, x, g, **attributes):
    model, feeds = model_of_node(op_type, [x], attributes=attributes, opset=OPSET)
    made = onnxgrad.gradient(model, "in_0", "out_0")
    return evaluate(made, {**feeds, "out_0_grad": g})[1:2]


def check_torch(op_type, x, function, **attributes):
    tensor = torch.tensor(x, requires_grad=True)
    y = function(tensor)
    g = RNG.standard_normal(y.shape)
    y.backward(torch.tensor(g))
    (got,) = gradients(op_type, x, g, **attributes)
    np.testing.assert_allclose(got, tensor.grad.numpy(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize(("kernel", "stride", "pad"), [(2, 2, 0), (3, 2, 1), (3, 1, 1)])
def test_as_torch(kernel, stride, pad, ceil):
    x = spaced(2, 3, 8, 9)
    ties = np.round(x)
    both = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4, "ceil_mode": int(ceil)}
    check_torch("MaxPool", x, lambda t: functional.max_pool2d(t, kernel, stride, pad, ceil_mode=ceil), **both)
    check_torch("MaxPool", ties, lambda t: functional.max_pool2d(t, kernel, stride, pad, ceil_mode=ceil), **both)
    for include in (False, True):
        check_torch(
            "AveragePool",
            x,
            lambda t, include=include: functional.avg_pool2d(t, kernel, stride, pad, ceil, include),
            count_include_pad=int(include),
            **both,
        )


def test_global_as_torch():
    x = spaced(2, 3, 4, 5)
    check_torch("GlobalAveragePool", x, lambda t: functional.adaptive_avg_pool2d(t, 1))
    check_torch("GlobalMaxPool", x, lambda t: functional.adaptive_max_pool2d(t, 1))
    check_torch("GlobalMaxPool", np.round(x), lambda t: functional.adaptive_max_pool2d(t, 1))
    check_torch("LpPool", x, lambda t: functional.lp_pool2d(t, 2.0, 2), kernel_shape=[2, 2], strides=[2, 2])


UNPOOLS = {
    "one axis": ((2, 2, 6), {"kernel_shape": [2], "strides": [2]}),
    "two axes": ((2, 2, 4, 6), {"kernel_shape": [2, 3], "strides": [2, 3]}),
    "overlapping windows": ((1, 2, 5, 5), {"kernel_shape": [3, 2], "strides": [1, 1]}),
    "pads": ((1, 2, 4, 4), {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
}


@pytest.mark.parametrize(("shape", "attributes"), UNPOOLS.values(), ids=UNPOOLS)
def test_max_unpool(shape, attributes):
    """Of two elements that go to the same place the last one stays there, and has the gradient."""
    pool, feeds = model_of_node("MaxPool", [spaced(*shape)], 2, attributes=attributes, opset=OPSET)
    pooled, indices = evaluate(pool, feeds)
    check_rule("MaxUnpool", RNG.standard_normal(pooled.shape), indices, opset=OPSET, **attributes)


def test_max_unpool_with_output_shape():
    """In onnxruntime indices count in the output's shape, as in PyTorch; not so in onnx.reference."""
    x, attributes = RNG.standard_normal((2, 3, 2, 2)), {"kernel_shape": [2, 2], "strides": [2, 2]}
    size = np.array([2, 3, 5, 5])
    shifts = 16 * np.arange(6).reshape(2, 3, 1, 1)
    indices = np.array([[5, 7], [13, 15]]) + shifts
    model, feeds = model_of_node("MaxUnpool", [x, indices, size], attributes=attributes, opset=OPSET, static=False)
    assert onnxgrad.check_gradient(model, feeds, "in_0").worst < 1e-6
    for dtype in (np.float32, np.float16):
        model, feeds = model_of_node("MaxUnpool", [x, indices, size], attributes=attributes, opset=OPSET, dtype=dtype)
        g = RNG.standard_normal(size).astype(dtype)
        got = evaluate(onnxgrad.gradient(model, "in_0"), {**feeds, "out_0_grad": g})[1]
        np.testing.assert_array_equal(got, g.ravel()[indices])


def test_max_unpool_as_in_torch():
    given = torch.from_numpy(spaced(2, 3, 7, 6))
    pooled, indices = functional.max_pool2d(given, 2, return_indices=True)
    pooled.requires_grad_()
    result = functional.max_unpool2d(pooled, indices, 2, output_size=(7, 6))
    g = torch.from_numpy(RNG.standard_normal(result.shape))
    result.backward(g)
    planes = 42 * np.arange(6).reshape(2, 3, 1, 1)  # PyTorch counts in each plane
    inputs = [pooled.detach().numpy(), indices.numpy() + planes, np.array([2, 3, 7, 6])]
    attributes = {"kernel_shape": [2, 2], "strides": [2, 2]}
    model, feeds = model_of_node("MaxUnpool", inputs, attributes=attributes, opset=OPSET, dtype=np.float32)
    got = evaluate(onnxgrad.gradient(model, "in_0"), {**feeds, "out_0_grad": g.numpy().astype(np.float32)})[1]
    np.testing.assert_array_equal(got, pooled.grad.numpy().astype(np.float32))


def test_twice_where_only_one_of_two_pools_is_dilated():
    """Both share a function, for which their attributes are written out, empty ones, too."""
    model = parsed("""g (float[1,1,7,7] x) => (float s) {
        y = MaxPool <kernel_shape = [2,2], dilations = [2,2]> (x)
        z = MaxPool <kernel_shape = [2,2]> (y)
        c = Mul (z, z)
        s = ReduceSum <keepdims = 0> (c)
    }""")
    check_model(model, {"x": spaced(1, 1, 7, 7)}, ["x"])
    assert onnxgrad.hvp(model, "x").graph.output[-1].name == "x_hvp"
