"""GatherElementsGrad against its definition, torch's scatter_add and its own error sentences."""

import itertools
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checks import (
    FLOATS,
    INDICES,
    PRECISION,
    assert_close,
    bound_of_sum,
    call,
    check,
    check_refused,
    examples,
    layouts,
    on_threads,
    poisoned,
    raises,
)
from tests.expected import sums
from tests.node_cases import NodeCase, axis_name

from onnxgrad import gather_elements_grad

F32 = np.dtype(np.float32)


def example(shape, indices_shape, axis=0, dtype=np.float32, index=np.int64, seed=0):
    """Random dY and indices, about half of them negative."""
    rng = np.random.default_rng(seed)
    size = shape[axis]
    indices = rng.integers(-size, size, indices_shape).astype(index) if size else np.zeros(indices_shape, index)
    return rng.standard_normal(indices_shape).astype(dtype), np.array(shape, np.int64), indices


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_every_type_and_axis(dtype, index, axis):
    indices_shape = [4, 6, 5]
    indices_shape[axis] += 7  # along the axis there may be more indices than elements
    check(gather_elements_grad, *example((5, 8, 7), indices_shape, axis, dtype, index), axis=axis)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("shape", "indices_shape", "axis"),
    [
        ((5000,), (9000,), 0),
        ((200, 300), (90, 300), 0),
        ((200, 300), (90, 299), 0),
        ((300, 200), (300, 90), 1),
        ((300, 200), (17, 1000), 1),
        ((9, 40, 130), (9, 70, 129), 1),
        ((3, 70000), (5, 70000), 0),
        ((2, 4, 3, 500, 2), (2, 3, 3, 600, 1), 3),
        ((1000, 2), (2, 1), 0),
    ],
    ids=str,
)
def test_larger_sizes(shape, indices_shape, axis, dtype):
    check(gather_elements_grad, *example(shape, indices_shape, axis, dtype), axis=axis)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_one_index_many_times(axis, dtype):
    dY, shape, indices = example((9, 9), (3000, 7) if axis == 0 else (7, 3000), axis, dtype)
    indices[:] = 4
    check(gather_elements_grad, dY, shape, indices, axis=axis)


@pytest.mark.slow
@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_minus_one_and_the_last_element_are_one(dtype, index):
    indices = np.array([[-1, 4, -1, 4, 4, -5, 0, -1]], index)
    dX = check(gather_elements_grad, np.ones((1, 8), dtype), [2, 5], indices, axis=1)
    assert dX[0].astype(float).tolist() == [2, 0, 0, 0, 6] and dX[1].astype(float).tolist() == [0] * 5


@pytest.mark.slow  # kernels for half types are compiled
def test_halves_round_once():
    """1 + 2048 halves of one ulp: adding in half precision would stay at 1, in float32 it is 2."""
    for dtype, ulp in ((FLOATS[0], 2.0**-10), (FLOATS[3], 2.0**-7)):
        terms = np.full((1 + int(2 / ulp), 5), ulp / 2, dtype)
        terms[0] = 1
        assert (call(gather_elements_grad, terms, [1, 5], np.zeros(terms.shape, np.int64)) == 2).all()
        assert (call(gather_elements_grad, terms.T, [5, 1], np.zeros(terms.T.shape, np.int64), axis=1) == 2).all()


@pytest.mark.parametrize("axis", [0, 1])
def test_nan_and_infinity_stay_where_they_belong(axis):
    dY, shape, indices = example((6, 6), (4, 4), axis)
    indices[:] = np.arange(4)
    dY[2, 2], dY[1, 3] = np.nan, np.inf
    dX = check(gather_elements_grad, dY, shape, indices, axis=axis)
    assert np.isnan(dX).sum() == 1 and np.isinf(dX).sum() == 1


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("shape", "indices_shape", "axis"),
    [
        ((5,), (0,), 0),
        ((5, 3), (0, 3), 0),
        ((5, 3), (5, 0), 0),
        ((5, 3), (0, 0), 1),
        ((0,), (0,), 0),
        ((0, 3), (0, 3), 0),
        ((0, 3), (0, 2), 1),
        ((5, 0), (4, 0), 0),
        ((5, 0), (4, 0), 1),
        ((3, 0, 2), (3, 0, 2), 1),
        ((1,), (1,), 0),
        ((2, 1, 2, 1, 3, 1, 2, 2, 1), (1, 1, 2, 1, 5, 1, 2, 1, 1), 4),
        ((2,) * 9, (1, 2) * 4 + (2,), -1),  # no two neighbours make one axis
    ],
    ids=str,
)
def test_empty_and_rank_nine(shape, indices_shape, axis, dtype):
    check(gather_elements_grad, *example(shape, indices_shape, axis, dtype), axis=axis)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("inner", [1, 17])
def test_more_than_65535_batches(inner, dtype):
    check(gather_elements_grad, *example((70_000, 3, inner), (70_000, 2, inner), 1, dtype), axis=1)


