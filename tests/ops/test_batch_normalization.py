"""BatchNormalizationGrad and BatchNormInternal against their definitions, their functions and PyTorch."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checks import (
    BFLOAT16,
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
    result_dtypes,
    with_storage,
)
from tests.functions.models import FLOATS as IN_ONNXRUNTIME
from tests.functions.models import check_functions
from tests.node_cases import NodeCase, only, without

from onnxgrad.ops.batch_normalization import batch_norm_internal, batch_normalization_grad

OP, FORWARD = batch_normalization_grad, batch_norm_internal
# Channels side by side and apart, few and many, cut into slices or taken together.
SHAPES = [(5,), (7, 1), (3, 4), (300, 3), (40, 300), (2, 3, 2), (5, 300, 3), (2, 3, 8), (2, 3, 4, 5), (1, 2, 70, 3),
          (9, 2, 50, 40), (300, 2, 9), (4, 40, 13), (3000, 6)]  # fmt: skip


def arrays(shape, dtype=np.float32, parameter=None, statistic=None, seed=0, offset=1.0):
    """The inputs as a session would have them; without statistics unless their type is given."""
    rng = np.random.default_rng(seed)
    channels, over = (*shape, 1)[1], tuple(k for k in range(len(shape)) if k != 1)
    dY, X = rng.standard_normal(shape).astype(dtype), (rng.standard_normal(shape) + offset).astype(dtype)
    scale = rng.standard_normal(channels).astype(parameter or dtype)
    if statistic is None:
        return dY, X, scale
    x = X.astype(np.float64)
    count = max(1, x.size // max(1, channels))
    mean = x.sum(over, keepdims=True) / count
    inv = 1 / np.sqrt(((x - mean) ** 2).sum(over) / count + 0.01)
    return dY, X, scale, *(a.reshape(channels).astype(statistic) for a in (mean, inv))


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_and_types(shape, dtype, measured):
    check(OP, *arrays(shape, dtype, statistic=None if measured else dtype))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "parameter", "statistic"),
    [
        (np.float16, np.float32, np.float32),
        (np.float16, np.float16, np.float32),
        (BFLOAT16, np.float32, None),
        (np.float32, np.float64, np.float16),
        (np.float64, np.float32, BFLOAT16),
    ],
)
def test_types_of_parameters_and_statistics(dtype, parameter, statistic):
    check(OP, *arrays((3, 4, 10), dtype, parameter, statistic))


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_any_shape(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4)))
    statistic = data.draw(st.sampled_from([None, np.float32]))
    wanted = data.draw(st.lists(st.sampled_from(OP.output_names), min_size=1, unique=True))
    check(OP, *arrays(shape, statistic=statistic), outputs=wanted, epsilon=0.1)


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 2), (2, 0, 3), (2, 3, 0), (0,), (0, 0)])
def test_nothing(shape, measured):
    channels = (*shape, 1)[1]
    sums = np.ones(channels, np.float32)
    X_grad, *found = call(OP, *[np.zeros(shape, np.float32)] * 2, *[sums] * (1 if measured else 3))
    assert X_grad.shape == shape
    assert all(np.array_equal(s, np.zeros(channels)) for s in found)


@pytest.mark.parametrize("layout", layouts(np.zeros((2, 2), np.float32)))
def test_layouts(layout):
    inputs = arrays((6, 8), statistic=np.float32)
    for k, array in enumerate(inputs):
        check(OP, *inputs[:k], layouts(array)[layout], *inputs[k + 1 :])


@pytest.mark.parametrize("epsilon", [1e-5, 0.1])
@pytest.mark.parametrize("shape", [(6, 4), (3, 4, 5, 6)])
def test_as_in_torch(shape, epsilon):
    rng = np.random.default_rng(1)
    x, scale, bias = (torch.tensor(rng.standard_normal(s), requires_grad=True) for s in (shape, (4,), (4,)))
    g = torch.tensor(rng.standard_normal(shape))
    y = torch.nn.functional.batch_norm(x, None, None, scale, bias, training=True, eps=epsilon)
    wanted = torch.autograd.grad(y, (x, scale, bias), g)
    found = call(OP, g.numpy(), x.detach().numpy(), scale.detach().numpy(), epsilon=epsilon)
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(4, 6, 28, 28), (16, 6, 7, 7), (512, 6)])
def test_no_further_off_than_torch(shape):
    """The CPU's kernel: torch has statistics from the forward pass, and sums of float32 within an image."""
    dY, X, scale, mean, inv_std = arrays(shape, statistic=np.float32)
    exact = OP.definition(*(a.astype(np.float64) for a in (dY, X, scale)), epsilon=0.01)
    given, statistics = (list(map(torch.from_numpy, some)) for some in ((dY, X, scale), (mean, inv_std)))
    backward = torch.ops.aten.native_batch_norm_backward
    theirs = backward(*given, None, None, *statistics, True, 0.01, [True, True, True])
    for mine, other, wanted in zip(OP(dY, X, scale, epsilon=0.01), theirs, exact, strict=True):
        assert np.abs(mine - wanted).max() <= 1.5 * np.abs(other.numpy() - wanted).max()


