"""The gradients of the Gelu family against their definitions, PyTorch, exact derivatives, and their error sentences."""

from collections.abc import Iterator

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checks import DEVICE, FLOATS, call, check, check_refused, examples, layouts
from tests.expected import derivatives
from tests.node_cases import NodeCase, elementwise_cases
from torch.nn import functional as nn

from onnxgrad.ops.gelu import bias_fast_gelu_grad_dx, bias_gelu_grad_dx, fast_gelu_grad, gelu_grad, quick_gelu_grad

PLAIN = [gelu_grad, fast_gelu_grad, quick_gelu_grad]
BIASED = [bias_gelu_grad_dx, bias_fast_gelu_grad_dx]
every_operator = pytest.mark.parametrize("op", [*PLAIN, *BIASED], ids=lambda op: op.function_name)
FORWARD = {
    gelu_grad: nn.gelu,
    fast_gelu_grad: lambda x: nn.gelu(x, approximate="tanh"),
    quick_gelu_grad: lambda x: x * torch.sigmoid(1.702 * x),
}


def arrays(op, shape, dtype=np.float32, seed=0, scale=2.0):
    """What the operator takes; B, if it does, has the size of the last dimension."""
    rng = np.random.default_rng(seed)
    shapes = [shape, shape, shape[-1:]][: len(op.inputs)]
    return [(rng.standard_normal(s) * scale).astype(dtype) for s in shapes]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 4, 5), (300, 200), (2, 20000), (9000, 3)], ids=str)
@every_operator
def test_shapes_and_types(op, shape, dtype):
    check(op, *arrays(op, shape, dtype))


@every_operator
@settings(max_examples=examples(20), deadline=None)
@given(data=st.data())
def test_any_numbers(op, data):
    shape = tuple(data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=3)))
    scale = 10.0 ** data.draw(st.integers(-6, 6))
    check(op, *arrays(op, shape, seed=data.draw(st.integers(0, 9)), scale=scale))


@pytest.mark.parametrize("alpha", [0.0, 1.0, -1.5, 100.0])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_steepness(alpha, dtype):
    check(quick_gelu_grad, *arrays(quick_gelu_grad, (40, 50), dtype), alpha=alpha)


@pytest.mark.parametrize("op", PLAIN, ids=lambda op: op.function_name)
def test_a_scalar(op):
    check(op, np.float32(2), np.float32(-0.5))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)], ids=str)
@every_operator
def test_nothing(op, shape):
    assert call(op, *arrays(op, shape)).shape == shape


@pytest.mark.parametrize("layout", layouts(np.zeros((2, 2), np.float32)))
@every_operator
def test_layouts(op, layout):
    given = arrays(op, (6, 8))
    for k in range(2):
        check(op, *(layouts(a)[layout] if i == k else a for i, a in enumerate(given)))


def exact_derivative(op, x):
    """From the formula, with 50 digits."""
    with mpmath.workdps(50):
        x = mpmath.mpf(float(x))
        if op is gelu_grad:
            return mpmath.erfc(-x / mpmath.sqrt(2)) / 2 + x * mpmath.npdf(x)
        scale = 2 * mpmath.sqrt(2 / mpmath.pi)
        is_fast = op is fast_gelu_grad
        z = scale * (x + mpmath.mpf(0.044715) * x**3) if is_fast else mpmath.mpf(1.702) * x
        growth = scale * (x + 3 * mpmath.mpf(0.044715) * x**3) if is_fast else z
        s = 1 / (1 + mpmath.exp(-z))
        return s + growth * s * (1 - s)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("op", PLAIN, ids=lambda op: op.function_name)
