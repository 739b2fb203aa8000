"""SoftmaxGrad_13 and LogSoftmaxGrad_13 against their definitions, PyTorch, and their own error sentences."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checks import (
    FLOATS,
    PRECISION,
    VALUE_ROUNDINGS,
    Expected,
    bound_of_sum,
    call,
    check,
    check_refused,
    examples,
    in_float64,
    layouts,
    result_dtype,
    with_storage,
)
from tests.node_cases import NodeCase, axis_name

from onnxgrad.ops.softmax import log_softmax_grad_13, softmax_grad_13

BOTH = [softmax_grad_13, log_softmax_grad_13]
SHAPES = [((5,), 0), ((3, 4), -1), ((3, 4), 0), ((2, 3, 70), 1), ((2, 5000), 1), ((2, 33, 3, 2), -3), ((300, 2), 0),
          ((2, 7, 300), 1), ((40, 513), 1)]  # fmt: skip


def arrays(op, shape, axis, dtype=np.float32, seed=0):
    """dY and Y, as a session would have them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    y = np.exp(x) / np.exp(x).sum(axis, keepdims=True)
    return rng.standard_normal(shape).astype(dtype), (np.log(y) if op is log_softmax_grad_13 else y).astype(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("op", BOTH, ids=lambda op: op.function_name)
def test_shapes_and_types(op, shape, axis, dtype):
    check(op, *arrays(op, shape, axis, dtype), axis=axis)


@pytest.mark.parametrize("op", BOTH, ids=lambda op: op.function_name)
@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_any_shape(op, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    check(op, *arrays(op, shape, axis), axis=axis)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3)])
@pytest.mark.parametrize("op", BOTH, ids=lambda op: op.function_name)
def test_nothing(op, shape):
    nothing = np.zeros(shape, np.float32)
    assert call(op, nothing, nothing, axis=0).shape == shape


@pytest.mark.parametrize("layout", layouts(np.zeros((2, 2), np.float32)))
@pytest.mark.parametrize("op", BOTH, ids=lambda op: op.function_name)
def test_layouts(op, layout):
    dY, Y = arrays(op, (6, 8), -1)
    check(op, layouts(dY)[layout], Y)
    check(op, dY, layouts(Y)[layout])


@pytest.mark.parametrize(
    ("op", "forward"), [(BOTH[0], torch.softmax), (BOTH[1], torch.log_softmax)], ids=["softmax", "log_softmax"]
)
def test_as_in_torch(op, forward):
    x = torch.tensor(np.random.default_rng(1).standard_normal((3, 50, 4)), requires_grad=True)
    y = forward(x, 1)
    g = torch.tensor(np.random.default_rng(2).standard_normal((3, 50, 4)))
    y.backward(g)
    np.testing.assert_allclose(call(op, g.numpy(), y.detach().numpy(), axis=1), x.grad.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("op", BOTH, ids=lambda op: op.function_name)
def test_a_line_with_nan_is_nan_and_others_are_not(op):
    dY, Y = arrays(op, (4, 40), -1)
    dY[1, 3] = Y[2, 5] = np.nan
    found = np.isnan(call(op, dY, Y))
    assert found[1].all() and not found[0].any() and not found[3].any()
    assert found[2].all() if op is softmax_grad_13 else found[2, 5]


def test_classes_that_are_ruled_out():
    dY, Y = arrays(log_softmax_grad_13, (2, 20), -1)
    Y[:, ::2] = -np.inf
    np.testing.assert_allclose(
        call(log_softmax_grad_13, dY, Y), log_softmax_grad_13.definition(dY, Y), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("op", BOTH, ids=lambda op: op.function_name)
def test_refused(op):
    a, b = np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32)
    check_refused(op, ValueError, "dY has shape [2, 3], expected [2, 4] as Y has", a, b)
    check_refused(op, ValueError, "axis is 2, expected -2 to 1 for 2 dimensions", a, a, axis=2)
    check_refused(op, ValueError, "Y is a scalar, expected at least one dimension", np.float32(1), np.float32(1))


def expected(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """A sum along the axis, times a probability that may be an exponential, and a difference."""
    precision = PRECISION[result_dtype(op, args, kwargs)]
    g, y = (in_float64(np.asarray(a)) for a in args)
    expected = op.definition(g, y, **kwargs)
    axis, is_log = kwargs.get("axis", -1), op.name.startswith("Log")
    probability = np.exp(y) if is_log else np.abs(y)
    direct = np.abs(g) if is_log else np.abs(g * y)
    absolute = np.sum(direct, axis, keepdims=True)
    terms = np.full_like(absolute, y.shape[axis])
    bound = (bound_of_sum(precision, terms, absolute) + VALUE_ROUNDINGS * precision.unit * absolute) * probability
    return (expected,), (with_storage(precision, expected, bound + VALUE_ROUNDINGS * precision.unit * direct),)


def node_cases() -> Iterator[NodeCase]:
    """Small calls for every runtime to run."""
    for op, axis, dtype in itertools.product((softmax_grad_13, log_softmax_grad_13), (0, -1), FLOATS):

        def make(op=op, axis=axis, dtype=dtype):
            rng = np.random.default_rng(0)
            x = rng.standard_normal((4, 20))
            log = x - np.log(np.exp(x).sum(axis, keepdims=True))
            y = log if op is log_softmax_grad_13 else np.exp(log)
            return rng.standard_normal(x.shape).astype(dtype), y.astype(dtype)

        yield NodeCase(op, {"type": str(dtype), "axis": axis_name(axis)}, make, {"axis": axis})
