"""AveragePoolGrad against its definition, PyTorch, and its own error sentences."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checks import FLOATS, call, check, check_refused, examples, layouts
from tests.expected import pools
from tests.functions.models import check_functions
from tests.node_cases import NodeCase
from tests.pool_cases import POOLS, numbers, windows
from torch.nn import functional

from onnxgrad.ops.average_pool import average_pool_grad


def arguments(case, dtype=np.float32, count_include_pad=0):
    """dY and shape, and the attributes."""
    shape, attributes = POOLS[case]
    given = {**attributes, "count_include_pad": count_include_pad}
    return (numbers(windows(shape, **attributes), dtype), np.array(shape)), given


@pytest.mark.parametrize("count_include_pad", [0, 1])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", POOLS)
def test_attributes_and_types(case, dtype, count_include_pad):
    arrays, attributes = arguments(case, dtype, count_include_pad)
    check(average_pool_grad, *arrays, **attributes)


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_any_pool(data):
    rank = data.draw(st.integers(1, 3))

    def some(low, high, count=rank):
        return data.draw(st.lists(st.integers(low, high), min_size=count, max_size=count))

    kernel, dilations = some(1, 4), some(1, 2)
    pads = [min(p, k - 1) for p, k in zip(some(0, 3, 2 * rank), kernel * 2, strict=True)]
    extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    shape = (*some(1, 3, 2), *(e + more for e, more in zip(extents, some(0, 9), strict=True)))
    attributes = {"kernel_shape": kernel, "strides": some(1, 3), "pads": pads, "dilations": dilations}
    attributes["ceil_mode"], attributes["count_include_pad"] = some(0, 1, 2)
    check(average_pool_grad, numbers(windows(shape, **attributes)), np.array(shape), **attributes)


@pytest.mark.parametrize("shape", [(0, 2, 4, 4), (2, 0, 4, 4), (2, 2, 0, 4)])
def test_nothing(shape):
    attributes = {"kernel_shape": [2, 2], "pads": [1] * 4}
    dY = np.ones(windows(shape, **attributes), np.float32)
    assert call(average_pool_grad, dY, np.array(shape), **attributes).shape == shape


@pytest.mark.parametrize("layout", layouts(np.zeros((2, 2), np.float32)))
def test_layouts(layout):
    (dY, shape), attributes = arguments("two axes")
    check(average_pool_grad, layouts(dY)[layout], shape, **attributes)


@pytest.mark.slow  # kernels for float64 are compiled
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize(("kernel", "stride", "pad"), [(2, 2, 0), (3, 2, 1), (3, 1, 1), (7, 7, 0)])
def test_as_in_torch(kernel, stride, pad, ceil, include):
    x = torch.tensor(numbers((2, 3, 11, 12), np.float64), requires_grad=True)
    y = functional.avg_pool2d(x, kernel, stride, pad, ceil, include)
    g = numbers(tuple(y.shape), np.float64, 2)
    y.backward(torch.tensor(g))
    how = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4, "ceil_mode": int(ceil)}
    found = call(average_pool_grad, g, np.array(x.shape), count_include_pad=int(include), **how)
    np.testing.assert_allclose(found, x.grad.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count_include_pad", [0, 1])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("case", POOLS)
def test_as_a_function(case, dtype, count_include_pad):
    check_functions(average_pool_grad, arguments(case, dtype, count_include_pad))


def test_different_pools_in_one_model():
    check_functions(average_pool_grad, *(arguments(case, np.float32, k % 2) for k, case in enumerate(list(POOLS)[:6])))


def test_nan_stays_in_its_window():
    (dY, shape), attributes = arguments("strides")
    dY[0, 1, 1, 0] = np.nan
    found = np.isnan(call(average_pool_grad, dY, shape, **attributes))
    assert found.sum() == 6 and found[0, 1, 2:4, 0:3].all()


def test_refused():
    dY = np.zeros((1, 1, 2, 2), np.float32)
    good = {"kernel_shape": [2, 2]}
    refused = [
        ("kernel_shape is missing", [1, 1, 3, 3], {}),
        ("dilations is [1], expected 2 numbers for kernel_shape [2, 2]", [1, 1, 3, 3], {**good, "dilations": [1]}),
        ("shape has 3 dimensions, expected 4 for kernel_shape [2, 2]", [1, 3, 3], good),
        ("dY has shape [1, 1, 2, 2], expected [1, 2, 2, 2] for shape [1, 2, 3, 3]", [1, 2, 3, 3], good),
        ("dY has shape [1, 1, 2, 2], expected [1, 1, 2, 3] for shape [1, 1, 3, 4]", [1, 1, 3, 4], good),
    ]
    for text, shape, attributes in refused:
        check_refused(average_pool_grad, ValueError, text, dY, shape, **attributes)


expected = pools  # how far a right kernel may be from the definition


def node_cases() -> Iterator[NodeCase]:
    """Small calls for every runtime to run."""
    pools = ("three axes and pads", "ceil_mode and pads", "dilations")
    for dtype, pool, count in itertools.product(FLOATS, pools, (0, 1)):
        shape, attributes = POOLS[pool]

        def make(shape=shape, attributes=attributes, dtype=dtype):
            return numbers(windows(shape, **attributes), dtype), np.array(shape)

        parameters = {"type": str(dtype), "pool": pool.replace(" ", "_"), "counted": "with_pads" if count else ""}
        yield NodeCase(average_pool_grad, parameters, make, {**attributes, "count_include_pad": count})
