"""ConvGrad and DepthwiseConv against definition, PyTorch, ONNX function, and their own error sentences."""

import itertools
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checks import DEVICE, FLOATS, assert_close, call, check, check_refused, examples, expect, in_float64, layouts
from tests.conv_cases import CASES, arrays, is_right_in_onnx_reference, output_shape
from tests.expected import products
from tests.functions.models import check_functions, model_of, node_of, session
from tests.node_cases import NodeCase, only

from onnxgrad import add_functions
from onnxgrad.cpu.core.conv.tables import input_tables
from onnxgrad.ops.conv import conv_grad, depthwise_conv

NAMES = ("dX", "dW", "dB")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_cases_and_types(case, dtype):
    X, W, attributes = CASES[case]
    check(conv_grad, *arrays(X, W, attributes, dtype), **attributes)


@pytest.mark.parametrize("outputs", [o for n in (1, 2) for o in itertools.combinations(NAMES, n)], ids="_".join)
@pytest.mark.parametrize("case", ["two axes", "depthwise"])
def test_some_outputs(case, outputs):
    X, W, attributes = CASES[case]
    check(conv_grad, *arrays(X, W, attributes), **attributes, outputs=outputs)


@pytest.mark.parametrize("images", [4, 19])
@pytest.mark.parametrize("case", CASES)
def test_several_images(case, images):
    X, W, attributes = CASES[case]
    check(conv_grad, *arrays((images, *X[1:]), W, attributes), **attributes)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=lambda t: t.__name__)
