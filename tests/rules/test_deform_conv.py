"""DeformConv: groups, offset groups, strides, pads, dilations, with and without a mask and a bias."""

import numpy as np
import pytest
from tests.gradients import check_rule, evaluate, model_of_node

import onnxgrad

pytestmark = pytest.mark.slow  # kernels that few models have, and that take long to compile

RNG = np.random.default_rng(0)


def random(*shape):
    return RNG.standard_normal(shape)


def inputs_of(group=1, offset_group=1, *, size=(2, 2), places=(4, 3), bias=True, mask=True):
    elements = offset_group * size[0] * size[1]
    return [
        random(2, 4, 5, 4),
        random(2, 4 // group, *size),
        random(2, 2 * elements, *places),
        random(2) if bias else None,
        random(2, elements, *places) if mask else None,
    ]


@pytest.mark.parametrize(
    ("group", "offset_group"), [(2, 4), *(pytest.param(*g, marks=pytest.mark.slow) for g in ((1, 1), (2, 1), (1, 2)))]
)
@pytest.mark.parametrize("mask", [True, False])
def test_groups(group, offset_group, mask):
    inputs = inputs_of(group, offset_group, mask=mask, bias=mask)
    twice = (group, offset_group) == (2, 4) and mask
    check_rule("DeformConv", *inputs, group=group, offset_group=offset_group, kernel_shape=[2, 2], twice=twice)


def test_windows():
    inputs = inputs_of(size=(3, 2), places=(3, 3))
    given = {"strides": [2, 1], "pads": [2, 1, 2, 0], "dilations": [2, 2], "kernel_shape": [3, 2]}
    check_rule("DeformConv", *inputs, twice=False, **given)


def test_opset_19():
    """onnxruntime has no GridSample of float64 there."""
    check_rule("DeformConv", *inputs_of(), opset=19, twice=False, kernel_shape=[2, 2])


def test_without_offsets_it_is_a_convolution():
    X, W, offset, *_ = inputs_of(mask=False)
    seed, found = random(2, 2, 4, 3), []
    for op_type, inputs in (("DeformConv", [X, W, offset * 0]), ("Conv", [X, W])):
        model, feeds = model_of_node(op_type, inputs)
        found.append(evaluate(onnxgrad.gradient(model, ["in_0", "in_1"]), {**feeds, "out_0_grad": seed}))
    for deformed, plain in zip(*found, strict=True):
        np.testing.assert_allclose(deformed, plain, rtol=1e-9, atol=1e-9)


def test_kernel_of_unknown_size():
    model, _ = model_of_node("DeformConv", inputs_of(mask=False), static=False)
    with pytest.raises(ValueError, match="kernel_shape"):
        onnxgrad.gradient(model, "in_0")


def test_float16():
    inputs, seed, found = [x.astype(np.float16) for x in inputs_of()], random(2, 2, 4, 3).astype(np.float16), []
    for dtype in (np.float16, np.float64):
        model, feeds = model_of_node("DeformConv", inputs, dtype=dtype)
        once = onnxgrad.gradient(model, [f"in_{k}" for k in range(5)])
        found.append(evaluate(once, {**feeds, "out_0_grad": seed.astype(dtype)}))
    for half, wide in zip(*found, strict=True):
        assert half.dtype == np.float16
        np.testing.assert_allclose(half, wide, rtol=1e-2, atol=1e-2)