@pytest.mark.parametrize("shape", [(4, 3, 20), (40, 3)])
def test_a_mean_far_from_zero_costs_no_digits(shape):
    """The mean of the squares less the square of the mean would lose all of them."""
    dY, X, scale = arrays(shape, np.float32)
    far = (X + np.float32(4096)).astype(np.float32)  # rounds, so what it stands for is taken back
    near = (far.astype(np.float64) - 4096).astype(np.float32)
    for mine, wanted in zip(call(OP, dY, far, scale), call(OP, dY, near, scale), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("shape", [(4, 5, 20), (40, 5)])
def test_a_channel_with_nan_is_nan_and_others_are_not(shape):
    dY, X, scale = arrays(shape)
    X[1, 2] = np.nan
    X_grad, scale_grad, bias_grad = call(OP, dY, X, scale)
    assert np.isnan(X_grad[:, 2]).all() and not np.isnan(np.delete(X_grad, 2, 1)).any()
    assert np.flatnonzero(np.isnan(scale_grad)).tolist() == [2] and not np.isnan(bias_grad).any()


@pytest.mark.slow
def test_a_constant_channel():
    """Its variance is 0 and never less."""
    dY, X, scale = arrays((4, 3, 20))
    X[:, 1] = 0.1
    X_grad, scale_grad, _ = check(OP, dY, X, scale, epsilon=1e-12)
    assert np.isfinite(X_grad).all() and np.isfinite(scale_grad).all()


@pytest.mark.slow  # kernels for half types are compiled
def test_half_numbers_are_summed_in_float32():
    """2048 + 1 + 1 is lost where every addition rounds."""
    dY, ones = np.array([[2048], [1], [1]], np.float16), np.ones(1, np.float16)
    _, *sums = call(OP, dY, np.ones((3, 1), np.float16), ones, np.zeros(1, np.float16), ones)
    assert [s.tolist() for s in sums] == [[2050]] * 2


def test_refused():
    dY, X, scale, mean, inv_std = arrays((2, 3, 4), statistic=np.float32)
    check_refused(OP, ValueError, "dY has shape [2, 12], expected [2, 3, 4], as X has", dY.reshape(2, 12), X, scale)
    for k, name in ((2, "scale"), (3, "mean"), (4, "inv_std")):
        given = [dY, X, scale, mean, inv_std]
        given[k] = np.ones(2, np.float32)
        check_refused(OP, ValueError, f"{name} has shape [2], expected [3], one number for each channel of X", *given)
    check_refused(OP, ValueError, "mean is given and inv_std is not, expected both or neither", dY, X, scale, mean)
    check_refused(OP, ValueError, "inv_std is given and mean is not, expected both or neither",
                  dY, X, scale, None, inv_std)  # fmt: skip
    check_refused(OP, ValueError, "epsilon is -1.0, expected a number that is not negative",
                  dY, X, scale, epsilon=-1.0)  # fmt: skip
    number = np.float32(1)
    check_refused(OP, ValueError, "X is a scalar, expected at least one dimension", number, number, number)


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("dtype", IN_ONNXRUNTIME)
@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4), (2, 3, 4, 2), (0, 3, 2)])
def test_function(shape, dtype, measured):
    check_functions(OP, (arrays(shape, dtype, statistic=None if measured else dtype), {}))


