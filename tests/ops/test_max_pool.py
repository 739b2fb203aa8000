"""MaxPoolGrad against its definition, PyTorch, stock onnxruntime's Indices, and its own error sentences."""

import itertools
from collections.abc import Iterator

import numpy as np
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper
from tests.checks import FLOATS, call, check, check_refused, examples, layouts
from tests.expected import pools
from tests.functions.models import check_functions, model_of, node_of, session
from tests.node_cases import NodeCase
from tests.pool_cases import POOLS, numbers, windows
from torch.nn import functional

from onnxgrad import add_functions
from onnxgrad.ops.max_pool import max_pool_grad


def arrays(shape, attributes, dtype=np.float32):
    """dY and X, which has many equal numbers."""
    return numbers(windows(shape, **attributes), dtype), np.round(numbers(shape, np.float32, 1) * 2).astype(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", POOLS)
def test_attributes_and_types(case, dtype):
    shape, attributes = POOLS[case]
    check(max_pool_grad, *arrays(shape, attributes, dtype), **attributes)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 4, 6), (3, 2, 5, 71), (2, 1, 3, 4, 33), (2, 2, 66, 4)], ids=str)
def test_squares_side_by_side(shape, dtype):
    kernel = [1] * (len(shape) - 4) + [2, 2]
    attributes = {"kernel_shape": kernel, "strides": kernel}
    dY, X = arrays(shape, attributes, dtype)
    X[0, 0, ..., 0] = -np.inf  # also all of a window
    X[0, 0, ..., :2, 2:4] = [[np.nan, 1], [2, np.nan]]
    X[-1, -1, ..., :2, :2] = np.nan
    X[1, 0] = -np.inf
    check(max_pool_grad, dY, X, **attributes)


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_any_pool(data):
    rank = data.draw(st.integers(1, 3))

    def some(low, high, count=rank):
        return data.draw(st.lists(st.integers(low, high), min_size=count, max_size=count))

    kernel, dilations = some(1, 4), some(1, 2)
    pads = [min(p, k - 1) for p, k in zip(some(0, 3, 2 * rank), kernel * 2, strict=True)]
    extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    sizes = [e + more for e, more in zip(extents, some(0, 9), strict=True)]
    attributes = {"kernel_shape": kernel, "strides": some(1, 3), "pads": pads, "dilations": dilations}
    attributes["ceil_mode"] = data.draw(st.integers(0, 1))
    shape = (data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3)), *sizes)
    check(max_pool_grad, *arrays(shape, attributes), **attributes)


@pytest.mark.parametrize("shape", [(0, 2, 4, 4), (2, 0, 4, 4), (2, 2, 0, 4)])
def test_nothing(shape):
    attributes = {"kernel_shape": [2, 2], "pads": [1] * 4}
    dY = np.ones(windows(shape, **attributes), np.float32)
    assert call(max_pool_grad, dY, np.zeros(shape, np.float32), **attributes).shape == shape


