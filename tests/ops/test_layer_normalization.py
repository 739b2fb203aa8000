"""LayerNormalizationGrad and SimplifiedLayerNormalizationGrad against their definitions, functions and PyTorch."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
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
    as_tuple,
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
from tests.functions.models import FLOATS as IN_ONNXRUNTIME
from tests.functions.models import check_functions
from tests.node_cases import NodeCase, axis_name, only
from torch.nn import functional

from onnxgrad.ops.layer_normalization import layer_normalization_grad, simplified_layer_normalization_grad

BOTH = [layer_normalization_grad, simplified_layer_normalization_grad]
STATISTICS = [np.dtype(t) for t in (np.float32, np.float64, ml_dtypes.bfloat16)]
SHAPES = [((5,), 0), ((3, 4), -1), ((3, 4), 0), ((2, 3, 70), 1), ((2, 5000), 1), ((2, 33, 3, 2), -3), ((300, 2), 1),
          ((700, 100), 1), ((7, 1), -1), ((2, 1, 513), -1)]  # fmt: skip


def arrays(op, shape, axis, dtype=np.float32, statistic=np.float32, seed=0):
    """The inputs as a session would have them, statistics exact in float32, whatever type they have."""
    rng = np.random.default_rng(seed)
    over = tuple(range(axis % len(shape), len(shape)))
    Y_grad, X = rng.standard_normal(shape).astype(dtype), (rng.standard_normal(shape) + 1).astype(dtype)
    scale = rng.standard_normal(shape[axis % len(shape) :]).astype(dtype)
    x, centred = X.astype(np.float64), op is layer_normalization_grad
    mean = x.mean(over, keepdims=True)
    inv = 1 / np.sqrt(np.mean((x - mean * centred) ** 2, over, keepdims=True) + 0.01)
    statistics = [a.astype(np.float32).astype(statistic) for a in (mean, inv)[1 - centred :]]
    return Y_grad, X, scale, *statistics


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("op", BOTH, ids=lambda op: op.function_name)
def test_shapes_and_types(op, shape, axis, dtype):
    check(op, *arrays(op, shape, axis, dtype), axis=axis)


@pytest.mark.parametrize("statistic", STATISTICS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", BOTH, ids=lambda op: op.function_name)
def test_types_of_statistics(op, dtype, statistic):
    check(op, *arrays(op, (6, 40), -1, dtype, statistic))


@pytest.mark.parametrize("op", BOTH, ids=lambda op: op.function_name)
@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_any_shape(op, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    wanted = data.draw(st.lists(st.sampled_from(op.output_names), min_size=1, unique=True))
    check(op, *arrays(op, shape, axis), axis=axis, outputs=wanted)


@pytest.mark.parametrize("rows", [3000, 1])
@pytest.mark.parametrize("op", BOTH, ids=lambda op: op.function_name)
def test_many_blocks(op, rows):
    check(op, *arrays(op, (rows, 300), -1))


@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 3), (0,), (3, 0), (2, 3, 0)])
@pytest.mark.parametrize("op", BOTH, ids=lambda op: op.function_name)
def test_nothing(op, shape):
    inputs = np.zeros(shape, np.float32), np.zeros(shape, np.float32), np.ones(shape[-1:], np.float32)
    statistics = [np.ones((*shape[:-1], 1), np.float32)] * (len(op.inputs) - 3)
    X_grad, *sums = call(op, *inputs, *statistics)
    assert X_grad.shape == shape
    assert all(np.array_equal(s, np.zeros(shape[-1:])) for s in sums)


@pytest.mark.parametrize("layout", layouts(np.zeros((2, 2), np.float32)))
@pytest.mark.parametrize("op", BOTH, ids=lambda op: op.function_name)
def test_layouts(op, layout):
    inputs = arrays(op, (6, 8), -1)
    for k, array in enumerate(inputs):
        check(op, *inputs[:k], layouts(array)[layout], *inputs[k + 1 :])


@pytest.mark.parametrize("op", BOTH, ids=lambda op: op.function_name)
def test_as_in_torch(op):
    rng = np.random.default_rng(1)
    x, scale, bias = (torch.tensor(rng.standard_normal(s), requires_grad=True) for s in ((3, 5, 4), (5, 4), (5, 4)))
    g = torch.tensor(rng.standard_normal((3, 5, 4)))
    if op is layer_normalization_grad:
        wanted = torch.autograd.grad(functional.layer_norm(x, (5, 4), scale, bias, 0.1), (x, scale, bias), g)
    else:
        wanted = torch.autograd.grad(functional.rms_norm(x, (5, 4), scale, 0.1), (x, scale), g)
    plain = x.detach().numpy()
    mean = plain.mean((1, 2), keepdims=True)
    centred = plain - mean if op is layer_normalization_grad else plain
    inv = 1 / np.sqrt((centred**2).mean((1, 2), keepdims=True) + 0.1)
    statistics = (mean, inv) if op is layer_normalization_grad else (inv,)
    found = call(op, g.numpy(), plain, scale.detach().numpy(), *statistics, axis=1)
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("op", BOTH, ids=lambda op: op.function_name)
def test_a_row_with_nan_is_nan_and_others_are_not(op):
    inputs = arrays(op, (4, 40), -1)
    inputs[0][1, 3] = np.nan
    X_grad, scale_grad, *_ = call(op, *inputs)
    found = np.isnan(X_grad)
    assert found[1].all() and not found[[0, 2, 3]].any()
    assert np.flatnonzero(np.isnan(scale_grad)).tolist() == [3]


@pytest.mark.slow  # kernels for half types are compiled
@pytest.mark.parametrize("op", BOTH, ids=lambda op: op.function_name)
def test_half_numbers_are_summed_in_float32(op):
    """2048 + 1 + 1 is lost where every addition rounds."""
    Y_grad = np.array([[2048], [1], [1]], np.float16)
    ones, zeros = np.ones((3, 1), np.float32), np.zeros((3, 1), np.float32)
    statistics = (zeros, ones) if op is layer_normalization_grad else (ones,)
    _, *sums = call(op, Y_grad, np.ones((3, 1), np.float16), np.ones(1, np.float16), *statistics)
    assert [s.tolist() for s in sums] == [[2050]] * len(sums)


@pytest.mark.parametrize("op", BOTH, ids=lambda op: op.function_name)
def test_refused(op):
    Y_grad, X, scale, *statistics = arrays(op, (2, 3, 4), 1)
    check_refused(op, ValueError, "Y_grad has shape [2, 12], expected [2, 3, 4], as X has",
                  Y_grad.reshape(2, 12), X, scale, *statistics, axis=1)  # fmt: skip
    check_refused(op, ValueError, "scale has shape [4], expected [3, 4], as X has from the axis on",
                  Y_grad, X, scale[0], *statistics, axis=1)  # fmt: skip
    check_refused(op, ValueError, "inv_std_var has shape [2], expected [2, 1, 1], one number for each row of X",
                  Y_grad, X, scale, *statistics[:-1], statistics[-1].ravel(), axis=1)  # fmt: skip
    check_refused(op, ValueError, "axis is 3, expected -3 to 2 for 3 dimensions",
                  Y_grad, X, scale, *statistics, axis=3)  # fmt: skip
    number = np.float32(1)
    check_refused(op, ValueError, "X is a scalar, expected at least one dimension",
                  number, number, number, *[number] * len(statistics))  # fmt: skip


def test_refused_mean():
    Y_grad, X, scale, mean, inv = arrays(layer_normalization_grad, (2, 3), 1)
    check_refused(layer_normalization_grad, ValueError,
                  "mean has shape [2], expected [2, 1], one number for each row of X",
                  Y_grad, X, scale, mean.ravel(), inv)  # fmt: skip


@pytest.mark.parametrize("dtype", IN_ONNXRUNTIME)
@pytest.mark.parametrize(("shape", "axis"), [((5,), 0), ((3, 4), -1), ((2, 3, 4), 1), ((2, 3, 4), -2), ((0, 3), 1)])
@pytest.mark.parametrize("op", BOTH, ids=lambda op: op.function_name)
def test_function(op, shape, axis, dtype):
    check_functions(op, (arrays(op, shape, axis, dtype), {"axis": axis}))


@pytest.mark.parametrize("statistic", [np.float32, np.float64])
@pytest.mark.parametrize("dtype", IN_ONNXRUNTIME)
@pytest.mark.parametrize("op", BOTH, ids=lambda op: op.function_name)
def test_function_with_statistics_of_another_type(op, dtype, statistic):
    check_functions(op, (arrays(op, (3, 4), -1, dtype, statistic), {}))


@pytest.mark.parametrize("op", BOTH, ids=lambda op: op.function_name)
def test_functions_of_different_axes_in_one_model(op):
    check_functions(op, *((arrays(op, (2, 3, 4), axis), {"axis": axis}) for axis in (-1, 1, 0)))


def expected(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """Sums of rows and of columns, of products of a few rounded factors."""
    precision = PRECISION[result_dtype(op, args, kwargs)]
    g, x, scale, *mean, inv = wide = [in_float64(np.asarray(a)) for a in args]
    expected, first = as_tuple(op.definition(*wide, **kwargs)), kwargs.get("axis", -1) % x.ndim
    over, rows, few = tuple(range(first, x.ndim)), tuple(range(first)), VALUE_ROUNDINGS * precision.unit
    xhat, scaled, count = np.abs((x - sum(mean)) * inv), np.abs(g * scale), max(1, scale.size)

    def off(terms: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        absolute, many = np.sum(terms, axes, keepdims=True), math.prod(terms.shape[a] for a in axes)
        return bound_of_sum(precision, np.full_like(absolute, many), absolute) + few * absolute

    values = scaled + (np.sum(scaled, over, keepdims=True) + xhat * np.sum(scaled * xhat, over, keepdims=True)) / count
    of_x = np.abs(inv) * ((off(scaled, over) + xhat * off(scaled * xhat, over)) / count + few * values)
    bounds = of_x, *(off(terms, rows).reshape(scale.shape) for terms in (np.abs(g) * xhat, np.abs(g)))
    pairs = zip(expected, bounds, strict=False)
    return expected, tuple(None if e is None else with_storage(precision, e, b) for e, b in pairs)


def node_cases() -> Iterator[NodeCase]:
    """Small calls for every runtime to run."""
    statistics = [np.dtype(np.float32), np.dtype(np.float64)]
    for dtype, statistic, axis, centred in itertools.product(FLOATS, statistics, (1, -1), (True, False)):

        def make(dtype=dtype, statistic=statistic, axis=axis, centred=centred):
            rng = np.random.default_rng(0)
            Y_grad, X = rng.standard_normal((2, 4, 3, 20))
            of_rows = [rng.uniform(0.5, 1.5, (*X.shape[:axis], *(1,) * len(X.shape[axis:]))) for _ in range(2)]
            arrays = [a.astype(dtype) for a in (Y_grad, X, rng.standard_normal(X.shape[axis:]))]
            return *arrays, *(a.astype(np.float32).astype(statistic) for a in of_rows[: 1 + centred])

        parameters = {"type": str(dtype), "axis": axis_name(axis), "statistics": f"{statistic}_statistics"}
        op = layer_normalization_grad if centred else simplified_layer_normalization_grad
        yield NodeCase(op, parameters, make, {"axis": axis})
        if dtype == statistic and axis == -1:
            for output in op.output_names:
                yield NodeCase(op, {**parameters, "outputs": only([output])}, make, outputs=[output])