@pytest.mark.parametrize(("parameter", "statistic"), [(np.float32, np.float32), (np.float16, np.float32)])
@pytest.mark.parametrize("dtype", IN_ONNXRUNTIME)
def test_function_with_parameters_of_another_type(dtype, parameter, statistic):
    check_functions(OP, (arrays((2, 3, 4), dtype, parameter, statistic), {}))


def test_functions_of_different_ways_in_one_model():
    ways = (arrays((2, 3, 4)), {"epsilon": 0.1}), (arrays((4, 3)), {}), (arrays((2, 3, 4), statistic=np.float32), {})
    check_functions(OP, *ways)


def forward_arrays(shape, dtype=np.float32, parameter=None, statistic=None, seed=0):
    """X, scale, B and the running statistics."""
    rng = np.random.default_rng(seed)
    channels = (*shape, 1)[1]
    X = (rng.standard_normal(shape) + 1).astype(dtype)
    scale, B = (rng.standard_normal(channels).astype(parameter or dtype) for _ in range(2))
    mean, variance = rng.standard_normal(channels), rng.uniform(0.5, 2, channels)
    return X, scale, B, mean.astype(statistic or dtype), variance.astype(statistic or dtype)


@pytest.mark.parametrize("training_mode", [1, 0])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_of_shapes_and_types(shape, dtype, training_mode):
    check(FORWARD, *forward_arrays(shape, dtype), training_mode=training_mode, momentum=0.75, epsilon=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "parameter", "statistic"),
    [(np.float16, np.float32, np.float32), (BFLOAT16, BFLOAT16, np.float32), (np.float32, np.float64, np.float16)],
)
def test_forward_with_parameters_of_another_type(dtype, parameter, statistic):
    check(FORWARD, *forward_arrays((3, 4, 10), dtype, parameter, statistic))


@settings(max_examples=examples(20), deadline=None)
@given(data=st.data())
def test_forward_of_any_shape(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4)))
    wanted = data.draw(st.lists(st.sampled_from(FORWARD.output_names), min_size=1, unique=True))
    check(FORWARD, *forward_arrays(shape), outputs=wanted, training_mode=data.draw(st.integers(0, 1)))


@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 2), (2, 0, 3), (2, 3, 0), (0,)])
def test_forward_of_nothing(shape):
    Y, *statistics = call(FORWARD, *forward_arrays(shape))
    assert Y.shape == shape and all(s.shape == (*shape, 1)[1:2] for s in statistics)