@pytest.mark.parametrize("layout", layouts(np.zeros((2, 2), np.float32)))
def test_layouts(layout):
    attributes = {"kernel_shape": [2, 2]}
    dY, X = arrays((1, 2, 5, 4), attributes)
    check(max_pool_grad, layouts(dY)[layout], layouts(X)[layout], **attributes)


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize(
    ("kernel", "stride", "pad", "dilation"), [(2, 2, 0, 1), (3, 2, 1, 1), (3, 1, 1, 1), (2, 3, 1, 2)]
)
def test_as_in_torch(kernel, stride, pad, dilation, ceil):
    x = torch.tensor(np.round(numbers((2, 3, 11, 12), np.float64) * 2), requires_grad=True)
    y = functional.max_pool2d(x, kernel, stride, pad, dilation, ceil_mode=ceil)
    g = numbers(tuple(y.shape), np.float64, 2)
    y.backward(torch.tensor(g))
    how = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4, "dilations": [dilation] * 2}
    found = call(max_pool_grad, g, x.detach().numpy(), ceil_mode=int(ceil), **how)
    np.testing.assert_allclose(found, x.grad.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", POOLS)
def test_where_onnxruntime_finds_its_maxima(case):
    shape, attributes = POOLS[case]
    dY, X = arrays(shape, attributes)
    node = helper.make_node("MaxPool", ["X"], ["Y", "Indices"], **attributes)
    model = model_of([node], {"X": X}, opset=22)
    Y, indices = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(
        None, {"X": X}
    )
    assert Y.shape == dY.shape
    expected = np.zeros(X.size)
    np.add.at(expected, indices.reshape(-1), dY.reshape(-1).astype(np.float64))
    np.testing.assert_allclose(call(max_pool_grad, dY, X, **attributes).reshape(-1), expected, rtol=1e-5, atol=1e-6)


def test_windows_of_nothing_but_infinity_or_nan():
    X = np.full((1, 1, 4, 6), -np.inf, np.float32)
    X[..., 2:4], X[..., 4] = np.nan, np.nan
    X[0, 0, 0, 5] = 1
    dY = np.arange(1, 7, dtype=np.float32).reshape(1, 1, 2, 3)
    check(max_pool_grad, dY, X, kernel_shape=[2, 2], strides=[2, 2])
    check(max_pool_grad, np.ones((1, 1, 5, 7), np.float32), X, kernel_shape=[2, 2], pads=[1] * 4)


FOR_REFERENCE = ("strides", "halves of a large image")  # of others, onnx.reference's MaxPool tells wrong Indices


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_as_functions(dtype):
    calls = []
    for shape, attributes in map(POOLS.get, FOR_REFERENCE):
        X = np.random.default_rng(0).permutation(np.prod(shape)).reshape(shape).astype(dtype)  # which has its own ties
        calls.append(((numbers(windows(shape, **attributes), dtype), X), attributes))
    for some in (calls[:1], calls[1:2], calls):
        check_functions(max_pool_grad, *some)


@pytest.mark.parametrize("case", POOLS)
def test_as_a_function_in_onnxruntime(case):
    shape, attributes = POOLS[case]
    dY, X = arrays(shape, attributes)
    node, feeds = node_of(max_pool_grad, (dY, X), attributes, "")
    found = session(add_functions(model_of([node], feeds, opset=22))).run(None, feeds)[0]
    np.testing.assert_allclose(found, max_pool_grad.definition(dY, X, **attributes), rtol=1e-5, atol=1e-6)


def test_refused():
    dY, X = np.zeros((1, 1, 2, 2), np.float32), np.zeros((1, 1, 3, 3), np.float32)
    good = {"kernel_shape": [2, 2]}
    refused = [
        ("kernel_shape is missing", dY, X, {}),
        ("kernel_shape is [1, 1, 1, 1], expected at most 3 numbers", dY, X, {"kernel_shape": [1] * 4}),
        ("kernel_shape is [2, 0], expected numbers of at least 1", dY, X, {"kernel_shape": [2, 0]}),
        ("strides is [2], expected 2 numbers for kernel_shape [2, 2]", dY, X, {**good, "strides": [2]}),
        ("pads is [0, 0, 0, -1], expected numbers of at least 0", dY, X, {**good, "pads": [0, 0, 0, -1]}),
        ("strides is [1, 2147483648], expected numbers of at most 2147483647", dY, X,
         {**good, "strides": [1, 2**31]}),
        ("a window would have shape [2097152, 2097152, 4194304], too large for any memory", dY, X,
         {"kernel_shape": [2**21, 2**21, 2**22], "pads": [2**22] * 6}),
        ("auto_pad is 'SAME', expected one of 'NOTSET', 'SAME_UPPER', 'SAME_LOWER', 'VALID'", dY, X,
         {**good, "auto_pad": "SAME"}),
        ("auto_pad is 'SAME_UPPER' and dilations are [1, 2], expected pads instead of auto_pad", dY, X,
         {**good, "auto_pad": "SAME_UPPER", "dilations": [1, 2]}),
        ("X has 3 dimensions, expected 4 for kernel_shape [2, 2]", dY, X[0], good),
        ("dY has 3 dimensions, expected 4 for kernel_shape [2, 2]", dY[0], X, good),
        ("dY has shape [1, 1, 2, 2], expected [1, 1, 1, 2] for X of shape [1, 1, 2, 3]", dY, X[:, :, :2], good),
    ]  # fmt: skip
    for text, g, image, attributes in refused:
        check_refused(max_pool_grad, ValueError, text, g, image, **attributes)


expected = pools  # how far a right kernel may be from the definition


def node_cases() -> Iterator[NodeCase]:
    """Small calls for every runtime to run, where onnx.reference tells right Indices."""
    for dtype, pool in itertools.product(FLOATS, ("strides", "halves of a large image")):
        shape, attributes = POOLS[pool]

        def make(shape=shape, attributes=attributes, dtype=dtype):
            return numbers(windows(shape, **attributes), dtype), numbers(shape, dtype, 1)

        yield NodeCase(max_pool_grad, {"type": str(dtype), "pool": pool.replace(" ", "_")}, make, attributes)
