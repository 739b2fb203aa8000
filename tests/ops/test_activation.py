"""The gradients of activations against their definitions, PyTorch, and their error sentences."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checks import FLOATS, Expected, call, check, check_refused, examples, layouts, same_bits
from tests.expected import derivatives, exact
from tests.node_cases import NodeCase, elementwise_cases
from torch.nn import functional as nn

from onnxgrad.ops.activation import hard_swish_grad, leaky_relu_grad, relu_grad, sigmoid_grad, tanh_grad

ALL = [relu_grad, leaky_relu_grad, sigmoid_grad, tanh_grad, hard_swish_grad]
every_operator = pytest.mark.parametrize("op", ALL, ids=lambda op: op.function_name)


def arrays(shape, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape).astype(dtype), rng.uniform(-1, 1, shape).astype(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4, 5), (300, 200)], ids=str)
@every_operator
def test_shapes_and_types(op, shape, dtype):
    check(op, *arrays(shape, dtype))


@every_operator
@settings(max_examples=examples(20), deadline=None)
@given(data=st.data())
def test_any_numbers(op, data):
    shape = tuple(data.draw(st.lists(st.integers(0, 40), max_size=3)))
    scale = 10.0 ** data.draw(st.integers(-6, 4))
    dY, Y = arrays(shape, seed=data.draw(st.integers(0, 9)))
    check(op, dY, Y * np.float32(scale))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 2.0, -0.5])
def test_any_alpha(alpha, dtype):
    check(leaky_relu_grad, *arrays((40, 50), dtype), alpha=alpha)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)], ids=str)
@every_operator
def test_nothing(op, shape):
    nothing = np.zeros(shape, np.float32)
    assert call(op, nothing, nothing).shape == shape


@pytest.mark.parametrize("layout", layouts(np.zeros((2, 2), np.float32)))
@every_operator
def test_layouts(op, layout):
    dY, Y = arrays((6, 8))
    check(op, layouts(dY)[layout], Y)
    check(op, dY, layouts(Y)[layout])


def test_nothing_passes_a_closed_relu():
    """Not even what is no number: this is a choice, not a product."""
    dY = np.array([np.inf, -np.inf, np.nan, np.inf, 3.0, 4.0], np.float32)
    X = np.array([-1.0, 0.0, -0.0, 1e-30, np.nan, np.inf], np.float32)
    expected = np.array([0, 0, 0, np.inf, 0, 4], np.float32)
    assert same_bits(call(relu_grad, dY, X), expected)
    assert same_bits(relu_grad.definition(dY, X), expected)


@pytest.mark.parametrize("op", [sigmoid_grad, tanh_grad], ids=lambda op: op.function_name)
def test_nan_stays_nan_and_harms_no_other(op):
    dY, Y = arrays((50,))
    dY[7] = Y[30] = np.nan
    assert np.flatnonzero(np.isnan(call(op, dY, Y))).tolist() == [7, 30]


@pytest.mark.parametrize(
    ("op", "forward", "given_result"),
    [
        (relu_grad, torch.relu, True),
        (relu_grad, torch.relu, False),
        (leaky_relu_grad, lambda x: nn.leaky_relu(x, 0.01), True),
        (leaky_relu_grad, lambda x: nn.leaky_relu(x, 0.01), False),
        (sigmoid_grad, torch.sigmoid, True),
        (tanh_grad, torch.tanh, True),
        (hard_swish_grad, nn.hardswish, False),
    ],
)
def test_as_in_torch(op, forward, given_result):
    rng = np.random.default_rng(1)
    x = torch.tensor(np.append(rng.standard_normal(500) * 3, 0.0), requires_grad=True)
    g = torch.tensor(rng.standard_normal(501))
    y = forward(x)
    y.backward(g)
    found = call(op, g.numpy(), (y if given_result else x).detach().numpy())
    np.testing.assert_allclose(found, x.grad.numpy(), rtol=1e-12, atol=1e-15)


@every_operator
def test_refused(op):
    a, b = np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32)
    name = op.inputs[1].name
    check_refused(op, ValueError, f"dY has shape [2, 3], expected [2, 4] as {name} has", a, b)
    check_refused(op, ValueError, f"dY has shape [2, 3], expected [3] as {name} has", a, a[0])


def expected(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """Relu's gradient only chooses, the others multiply."""
    return (exact if op is relu_grad else derivatives)(op, args, kwargs)


def node_cases() -> Iterator[NodeCase]:
    """Small calls for every runtime to run."""
    return elementwise_cases(*ALL)