@pytest.mark.parametrize("rank", [33, 64])
def test_more_dimensions_than_numpy_iterates_over(rank):
    shape = [2] + [1] * (rank - 2) + [3]
    dY = np.arange(1.0, 5.0, dtype=F32).reshape([2] + [1] * (rank - 2) + [2])
    indices = np.array([2, -1, 0, 1]).reshape(dY.shape)
    dX = call(gather_elements_grad, dY, shape, indices, axis=-1)
    np.testing.assert_array_equal(dX, np.array([0, 0, 3, 3, 4, 0], F32).reshape(shape))
    # ufunc.at of NumPy 2 writes past its buffers above 32 dimensions: a process apart tells whether we survive.
    code = (
        f"import numpy as np, onnxgrad\ndY = np.ones({dY.shape}, np.float32)\n"
        f"print(onnxgrad.gather_elements_grad.definition(dY, {shape}, np.zeros({dY.shape}, int), axis=-1).sum())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "4.0\n"), run.stderr


LAYOUTS = list(layouts(np.zeros((2, 2), F32)))


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axis", [0, 2])
def test_layouts(layout, dtype, index, axis):
    dY, shape, indices = example((6, 9, 4), (6, 7, 4), axis, dtype, index)
    dY, indices = layouts(dY).get(layout, dY), layouts(indices)[layout]
    check(gather_elements_grad, dY, layouts(shape)[layout], indices, axis=axis)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_broadcast_views(dtype):
    indices = np.broadcast_to(np.array([[2], [-1]]), (2, 7))
    dY = np.broadcast_to(np.arange(7).astype(dtype), (2, 7))
    check(gather_elements_grad, dY, (4, 9), indices)
    check(gather_elements_grad, dY, (3, 4), indices, axis=1)


@pytest.mark.parametrize("shape", [[4, 3], (4, 3), np.array([4, 3], np.int32), np.array([4, 3], np.uint8)], ids=repr)
def test_shapes_and_indices_as_python(shape):
    check(gather_elements_grad, np.ones((2, 3), F32), shape, [[0, -1, 2], [3, 3, 3]])
    check(gather_elements_grad, np.ones((4, 1), F32), shape, ((0,), (1,), (2,), (0,)), np.int32(-1))
    check(gather_elements_grad, np.ones(3, F32), 4, range(3))


@pytest.mark.parametrize("huge", [2**31, 2**40])
def test_dimensions_beyond_int32(huge):
    dX = call(gather_elements_grad, np.zeros((2, 0), F32), [huge, 0], np.zeros((2, 0), np.int64))
    assert dX.shape == (huge, 0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_agrees_with_torch(axis, dtype):
    dY, dims, indices = example((7, 9, 8), (7, 9, 8), axis, dtype)
    expected = torch.zeros(7, 9, 8, dtype=torch.from_numpy(dY).dtype).scatter_add_(
        axis, torch.from_numpy(indices % dims[axis]), torch.from_numpy(dY)
    )
    absolute = gather_elements_grad.definition(np.abs(dY).astype(np.float64), dims, indices, axis)
    bound = 2 * bound_of_sum(PRECISION[dY.dtype], np.float64(9), absolute)
    assert_close(call(gather_elements_grad, dY, dims, indices, axis), expected.numpy(), bound)


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(st.data())
def test_any_shape(data):
    shape = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=5), "shape")
    axis = data.draw(st.integers(-len(shape), len(shape) - 1), "axis")
    indices_shape = [data.draw(st.integers(0, d)) for d in shape]
    indices_shape[axis] = data.draw(st.integers(0, 9)) if shape[axis] else 0
    dtype, index = data.draw(st.sampled_from(FLOATS)), data.draw(st.sampled_from(INDICES))
    seed = data.draw(st.integers(0, 99))
    check(gather_elements_grad, *example(shape, indices_shape, axis, dtype, index, seed), axis=axis)


ONES = np.ones((2, 3), F32)
WHERE = np.zeros((2, 3), np.int64)
TYPES = "float16, float32, float64 or bfloat16"


