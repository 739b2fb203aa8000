"""GatherGrad against its definition, torch's index_add and its own error sentences."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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
    readable,
)
from tests.expected import sums
from tests.node_cases import NodeCase, axis_name

from onnxgrad import gather_grad

F32 = np.dtype(np.float32)


def example(shape, indices_shape, axis=0, dtype=np.float32, index=np.int64, seed=0):
    """Random dY and indices, about half of them negative."""
    rng = np.random.default_rng(seed)
    size = shape[axis]
    indices = rng.integers(-size, size, indices_shape).astype(index) if size else np.zeros(indices_shape, index)
    axis %= len(shape)
    dY = rng.standard_normal((*shape[:axis], *indices.shape, *shape[axis + 1 :])).astype(dtype)
    return np.array(shape, np.int64), indices, dY


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_every_type_and_axis(dtype, index, axis):
    check(gather_grad, *example((5, 33, 7), (4, 3), axis, dtype, index), axis=axis)


# Narrow rows, wide rows, rows wider than a task, one long run: whatever way a kernel chooses must be walked.
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("shape", "count", "axis"),
    [
        ((1000,), 5000, 0),
        ((3, 1000), 4000, 1),
        ((400, 15), 3000, 0),
        ((400, 16), 3000, 0),
        ((300, 130), 2000, 0),
        ((7, 50, 70), 40, 1),
        ((3, 40000), 5, 0),
        ((2, 3, 5, 1200), 11, 2),
    ],
    ids=str,
)
def test_larger_sizes(shape, count, axis, dtype):
    check(gather_grad, *example(shape, (count,), axis, dtype), axis=axis)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("inner", [1, 3, 64, 300])
@pytest.mark.parametrize("outer", [1, 3])
def test_one_index_many_times(inner, outer, dtype):
    shape, indices, dY = example((outer, 9, inner), (3000,), 1, dtype)
    indices[:] = 4
    check(gather_grad, shape, indices, dY, axis=1)


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("inner", [1, 40])
def test_minus_one_and_the_last_row_are_one(inner, dtype, index):
    indices = np.array([-1, 4, -1, 4, 4, -5, 0, -1], index)
    dY = np.ones((8, inner), dtype)
    dX = check(gather_grad, [5, inner], indices, dY)
    assert dX[4, 0] == 6 and dX[0, 0] == 2 and dX[1:4].astype(float).sum() == 0


@pytest.mark.slow
def test_skewed_indices():
    rng = np.random.default_rng(0)
    indices = np.minimum(rng.zipf(1.3, 6000) - 1, 499)
    check(gather_grad, [500, 48], indices, rng.standard_normal((6000, 48)).astype(F32))


@pytest.mark.slow  # kernels for half types are compiled
def test_halves_round_once():
    """1 + 2048 halves of one ulp: adding in half precision would stay at 1, in float32 it is 2."""
    for dtype, ulp in ((FLOATS[0], 2.0**-10), (FLOATS[3], 2.0**-7)):
        terms = np.full(1 + int(2 / ulp), ulp / 2, dtype)
        terms[0] = 1
        indices = np.zeros(terms.size, np.int64)
        assert call(gather_grad, [1], indices, terms)[0] == 2
        assert call(gather_grad, [1, 64], indices, np.repeat(terms[:, None], 64, axis=1))[0, 9] == 2


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_halves_round_to_even_and_overflow_to_infinity(dtype):
    rng = np.random.default_rng(0)
    terms = rng.integers(0, 2**16, 4096).astype(np.uint16).view(dtype) if dtype.itemsize == 2 else None
    if terms is None:
        terms = rng.standard_normal(4096).astype(dtype)
    terms = readable(terms)
    # Pairs of any numbers at all, subnormals, infinities and NaN among them: one addition and one rounding.
    wide = np.float32 if dtype.itemsize == 2 else dtype
    with np.errstate(all="ignore"):
        expected = (terms[0::2].astype(wide) + terms[1::2].astype(wide)).astype(dtype)
    actual = call(gather_grad, [2048], np.repeat(np.arange(2048), 2), terms)
    nan = np.isnan(expected.astype(np.float64))
    np.testing.assert_array_equal(np.isnan(actual.astype(np.float64)), nan)
    np.testing.assert_array_equal(actual[~nan].astype(np.float64), expected[~nan].astype(np.float64))


@pytest.mark.parametrize("inner", [1, 40])
def test_nan_and_infinity_stay_in_their_row(inner):
    shape, indices, dY = example((6, inner), (4,))
    indices[:] = [0, 2, 2, -1]
    dY[0], dY[1], dY[3] = np.nan, np.inf, -np.inf
    dX = check(gather_grad, shape, indices, dY)
    assert np.isfinite(dX[[1, 3, 4]]).all() and np.isnan(dX[0]).all() and (dX[2] == np.inf).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("shape", "indices_shape", "axis"),
    [
        ((5,), (), 0),
        ((5, 3), (), 1),
        ((5, 3), (0,), 0),
        ((5, 3), (2, 0, 4), 1),
        ((0, 3), (0,), 0),
        ((0, 3), (4,), 1),
        ((5, 0), (4,), 0),
        ((5, 0, 70), (0,), 1),
        ((0, 0, 0), (0, 3), 1),
        ((3, 0, 70), (2,), 2),
        ((1,), (1,), 0),
        ((2, 1, 2, 1, 3, 1, 2, 2, 1), (2, 1), 4),
        ((2, 2, 2, 2, 2, 2, 2, 2, 2), (2,) * 9, -1),
    ],
    ids=str,
)
def test_scalar_empty_and_rank_nine(shape, indices_shape, axis, dtype):
    check(gather_grad, *example(shape, indices_shape, axis, dtype), axis=axis)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("inner", [1, 17])
def test_more_than_65535_batches(inner, dtype):
    check(gather_grad, *example((70_000, 3, inner), (2,), 1, dtype), axis=1)


@pytest.mark.parametrize("rank", [33, 64])
def test_more_dimensions_than_numpy_iterates_over(rank):
    shape = [2] + [1] * (rank - 3) + [3, 2]
    dY = np.arange(1.0, 13.0, dtype=F32).reshape([2] + [1] * (rank - 3) + [3, 2])
    dX = call(gather_grad, shape, [2, 0, -1], dY, axis=rank - 2)
    expected = np.array([[[3, 4], [0, 0], [6, 8]], [[9, 10], [0, 0], [18, 20]]], F32).reshape(shape)
    np.testing.assert_array_equal(dX, expected)
    # ufunc.at of NumPy 2 writes past its buffers above 32 dimensions: a process apart tells whether we survive.
    code = (
        f"import numpy as np, onnxgrad\ndY = np.ones({dY.shape}, np.float32)\n"
        f"print(onnxgrad.gather_grad.definition({shape}, [2, 0, -1], dY, axis={rank - 2}).sum())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "12.0\n"), run.stderr


LAYOUTS = list(layouts(np.zeros((2, 2), F32)))


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, dtype, index):
    shape, indices, dY = example((6, 9, 4), (3, 5), 1, dtype, index)
    dY, indices = layouts(dY).get(layout, dY), layouts(indices)[layout]
    check(gather_grad, layouts(shape)[layout], indices, dY, axis=1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_broadcast_views(dtype):
    one = np.array(1.5, dtype)
    indices = np.broadcast_to(np.array([[2], [-1]]), (2, 7))
    check(gather_grad, (4, 20), indices, np.broadcast_to(one, (2, 7, 20)))
    check(gather_grad, (4, 3), np.broadcast_to(np.int32(1), (50,)), np.broadcast_to(one, (50, 3)))


@pytest.mark.parametrize("shape", [[4, 3], (4, 3), np.array([4, 3], np.int32), np.array([4, 3], np.uint8)], ids=repr)
def test_shapes_as_python_or_any_integers(shape):
    check(gather_grad, shape, [0, -1], np.ones((2, 3), F32))
    check(gather_grad, shape, 3, np.ones(3, F32))
    check(gather_grad, shape, ((1,), (2,)), np.ones((2, 1, 3), F32))
    check(gather_grad, shape, np.int32(1), np.ones((4,), F32), np.int64(1))


def test_an_int_is_a_shape_of_one_dimension():
    check(gather_grad, 4, range(4), np.ones(4, F32))
    check(gather_grad, np.int64(4), [0], np.ones(1, F32))


@pytest.mark.parametrize("huge", [2**31, 2**40])
def test_dimensions_beyond_int32(huge):
    for shape in ([huge, 0], np.array([huge, 0])):
        dX = call(gather_grad, shape, [huge - 1, -huge], np.zeros((2, 0), F32))
        assert dX.shape == (huge, 0)
    with raises(IndexError, f"GatherGrad: indices[0] is {huge}, expected -{huge} to {huge - 1}"):
        call(gather_grad, [huge, 0], [huge], np.zeros((1, 0), F32))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("shape", "axis"), [((50, 8), 0), ((4, 50, 80), 1), ((6, 50), 1)])
def test_agrees_with_torch(shape, axis, dtype):
    dims, indices, dY = example(shape, (200,), axis, dtype)
    expected = torch.zeros(shape, dtype=torch.from_numpy(dY).dtype).index_add_(
        axis, torch.from_numpy(indices % shape[axis]), torch.from_numpy(dY)
    )
    absolute = gather_grad.definition(dims, indices, np.abs(dY).astype(np.float64), axis)
    bound = 2 * bound_of_sum(PRECISION[dY.dtype], np.float64(200), absolute)
    assert_close(call(gather_grad, dims, indices, dY, axis), expected.numpy(), bound)


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(st.data())
def test_any_shape(data):
    shape = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=5), "shape")
    axis = data.draw(st.integers(-len(shape), len(shape) - 1), "axis")
    dims = st.integers(0, 4) if shape[axis] else st.just(0)
    indices_shape = tuple(data.draw(st.lists(dims, min_size=0 if shape[axis] else 1, max_size=3), "indices_shape"))
    dtype, index = data.draw(st.sampled_from(FLOATS)), data.draw(st.sampled_from(INDICES))
    check(gather_grad, *example(shape, indices_shape, axis, dtype, index, data.draw(st.integers(0, 99))), axis=axis)


ONES = np.ones((2, 3), F32)
TYPES = "float16, float32, float64 or bfloat16"
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


@pytest.mark.parametrize(
    ("error", "text", "args", "kwargs"),
    [
        (TypeError, "shape is missing", (), {}),
        (TypeError, "dY is missing", ([4, 3], [0, 1]), {}),
        (TypeError, "takes at most 4 arguments (shape, indices, dY, axis), got 5", ([4, 3], [0, 1], ONES, 0, 0), {}),
        (
            TypeError,
            "has no argument 'dim', expected one of shape, indices, dY, axis",
            ([4, 3], [0, 1], ONES),
            {"dim": 0},
        ),
        (TypeError, "got axis twice, by position and by name", ([4, 3], [0, 1], ONES, 0), {"axis": 0}),
        (TypeError, "shape is None, expected an array of int64 or int32", (None, [0, 1], ONES), {}),
        (
            TypeError,
            "shape is a str, expected integers: a NumPy array, a list or an int",
            ("43", [0, 1], ONES),
            {},
        ),
        (TypeError, "shape is float64, expected int64 or int32", (np.array([4.0, 3.0]), [0, 1], ONES), {}),
        (TypeError, "shape holds float64 values, expected integers", ([4.0, 3.0], [0, 1], ONES), {}),
        (ValueError, "shape has shape (1, 2), expected one dimension", ([[4, 3]], [0, 1], ONES), {}),
        (ValueError, "shape is empty, expected at least one dimension", ([], 0, np.float32(1)), {}),
        (ValueError, "shape is [4, -3], expected no negative dimension", ([4, -3], [0, 1], ONES), {}),
        (
            ValueError,
            "shape is 100 numbers, -3 among them, expected no negative dimension",
            ([-3] * 100, [0, 1], ONES),
            {},
        ),
        (ValueError, "shape holds values that do not fit int64", ([2**63, 3], [0, 1], ONES), {}),
        (ValueError, "shape holds values that do not fit int64", (np.array([2**63], np.uint64), [0, 1], ONES), {}),
        (ValueError, "shape is a ragged list, expected integers of one shape", ([[4], [3, 2]], [0, 1], ONES), {}),
        (TypeError, "indices is None, expected an array of int32 or int64", ([4, 3], None, ONES), {}),
        (TypeError, "indices holds bool values, expected integers", ([4, 3], [True, False], ONES), {}),
        (TypeError, "indices is uint8, expected int32 or int64", ([4, 3], np.zeros(2, np.uint8), ONES), {}),
        (TypeError, "indices is float32, expected int32 or int64", ([4, 3], np.zeros(2, F32), ONES), {}),
        (TypeError, f"dY is int64, expected {TYPES}", ([4, 3], [0, 1], np.ones((2, 3), int)), {}),
        (TypeError, f"dY is complex64, expected {TYPES}", ([4, 3], [0, 1], np.ones((2, 3), "c8")), {}),
        (TypeError, f"dY is object, expected {TYPES}", ([4, 3], [0, 1], np.ones((2, 3), object)), {}),
        (TypeError, f"dY is a list, expected a NumPy array of {TYPES}", ([4, 3], [0, 1], [[1.0] * 3] * 2), {}),
        (TypeError, "axis is 0.0, expected int", ([4, 3], [0, 1], ONES, 0.0), {}),
        (TypeError, "axis is True, expected int", ([4, 3], [0, 1], ONES), {"axis": True}),
        (ValueError, "axis is 2, expected -2 to 1 for 2 dimensions", ([4, 3], [0, 1], ONES, 2), {}),
        (ValueError, "axis is -3, expected -2 to 1 for 2 dimensions", ([4, 3], [0, 1], ONES, -3), {}),
        (
            ValueError,
            "dY has shape [2, 3], expected [4, 2] for shape [4, 3], indices of shape [2] and axis 1",
            ([4, 3], [0, 1], ONES, 1),
            {},
        ),
        (
            ValueError,
            "dY has shape [6], expected [2, 3] for shape [4, 3], indices of shape [2] and axis 0",
            ([4, 3], [0, 1], np.ones(6, F32)),
            {},
        ),
    ],
)
def test_bad_calls(error, text, args, kwargs):
    check_refused(gather_grad, error, text, *args, **kwargs)


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("inner", [1, 40])
@pytest.mark.parametrize("bad", [4, -5, 2**31 - 1, -(2**31)])
def test_a_bad_index_writes_nothing(bad, inner, dtype, index):
    shape, indices, dY = example((4, inner), (3, 50), 0, dtype, index)
    indices[2, 49] = bad
    text = f"indices[2, 49] is {bad}, expected -4 to 3"
    check_refused(gather_grad, IndexError, text, shape, indices, dY, out=poisoned((4, inner), dtype))


def test_other_bad_indices():
    check_refused(
        gather_grad, IndexError, "indices is 4, expected -4 to 3", [4], 4, np.float32(1), out=poisoned((4,), F32)
    )
    out = poisoned((0, 3), F32)
    text = "indices[0] is 0, expected none: the axis has no elements"
    check_refused(gather_grad, IndexError, text, [0, 3], [0], ONES[:1], out=out)
    text = f"indices[1] is {2**62}, expected -4 to 3"
    check_refused(gather_grad, IndexError, text, [4, 3], [0, 2**62], ONES, out=poisoned((4, 3), F32))
    text = "indices[0] is 9, expected -4 to 3"  # of several, the first; also where there is nothing to add
    check_refused(gather_grad, IndexError, text, [4, 0], [9, 8], np.ones((2, 0), F32), out=poisoned((4, 0), F32))


@pytest.mark.parametrize("inner", [1, 40])
def test_of_several_bad_indices_the_first_is_named(inner):
    shape, indices, dY = example((50, inner), (200_000 // inner,))
    indices[[7, 1000, indices.size // 2, indices.size - 1]] = [50, 60, -51, 70]
    for count in (1, 2, 4):
        with on_threads(count), raises(IndexError, "GatherGrad: indices[7] is 50, expected -50 to 49"):
            gather_grad(shape, indices, dY)
    indices[[7, 1000]] = 0
    for count in (1, 2, 4):
        text = f"GatherGrad: indices[{indices.size // 2}] is -51, expected -50 to 49"
        with on_threads(count), raises(IndexError, text):
            gather_grad(shape, indices, dY)


def test_results_too_large():
    none = np.zeros((0, 2**40), F32)
    check_refused(
        gather_grad, ValueError, f"dX would have shape [{2**40}, {2**40}], too large for any memory",
        [2**40, 2**40], np.zeros(0, np.int64), none,
    )  # fmt: skip
    arguments = np.array([2**40]), np.zeros(1, np.int64), np.ones(1, np.float32)
    if OVERCOMMIT.read_text().strip() != "1":  # where any memory is promised, NumPy gets it, and the process dies of it
        with pytest.raises(MemoryError, match=r"^GatherGrad: Unable to allocate 4.00 TiB for an array with shape "):
            gather_grad.definition(*arguments)
    with raises(MemoryError, "GatherGrad: the result of shape [1099511627776] needs 4096.0 GiB, more than there is"):
        gather_grad([2**40], np.zeros(0, np.int64), np.zeros(0, F32))
    with raises(ValueError, "GatherGrad: shape has 65 values, expected at most 64 dimensions as in NumPy"):
        gather_grad([1] * 65, 0, np.zeros((1,) * 64, F32))


expected = sums  # how far a right kernel may be from the definition


def node_cases() -> Iterator[NodeCase]:
    """Small calls for every runtime to run."""
    shape = (5, 33, 7)
    for axis, dtype, index, shape_type in itertools.product((0, 1, -1), FLOATS, INDICES, INDICES):

        def make(axis=axis, dtype=dtype, index=index, shape_type=shape_type):
            rng = np.random.default_rng(0)
            indices = rng.integers(-shape[axis], shape[axis], (4, 3)).astype(index)
            dims = shape[: axis % 3] + indices.shape + shape[axis % 3 + 1 :]
            return np.array(shape, shape_type), indices, rng.standard_normal(dims).astype(dtype)

        parameters = {"type": str(dtype), "axis": axis_name(axis), "index": f"{index}_indices"}
        yield NodeCase(gather_grad, {**parameters, "shape_type": f"{shape_type}_shape"}, make, {"axis": axis})
