"""Reductions: axes as constants, inputs, empty or left out; ties and zeros as in PyTorch."""

import numpy as np
import pytest
import torch
from tests.gradients import check_rule, evaluate, model_of_node

import onnxgrad

RNG = np.random.default_rng(0)
NAMES = ["ReduceSum", "ReduceMean", "ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp",
         "ReduceMax", "ReduceMin", "ReduceProd"]  # fmt: skip
X = RNG.permutation(np.linspace(0.5, 2.0, 24)).reshape(2, 3, 4)  # no two are near enough to change places


def axes(*numbers):
    return np.array(numbers, np.int64)


@pytest.mark.parametrize("name", NAMES)
def test_fixed_axes(name):
    check_rule(name, X, axes(1, -1), fixed=[1], twice=name == "ReduceProd")
    check_rule(name, X, axes(-2), fixed=[1], keepdims=0)


@pytest.mark.parametrize("name", NAMES)
def test_all_axes(name):
    check_rule(name, X, keepdims=NAMES.index(name) % 2)


@pytest.mark.parametrize("name", NAMES)
def test_axes_as_input(name):
    check_rule(name, X, axes(0, -1), keepdims=NAMES.index(name) % 2, twice=False)


@pytest.mark.parametrize("name", NAMES)
def test_no_axes(name):
    twice = name in ("ReduceLogSum", "ReduceSumSquare")  # of others the second derivative is 0 but for rounding
    check_rule(name, X, noop_with_empty_axes=1, keepdims=0, twice=twice)
    check_rule(name, X, axes(), noop_with_empty_axes=1, fixed=[1], twice=False)


@pytest.mark.parametrize("keepdims", [0, 1])
def test_empty_axes_are_all(keepdims):
    check_rule("ReduceMean", X, axes(), keepdims=keepdims, fixed=[1])
    check_rule("ReduceL2", X, axes(), keepdims=keepdims, twice=False)


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("noop", [0, 1])
@pytest.mark.parametrize("numbers", [(), (1,), (0, -1)], ids=str)
@pytest.mark.parametrize("name", ["ReduceMean", "ReduceMax"])
def test_axes_of_unknown_number(name, numbers, noop, keepdims):
    model, feeds = model_of_node(
        name, [X, axes(*numbers)], attributes={"noop_with_empty_axes": noop, "keepdims": keepdims}, static=False
    )
    assert onnxgrad.check_gradient(model, feeds, "in_0").worst < 2e-6


def _against_torch(name, x, function, keepdims=0, twice=False):
    """The gradient along the last axis; if `twice`, that of its product with random numbers too."""
    model, feeds = model_of_node(name, [x, axes(-1)], attributes={"keepdims": keepdims}, fixed=[1])
    once = onnxgrad.gradient(model, "in_0")
    t = torch.tensor(x, requires_grad=True)
    result = function(t)
    seed, other = RNG.standard_normal(result.shape), RNG.standard_normal(x.shape)
    (expected,) = torch.autograd.grad(result, t, torch.tensor(seed), create_graph=True)
    got = evaluate(once, {**feeds, "out_0_grad": seed})[1]
    np.testing.assert_allclose(got, expected.detach(), rtol=1e-10, atol=1e-12)
    if twice:
        (expected,) = torch.autograd.grad(expected, t, torch.tensor(other))
        again = onnxgrad.gradient(once, "in_0", "in_0_grad")
        seeds = {"out_0_grad": seed, "in_0_grad_grad": other}
        got = evaluate(again, {**feeds, **seeds})[-1]
        np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-12)


TIED = np.array([[1.0, 3.0, 3.0, -2.0], [0.0, 0.0, 0.0, 0.0], [-1.0, -1.0, 5.0, 5.0]])


def test_ties_as_pytorch():
    _against_torch("ReduceMax", TIED, lambda x: x.amax(-1))
    _against_torch("ReduceMin", TIED, lambda x: x.amin(-1))


def test_zeros_as_pytorch():
    _against_torch("ReduceL1", TIED, lambda x: torch.linalg.vector_norm(x, 1, -1))
    _against_torch("ReduceL2", TIED, lambda x: torch.linalg.vector_norm(x, 2, -1))


@pytest.mark.parametrize("zeros", [0, 1, 2, 3])
def test_product_of_zeros_as_pytorch(zeros):
    x = RNG.uniform(0.5, 2.0, (3, 5)) * RNG.choice([-1, 1], (3, 5))
    x[1, :zeros] = 0
    _against_torch("ReduceProd", x, lambda x: x.prod(-1), twice=True)


def test_log_sum_exp_of_large_numbers_as_pytorch():
    x = np.array([[1e4, 1e4 + 1, -1e4], [-1e4, -1e4 - 2, -1e4], [-np.inf, 0.0, 1.0]])
    _against_torch("ReduceLogSumExp", x, lambda x: x.logsumexp(-1))


def test_mean_of_no_elements():
    model, _ = model_of_node("ReduceMean", [X], static=False)
    feeds = {"in_0": np.zeros((0, 3, 4)), "out_0_grad": np.ones((1, 1, 1))}
    assert evaluate(onnxgrad.gradient(model, "in_0"), feeds)[1].shape == (0, 3, 4)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("static", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("name", NAMES)
def test_an_axis_without_elements(name, static, dtype):
    """The gradient has none, also where the result is infinite."""
    inputs = [np.zeros((2, 0, 4)), axes(1)]
    model, feeds = model_of_node(name, inputs, dtype=dtype, static=static, fixed=[1])
    got = evaluate(onnxgrad.gradient(model, "in_0"), {**feeds, "out_0_grad": np.ones((2, 1, 4), dtype)})[1]
    assert (got.shape, got.dtype) == ((2, 0, 4), dtype)


def test_mean_of_more_than_float16_holds():
    x = np.zeros((300, 300))
    for static in (True, False):
        model, feeds = model_of_node("ReduceMean", [x], dtype=np.float16, static=static)
        got = evaluate(onnxgrad.gradient(model, "in_0"), {**feeds, "out_0_grad": np.ones((1, 1), np.float16)})[1]
        np.testing.assert_allclose(got, 1 / 90000, rtol=0.01)