@pytest.mark.parametrize(
    ("error", "text", "args", "kwargs"),
    [
        (TypeError, "dY is missing", (), {}),
        (TypeError, "indices is missing", (ONES, [4, 3]), {}),
        (
            TypeError,
            "takes at most 4 arguments (dY, shape, indices, axis), got 5",
            (ONES, [4, 3], WHERE, 0, 0),
            {},
        ),
        (TypeError, f"dY is None, expected an array of {TYPES}", (None, [4, 3], WHERE), {}),
        (TypeError, f"dY is bool, expected {TYPES}", (ONES > 0, [4, 3], WHERE), {}),
        (TypeError, "shape is None, expected an array of int64", (ONES, None, WHERE), {}),
        (TypeError, "shape is float32, expected int64", (ONES, np.ones(2, F32), WHERE), {}),
        (TypeError, "shape is a dict, expected integers: a NumPy array, a list or an int", (ONES, {}, WHERE), {}),
        (ValueError, "shape is empty, expected at least one dimension", (ONES, [], WHERE), {}),
        (ValueError, "shape is [-4, 3], expected no negative dimension", (ONES, [-4, 3], WHERE), {}),
        (ValueError, "shape has shape (2, 1), expected one dimension", (ONES, [[4], [3]], WHERE), {}),
        (TypeError, "indices is int16, expected int32 or int64", (ONES, [4, 3], WHERE.astype(np.int16)), {}),
        (ValueError, "indices has 1 dimensions, expected 2 as shape [4, 3] has", (ONES, [4, 3], WHERE[0]), {}),
        (ValueError, "indices has 2 dimensions, expected 3 as shape [4, 3, 1] has", (ONES, [4, 3, 1], WHERE), {}),
        (ValueError, "indices has 0 dimensions, expected 1 as shape [4] has", (np.float32(1), 4, 0), {}),
        (ValueError, "dY has shape [1, 3], expected [2, 3] as indices has", (ONES[:1], [4, 3], WHERE), {}),
        (ValueError, "dY has shape [6], expected [2, 3] as indices has", (ONES.reshape(6), [4, 3], WHERE), {}),
        (
            ValueError,
            "indices has 3 elements on axis 1, expected at most 2 for shape [4, 2]",
            (ONES, [4, 2], WHERE),
            {},
        ),
        (
            ValueError,
            "indices has 2 elements on axis 0, expected at most 1 for shape [1, 3]",
            (ONES, [1, 3], WHERE),
            {"axis": -1},
        ),
        (ValueError, "axis is 2, expected -2 to 1 for 2 dimensions", (ONES, [4, 3], WHERE, 2), {}),
        (ValueError, "axis is -3, expected -2 to 1 for 2 dimensions", (ONES, [4, 3], WHERE, -3), {}),
        (TypeError, "axis is '0', expected int", (ONES, [4, 3], WHERE, "0"), {}),
        (TypeError, "axis is None, expected int", (ONES, [4, 3], WHERE, None), {}),
    ],
)
def test_bad_calls(error, text, args, kwargs):
    check_refused(gather_elements_grad, error, text, *args, **kwargs)


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bad", [4, -5, 2**31 - 1, -(2**31)])
def test_a_bad_index_writes_nothing(bad, axis, dtype, index):
    dY, shape, indices = example((4, 4), (4, 4), axis, dtype, index)
    indices[2, 3] = bad
    text = f"indices[2, 3] is {bad}, expected -4 to 3"
    check_refused(gather_elements_grad, IndexError, text, dY, shape, indices, axis, out=poisoned((4, 4), dtype))


def test_other_bad_indices():
    text = f"indices[1, 2] is {-(2**62)}, expected -4 to 3"
    where = WHERE.copy()
    where[1, 2] = -(2**62)
    check_refused(gather_elements_grad, IndexError, text, ONES, [4, 3], where, out=poisoned((4, 3), F32))
    text = "indices[0, 0] is 0, expected none: the axis has no elements"
    check_refused(gather_elements_grad, IndexError, text, ONES, [0, 3], WHERE, out=poisoned((0, 3), F32))


@pytest.mark.parametrize("axis", [0, 1])
def test_of_several_bad_indices_the_first_is_named(axis):
    dY, shape, indices = example((300, 300), (300, 300), axis)
    for position, bad in (((299, 299), 999), ((150, 0), -301), ((20, 17), 300), ((20, 16), 301)):
        indices[position] = bad
        text = f"GatherElementsGrad: indices{list(position)} is {bad}, expected -300 to 299"
        for count in (1, 2, 4):
            with on_threads(count), raises(IndexError, text):
                gather_elements_grad(dY, shape, indices, axis)


def test_results_too_large():
    with raises(
        MemoryError, "GatherElementsGrad: the result of shape [1099511627776] needs 4096.0 GiB, more than there is"
    ):
        gather_elements_grad(np.zeros(0, F32), [2**40], np.zeros(0, np.int64))


expected = sums  # how far a right kernel may be from the definition


def node_cases() -> Iterator[NodeCase]:
    """Small calls for every runtime to run."""
    for axis, dtype, index in itertools.product((0, 1, -1), FLOATS, INDICES):

        def make(dtype=dtype, index=index):
            rng = np.random.default_rng(0)
            indices = rng.integers(-4, 4, (4, 4, 4)).astype(index)
            return rng.standard_normal(indices.shape).astype(dtype), np.array([5, 4, 6]), indices

        parameters = {"type": str(dtype), "axis": axis_name(axis), "index": f"{index}_indices"}
        yield NodeCase(gather_elements_grad, parameters, make, {"axis": axis})