@pytest.mark.slow  # kernels for float64 are compiled
@pytest.mark.parametrize("shape", [(6, 4), (3, 4, 5, 6)])
def test_forward_as_in_torch(shape):
    arrays = forward_arrays(shape, np.float64)
    X, scale, B, mean, variance = map(torch.tensor, arrays)
    wanted = torch.nn.functional.batch_norm(X, mean, variance, scale, B, training=True, momentum=0.25, eps=0.01)
    Y, running_mean, running_var, saved_mean, inv_std = call(FORWARD, *arrays, momentum=0.75, epsilon=0.01)
    np.testing.assert_allclose(Y, wanted.numpy(), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(running_mean, mean.numpy(), rtol=1e-10, atol=1e-12)
    # PyTorch's running variance is that of a sample.
    count = X.numel() / 4
    measured = ((running_var - 0.75 * arrays[4]) / 0.25) * count / (count - 1)
    np.testing.assert_allclose(0.75 * arrays[4] + 0.25 * measured, variance.numpy(), rtol=1e-10)
    dY = np.random.default_rng(1).standard_normal(shape)
    given, measured = ((dY, arrays[0], arrays[1], *some) for some in ((saved_mean, inv_std), ()))
    for one, other in zip(call(OP, *given), call(OP, *measured, epsilon=0.01), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def test_forward_of_a_mean_far_from_zero_costs_no_digits():
    X, *others = forward_arrays((4, 3, 20))
    far = (X + np.float32(4096)).astype(np.float32)  # rounds, so what it stands for is taken back
    near = (far.astype(np.float64) - 4096).astype(np.float32)
    np.testing.assert_allclose(call(FORWARD, far, *others)[0], call(FORWARD, near, *others)[0], rtol=1e-3, atol=1e-3)


def test_forward_refused():
    X, scale, B, mean, variance = forward_arrays((2, 3, 4))
    sentence = "input_var has shape [2], expected [3], one number for each channel of X"
    check_refused(FORWARD, ValueError, sentence, X, scale, B, mean, variance[:2])
    number = np.float32(1)
    check_refused(FORWARD, ValueError, "X is a scalar, expected at least one dimension", *[number] * 5)


@pytest.mark.parametrize("training_mode", [1, 0])
@pytest.mark.parametrize("dtype", IN_ONNXRUNTIME)
@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4), (2, 3, 4, 2), (0, 3, 2)])
def test_forward_function(shape, dtype, training_mode):
    check_functions(FORWARD, (forward_arrays(shape, dtype), {"training_mode": training_mode}))