@pytest.mark.parametrize("case", CASES)
def test_several_images_of_many_channels(case, dtype):
    X, W, attributes = CASES[case]
    times = -(-17 // W[1])
    check(conv_grad, *arrays((9, times * X[1], *X[2:]), (W[0], times * W[1], *W[2:]), attributes, dtype), **attributes)


@pytest.mark.parametrize(("inputs", "outputs"), [(300, 230), (210, 330)])
def test_pointwise_of_many_channels(inputs, outputs):
    check(conv_grad, *arrays((2, inputs, 10, 21), (outputs, inputs, 1, 1), {}))


def test_more_images_than_are_laid_out_at_once():
    X, W, attributes = CASES["stride leaves rows out"]
    with mock.patch("onnxgrad.cpu.conv.AT_ONCE", 1):
        check(conv_grad, *arrays((200, *X[1:]), W, attributes), **attributes)


def test_image_in_many_bands():
    X, W, attributes = (8, 20, 7, 6, 33), (5, 20, 3, 2, 3), {"pads": [1] * 6, "dilations": [2, 1, 1]}
    check(conv_grad, *arrays(X, W, attributes), **attributes)
    attributes = {"strides": [1, 2, 3]}
    with mock.patch("onnxgrad.cpu.core.conv.tables.SEEN", 1):
        input_tables.cache_clear()
        check(conv_grad, *arrays(X, W, attributes), **attributes)
    input_tables.cache_clear()


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_any_convolution(data):
    rank, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))

    def numbers(low, high):
        return data.draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank))

    kernel, strides, dilations, first, last = numbers(1, 4), numbers(1, 3), numbers(1, 3), numbers(0, 3), numbers(0, 3)
    more = numbers(0, 30 if rank == 1 else 6)
    along = zip(kernel, dilations, first, last, more, strict=True)
    sizes = [max(1, (k - 1) * d + 1 - a - b) + m for k, d, a, b, m in along]
    images, channels = data.draw(st.sampled_from([1, 2, 3, 4, 9, 17])), data.draw(st.sampled_from([1, 2, 5, 8, 16]))
    X = (images, group * channels, *sizes)
    W = (group * data.draw(st.integers(1, 6)), X[1] // group, *kernel)
    attributes = {"strides": strides, "dilations": dilations, "group": group}
    auto_pad = data.draw(st.sampled_from(["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"]))
    attributes |= {"pads": [*first, *last]} if auto_pad == "NOTSET" else {"auto_pad": auto_pad}
    check(conv_grad, *arrays(X, W, attributes), **attributes)


@pytest.mark.parametrize(
    ("X", "W", "attributes"),
    [
        ((0, 3, 5), (4, 3, 3), {}),
        ((2, 0, 5), (4, 0, 3), {}),
        ((2, 3, 5), (0, 3, 3), {}),
        ((2, 3, 2), (4, 3, 3), {}),
        ((2, 3, 0), (4, 3, 3), {"pads": [2, 2]}),
    ],
)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_nothing(X, W, attributes, dtype):
    check(conv_grad, *arrays(X, W, attributes, dtype), **attributes)


@pytest.mark.parametrize("layout", layouts(np.zeros((2, 2), np.float32)))
@pytest.mark.parametrize("at", range(3))
def test_layouts(at, layout):
    given = list(arrays((2, 4, 6, 8), (6, 4, 3, 3), {}))
    given[at] = layouts(given[at])[layout]
    check(conv_grad, *given)


@pytest.mark.parametrize("case", ["two axes", "depthwise, wide lines", "pointwise, large, more channels come out"])
def test_infinity_stays_where_it_is_seen(case):
    """Zeros that stand for padding, and elements that belong to other windows, are not multiplied with it."""
    X, W, attributes = CASES[case]
    dY, x, w = arrays(X, W, attributes, np.float32)
    x[0, 0, 0, 0] = x[-1, -1, -1, -1] = np.inf
    expected = conv_grad.definition(*map(in_float64, (dY, x, w)), **attributes)
    for name, got, wanted in zip(NAMES, call(conv_grad, dY, x, w, **attributes), expected, strict=True):
        assert (np.isfinite(got) == np.isfinite(wanted)).all(), name


@pytest.mark.slow  # kernels for float64 are compiled
@pytest.mark.parametrize(
    ("stride", "pad", "dilation", "group", "rank"), [(1, 1, 1, 1, 2), (2, 1, 1, 2, 1), (3, 0, 2, 1, 3), (2, 2, 2, 4, 2)]
)
def test_as_in_torch(stride, pad, dilation, group, rank):
    attributes = {"strides": [stride] * rank, "pads": [pad] * 2 * rank, "dilations": [dilation] * rank, "group": group}
    X, W = (2, 4, *[11] * rank), (8, 4 // group, *[3] * rank)
    dY, x, w = arrays(X, W, attributes, np.float64)
    tensors = [torch.tensor(a, requires_grad=True) for a in (x, w, np.zeros(8))]
    how = {"stride": stride, "padding": pad, "dilation": dilation, "groups": group}
    y = getattr(torch.nn.functional, f"conv{rank}d")(*tensors, **how)
    y.backward(torch.tensor(dY))
    for got, tensor in zip(call(conv_grad, dY, x, w, **attributes), tensors, strict=True):
        np.testing.assert_allclose(got, tensor.grad.numpy(), rtol=1e-10, atol=1e-10)


def _with_every_attribute(X, W, attributes):
    """As a rule writes them: onnx.reference wants those that a function hands on."""
    rank = len(X) - 2
    lists = {"strides": [1] * rank, "dilations": [1] * rank, "pads": [0] * 2 * rank}
    return {"group": 1, **lists, **attributes}


@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=lambda t: t.__name__)
@pytest.mark.parametrize("case", [c for c in CASES if c != "four axes"])
def test_function(case, dtype):
    X, W, attributes = CASES[case]
    inputs = arrays(X, W, attributes, dtype)
    if is_right_in_onnx_reference(X, W, attributes):
        check_functions(conv_grad, (inputs, _with_every_attribute(X, W, attributes)))
    node, feeds = node_of(conv_grad, inputs, attributes, "")
    expected, bounds = expect(conv_grad, *inputs, **attributes)
    results = session(add_functions(model_of([node], feeds))).run(None, feeds)
    for name, got, wanted, bound in zip(NAMES, results, expected, bounds, strict=True):
        assert_close(got, wanted, bound, name)


def test_functions_of_several_convolutions_in_one_model():
    chosen = [CASES[c] for c in ("one axis", "two axes", "SAME_UPPER", "depthwise", "stride leaves rows out")]
    check_functions(conv_grad, *((arrays(*case), _with_every_attribute(*case)) for case in chosen))


def test_refused():
    def refused(text, X=(2, 4, 5, 6), W=(6, 4, 3, 2), dY=None, **attributes):
        shapes = dY or (2, 6, 3, 5), X, W
        check_refused(conv_grad, ValueError, text, *(np.zeros(s, np.float32) for s in shapes), **attributes)

    refused("X has shape [2, 4], expected images, channels and at least one axis more", X=(2, 4))
    refused("W has shape [6, 4, 3], expected 4 dimensions as X has", W=(6, 4, 3))
    refused("group is 0, expected at least 1", group=0)
    refused("W has 6 output channels, expected a multiple of group, 4", group=4)
    refused("W has 4 channels, expected those of X, 4, divided by group, 2", group=2)
    refused("kernel_shape is [3, 3], expected [3, 2] as W has", kernel_shape=[3, 3])
    refused("strides is [2], expected 2 positive numbers", strides=[2])
    refused("dilations is [1, 0], expected 2 positive numbers", dilations=[1, 0])
    refused("pads is [1, 1], expected 4 numbers", pads=[1, 1])
    refused("pads is [0, -1, 0, 0], expected no negative number", pads=[0, -1, 0, 0])
    refused("pads is [9223372036854775807, 0, 0, 0], expected numbers of at most 2147483647", pads=[2**63 - 1, 0, 0, 0])
    refused("dilations is [1, 4611686018427387904], expected numbers of at most 2147483647", dilations=[1, 2**62])
    refused("auto_pad is 'SAME', expected one of NOTSET, SAME_UPPER, SAME_LOWER, VALID", auto_pad="SAME")
    refused("dY has shape [2, 6, 3, 5], expected [2, 6, 2, 5], that of Conv of X and W", strides=[2, 1])


@pytest.mark.skipif(DEVICE != "cpu", reason="PyTorch computes it on a GPU")
def test_the_stride_after_a_single_window_takes_no_memory():
    x, w = np.ones((3, 1, 4, 3), np.float32), np.ones((1, 1, 1, 3), np.float32)
    attributes = {"strides": [2, 2**31 - 1], "pads": [3, 2, 1, 3]}
    check(depthwise_conv, x, w, **attributes)
    check(conv_grad, depthwise_conv.definition(x, w, **attributes), x, w, **attributes)


def test_output_shape_is_conv_s():
    """What the cases are made with, against PyTorch."""
    y = torch.nn.functional.conv2d(torch.zeros(2, 3, 11, 12), torch.zeros(4, 3, 3, 2), stride=2, padding=1, dilation=2)
    attributes = {"strides": [2, 2], "pads": [1] * 4, "dilations": [2, 2]}
    assert output_shape((2, 3, 11, 12), (4, 3, 3, 2), attributes) == tuple(y.shape)


@pytest.mark.skipif(DEVICE == "cpu", reason="a switch of torch, which the CPU's kernels know nothing of")
@pytest.mark.parametrize("allowed", [False, True])
def test_tf32_where_matrix_products_use_it(allowed):
    X, W, attributes = CASES["two axes"]
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before, own, seen = matmul.fp32_precision, conv.fp32_precision, []
    convolution_backward = torch.ops.aten.convolution_backward

    def spy(*args):
        seen.append(conv.fp32_precision)
        return convolution_backward(*args)

    matmul.fp32_precision = "tf32" if allowed else "ieee"
    try:
        with mock.patch.object(torch.ops.aten, "convolution_backward", spy):
            call(conv_grad, *arrays(X, W, attributes), **attributes)
    finally:
        matmul.fp32_precision = before
    assert set(seen) == {"tf32" if allowed else "ieee"}
    assert conv.fp32_precision == own


# Sizes of X, sizes of the kernel, strides, dilations, pads.
CHANNEL_BY_CHANNEL = {
    "one axis": ((2, 3, 11), (3,), (2,), (1,), (1, 0)),
    "same size": ((2, 5, 9, 7), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    "long lines": ((1, 2, 5, 150), (5, 5), (1, 1), (1, 1), (2, 2, 2, 2)),
    "strides": ((2, 4, 10, 11), (3, 5), (2, 3), (1, 1), (1, 2, 0, 1)),
    "dilations": ((1, 3, 12, 9), (3, 3), (2, 2), (2, 3), (2, 3, 2, 3)),
    "stride beyond the kernel": ((1, 2, 9, 8), (2, 2), (4, 3), (1, 1), (0, 0, 0, 0)),
    "pads beyond the kernel": ((1, 2, 3, 3), (2, 2), (1, 1), (1, 1), (3, 2, 3, 2)),
    "kernel of one": ((2, 3, 6, 5), (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
}


def channel_by_channel(case, dtype=np.float32):
    X, kernel, strides, dilations, pads = CHANNEL_BY_CHANNEL[case]
    random = np.random.default_rng(1)
    x, w, b = (random.standard_normal(s).astype(dtype) for s in (X, (X[1], 1, *kernel), X[1:2]))
    return (x, w, b), {"group": X[1], "strides": strides, "dilations": dilations, "pads": pads}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", CHANNEL_BY_CHANNEL)
def test_channel_by_channel(case, dtype):
    inputs, attributes = channel_by_channel(case, dtype)
    check(depthwise_conv, *inputs, **attributes)
    check(depthwise_conv, *inputs[:2], **attributes)
    y = depthwise_conv.definition(*inputs, **attributes)
    check(conv_grad, y, *inputs[:2], **attributes, outputs=("dX",))


@pytest.mark.parametrize("case", CHANNEL_BY_CHANNEL)
def test_function_of_channel_by_channel(case):
    inputs, attributes = channel_by_channel(case)
    check_functions(depthwise_conv, (inputs, attributes), (inputs[:2], attributes))


def test_channel_by_channel_refused():
    (x, w, b), attributes = channel_by_channel("same size")
    check_refused(
        depthwise_conv, ValueError, "group is 4, expected the number of channels, 5", x, w, **{**attributes, "group": 4}
    )
    check_refused(depthwise_conv, ValueError, "B has shape [4], expected [5]", x, w, b[:4], **attributes)
    sentence = "W has shape [4, 1, 3, 3], expected a kernel for each of the 5 channels of X"
    check_refused(depthwise_conv, ValueError, sentence, x, w[:4], **attributes)


expected = products  # how far a right kernel may be from the definition


def node_cases() -> Iterator[NodeCase]:
    """Small calls for every runtime to run."""
    names = ("two axes", "groups", "depthwise", "SAME_UPPER with stride", "strides and dilations", "three axes")
    for dtype, name in itertools.product(FLOATS, names):
        X, _, given = CASES[name]
        rank = len(X) - 2
        lists = {"strides": [1] * rank, "dilations": [1] * rank, "pads": [0] * 2 * rank}

        def make(dtype=dtype, case=CASES[name]):
            return arrays(*case, dtype)

        parameters = {"type": str(dtype), "convolution": name.replace(" ", "_")}
        yield NodeCase(conv_grad, parameters, make, {"group": 1, **lists, **given})
    for outputs in (["dX"], ["dW"], ["dB"], ["dW", "dB"]):
        case = CASES["two axes"]
        attributes = {"group": 1, "strides": [1, 1], "dilations": [1, 1], **case[2]}
        parameters = {"type": "float32", "outputs": only(outputs)}
        yield NodeCase(conv_grad, parameters, lambda case=case: arrays(*case), attributes, outputs)
    for dtype in FLOATS:
        inputs, attributes = channel_by_channel("strides", dtype)
        for count in (2, 3):
            parameters = {"type": str(dtype), "bias": "yes" if count == 3 else "no"}
            yield NodeCase(depthwise_conv, parameters, lambda inputs=inputs[:count]: inputs, attributes)