def test_exact_to_a_few_roundings(op, dtype):
    """2 ulp of 1, wherever x is."""
    x = np.concatenate([np.linspace(-14, 14, 701), [-40, 40, 1e-30, -1e-30, 0, 1e30, -1e30]]).astype(dtype)
    exact = [exact_derivative(op, n) if abs(n) < 100 else mpmath.mpf(int(n > 0)) for n in x]
    for found in (call(op, np.ones_like(x), x), op.definition(np.ones_like(x), x)):
        apart = [abs(mpmath.mpf(float(a)) - b) for a, b in zip(found, exact, strict=True)]
        assert float(max(apart)) <= 2 * np.finfo(dtype).eps


@pytest.mark.skipif(DEVICE != "cpu", reason="of the CPU's kernel, which takes care of it")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("op", PLAIN, ids=lambda op: op.function_name)
def test_what_is_left_far_below_zero_is_right(op, dtype):
    """Relative to itself, where a sum of 1 and erf would be noise; the exponent's own rounding counts."""
    x = np.linspace(-7, -2, 200).astype(dtype)
    found = call(op, np.ones_like(x), x)
    for a, n in zip(found, x, strict=True):
        exact = exact_derivative(op, n)
        assert abs(float((mpmath.mpf(float(a)) - exact) / exact)) < 50 * np.finfo(dtype).eps


@every_operator
def test_nan_stays_nan_and_harms_no_other(op):
    given = arrays(op, (50,))
    given[0][7] = given[1][30] = np.nan
    assert np.flatnonzero(np.isnan(call(op, *given))).tolist() == [7, 30]


@pytest.mark.parametrize("op", PLAIN, ids=lambda op: op.function_name)
def test_infinite_numbers_as_in_torch(op):
    X = np.array([np.inf, -np.inf, 3e38, -3e38], np.float32)
    x = torch.tensor(X, requires_grad=True)
    FORWARD[op](x).sum().backward()
    np.testing.assert_array_equal(np.isnan(x.grad.numpy()[:2]), True)
    for found in (call(op, np.ones_like(X), X), op.definition(np.ones_like(X), X)):
        np.testing.assert_array_equal(found, [np.nan, np.nan, 1, 0])


@pytest.mark.parametrize("op", PLAIN, ids=lambda op: op.function_name)
def test_as_in_torch(op):
    rng = np.random.default_rng(1)
    x = torch.tensor(rng.standard_normal((30, 40)) * 3, requires_grad=True)
    g, b = torch.tensor(rng.standard_normal((30, 40))), torch.tensor(rng.standard_normal(40))
    FORWARD[op](x).backward(g)
    np.testing.assert_allclose(call(op, g.numpy(), x.detach().numpy()), x.grad.numpy(), rtol=1e-11, atol=1e-14)
    if op is quick_gelu_grad:
        return
    biased = BIASED[PLAIN.index(op)]
    x.grad = None
    FORWARD[op](x + b).backward(g)
    found = call(biased, g.numpy(), x.detach().numpy(), b.numpy())
    np.testing.assert_allclose(found, x.grad.numpy(), rtol=1e-11, atol=1e-14)


@every_operator
def test_refused(op):
    a, b = np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32)
    bias = [np.zeros(4, np.float32)][: len(op.inputs) - 2]
    check_refused(op, ValueError, "dY has shape [2, 3], expected [2, 4] as X has", a, b, *bias)


@pytest.mark.parametrize("op", BIASED, ids=lambda op: op.function_name)
def test_refused_bias(op):
    a, one = np.zeros((2, 3), np.float32), np.float32(1)
    check_refused(op, ValueError, "B has 2 numbers, expected 3 as the last dimension of X has", a, a, a[:, 0])
    check_refused(op, ValueError, "B has shape [2, 3], expected one dimension", a, a, a)
    check_refused(op, ValueError, "X is a scalar, expected at least one dimension", one, one, a[0])


expected = derivatives  # how far a right kernel may be from the definition


def node_cases() -> Iterator[NodeCase]:
    """Small calls for every runtime to run."""
    return elementwise_cases(gelu_grad, fast_gelu_grad, quick_gelu_grad, bias_gelu_grad_dx, bias_fast_gelu_grad_dx)