def _expected_forward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """Sums over channels, and a few roundings of what is made of them."""
    dtypes = result_dtypes(op, args, kwargs)
    precision = PRECISION[dtypes[0]]
    x, scale, _, running, _ = wide = [in_float64(np.asarray(a)) for a in args]
    found, few = op.definition(*wide, **kwargs), VALUE_ROUNDINGS * precision.unit
    over, along = tuple(k for k in range(x.ndim) if k != 1), (-1, *(1,) * (x.ndim - 2))
    count = max(1, x.size // max(1, scale.size))
    rest = {**kwargs, "outputs": None}
    _, new_mean, new_var, mean, inv = op.definition(*wide, **rest)
    mean_off = var_off = np.zeros_like(mean)
    if kwargs.get("training_mode", 1):
        # A kernel may measure from any mean of some of the numbers: at most this far from that of all.
        centred = x - mean.reshape(along)
        reach = np.max(np.abs(centred), over, initial=0).ravel()
        spread = np.abs(centred) + reach.reshape(along)

        def off(terms: np.ndarray) -> np.ndarray:
            absolute = np.sum(terms, over).ravel()
            return bound_of_sum(precision, np.full_like(absolute, count), absolute) + few * absolute

        mean_off = (off(spread) + few * np.sum(np.abs(x), over).ravel()) / count
        var_off = (off(spread**2) + 2 * reach * off(spread)) / count
    inv_off = inv * (inv**2 * var_off / 2 + few)
    centred = np.abs(x - mean.reshape(along))
    factor = np.abs(scale) * inv
    bounds = (
        few * (centred * factor.reshape(along) + np.abs(in_float64(np.asarray(args[2]))).reshape(along))
        + (mean_off * factor).reshape(along) + centred * (np.abs(scale) * inv_off).reshape(along),
        mean_off + few * (np.abs(new_mean) + np.abs(running)), var_off + few * np.abs(new_var),
        mean_off + few * np.abs(mean), inv_off,
    )  # fmt: skip
    rounded = []
    for e, b, dtype in zip(found, bounds, dtypes, strict=True):
        stored = PRECISION[dtype]
        rounded.append(None if e is None else with_storage(stored, e, b + stored.unit * np.abs(e)))
    return found, tuple(rounded)


def expected(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """Sums over channels, of products of a few rounded factors."""
    if op is FORWARD:
        return _expected_forward(op, args, kwargs)
    dtypes = result_dtypes(op, args, kwargs)
    precision = PRECISION[dtypes[0]]
    g, x, scale, *statistics = wide = [None if a is None else in_float64(np.asarray(a)) for a in args]
    found, few = op.definition(*wide, **kwargs), VALUE_ROUNDINGS * precision.unit
    over, along = tuple(k for k in range(x.ndim) if k != 1), (-1, *(1,) * (x.ndim - 2))
    count = max(1, x.size // max(1, scale.size))

    def total(terms: np.ndarray) -> np.ndarray:
        return np.sum(terms, over).reshape(along)

    def off(terms: np.ndarray) -> np.ndarray:
        absolute = total(terms)
        return bound_of_sum(precision, np.full_like(absolute, count), absolute) + few * absolute

    g, scale = np.abs(g), np.abs(scale).reshape(along)
    mean_off = reach = inv_off = np.zeros_like(scale)
    if not any(s is not None for s in statistics):
        # A kernel may measure from any mean of some of the numbers: at most this far from that of all.
        centred = x - total(x) / count
        variance = total(centred**2) / count
        reach = np.max(np.abs(centred), over, initial=0).reshape(along)
        spread = np.abs(centred) + reach
        mean_off = (off(spread) + few * np.abs(total(x))) / count
        inv = 1 / np.sqrt(variance + kwargs.get("epsilon", 1e-5))
        inv_off = inv**2 * (off(spread**2) + 2 * reach * off(spread)) / count / 2 + few
    else:
        mean, inv = (s.reshape(along) for s in statistics)
        spread = np.abs(x - mean)
        centred, inv = x - mean, np.abs(inv)
    xhat = np.abs(centred) * inv
    xhat_off = mean_off * inv + xhat * (inv_off + few)
    level, dot = total(g), total(g * xhat)
    dot_off = off(g * spread) * inv + total(g * xhat_off)
    values = g + level / count + xhat * dot / count
    x_off = scale * inv * ((few + inv_off) * values + (off(g) + xhat_off * dot + xhat * dot_off) / count)
    bounds = x_off, *(np.broadcast_to(b, scale.shape).ravel() for b in (dot_off, off(g)))
    rounded = []
    for e, b, dtype in zip(found, bounds, dtypes, strict=True):
        stored = PRECISION[dtype]
        rounded.append(None if e is None else with_storage(stored, e, b + stored.unit * np.abs(e)))
    return found, tuple(rounded)


def node_cases() -> Iterator[NodeCase]:
    """Small calls for every runtime to run."""
    for dtype, shape, measured in itertools.product(FLOATS, [(4, 3, 20), (6, 5)], (True, False)):

        def make(dtype=dtype, shape=shape, measured=measured):
            return arrays(shape, dtype, statistic=None if measured else dtype)

        absent = ["mean", "inv_std"] if measured else []
        parameters = {"type": str(dtype), "rank": f"rank_{len(shape)}", "statistics": without(absent)}
        yield NodeCase(OP, parameters, make, {"epsilon": 2.0**-7})  # which float32 holds, as attributes are
        if dtype == np.float32 and len(shape) == 3:
            for output in OP.output_names:
                yield NodeCase(OP, {**parameters, "outputs": only([output])}, make, outputs=[output])
    for measured in (True, False):

        def mixed(measured=measured):
            return arrays((4, 3, 20), np.float16, np.float32, None if measured else np.float32)

        absent = without(["mean", "inv_std"] if measured else [])
        yield NodeCase(OP, {"type": "float16", "parameters": "float32_parameters", "statistics": absent}, mixed)
    for dtype, shape, training_mode in itertools.product(FLOATS, [(4, 3, 20), (6, 5)], (1, 0)):

        def forward(dtype=dtype, shape=shape):
            return forward_arrays(shape, dtype)

        parameters = {
            "type": str(dtype),
            "rank": f"rank_{len(shape)}",
            "mode": ("inference", "training")[training_mode],
        }
        yield NodeCase(
            FORWARD, parameters, forward, {"epsilon": 2.0**-7, "momentum": 0.75, "training_mode": training_mode}
        )
