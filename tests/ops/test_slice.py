"""SliceGrad against its definition, NumPy's slices, a walk by ONNX's rules, and its own error sentences."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checks import INDICES, call, check, check_refused, examples, layouts, raises, same_bits
from tests.expected import exact
from tests.node_cases import NodeCase, without

from onnxgrad import slice_grad
from onnxgrad.runtime.custom_op import ELEMENT_TYPES
from onnxgrad.tensor_types import DTYPES

F32 = np.dtype(np.float32)
I32, I64 = np.iinfo(np.int32), np.iinfo(np.int64)
# Each size of an element has a kernel: that of 16 bytes is not compiled daily.
SMALL = [dtype for dtype in DTYPES.values() if dtype.itemsize <= 8]


def numbers(shape, dtype):
    """Numbers other than zero, as far as the type has them."""
    count = int(np.prod(shape))
    if dtype.kind == "b":
        return np.ones(shape, dtype)
    if dtype.kind == "c":
        return (np.arange(1, count + 1) * (1 - 2j)).astype(dtype).reshape(shape)
    return (
        (np.arange(count) % 7 * 0.5 + 0.5).astype(dtype).reshape(shape)
        if dtype.kind not in "iu"
        else ((np.arange(count) % 100 + 1).astype(dtype).reshape(shape))
    )


def walk(dim, start, end, step):
    """The positions Slice reads, one by one: ONNX's rules, and onnxruntime's "to the end" for any direction."""
    if dim == 0:
        return []
    start = start + dim if start < 0 else start
    at = min(max(start, 0), dim if step > 0 else dim - 1)
    end = end + dim if end < 0 else end
    if end in (I32.max, I64.max):
        end = dim if step > 0 else -1
    found = []
    while 0 <= at < dim and (at < end if step > 0 else at > end):
        found.append(at)
        at += step
    return found


def sliced(shape, starts, ends, axes, steps):
    """The shape of the slice."""
    dims = list(shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        dims[axis] = len(walk(dims[axis], start, end, step))
    return dims


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_type(dtype, index):
    for step in (1, 2, -1, -3):
        starts, ends = ([0, 1], [3, 6]) if step > 0 else ([2, 6], [-4, 0])
        dY = numbers(sliced((3, 7), starts, ends, (0, 1), (1 if step > 0 else -1, step)), dtype)
        steps = np.array([1 if step > 0 else -1, step], index)
        args = np.array(starts, index), np.array(ends, index), np.array([0, -1], index), steps
        dX = check(slice_grad, dY, [3, 7], *args)
        assert dX.astype(bool).sum() == dY.astype(bool).sum()


@pytest.mark.parametrize(
    "dtype", [np.uint8, np.float16, np.float32, np.float64, np.complex128], ids=lambda t: t.__name__
)
def test_every_bit_is_kept(dtype):
    """NaN with a payload, -0, subnormals: nothing is computed."""
    raw = np.random.default_rng(0).integers(0, 256, (40, 30 * np.dtype(dtype).itemsize), np.uint8).view(dtype)
    for step in (1, -1, 2):
        shape = [40, 30] if step != 2 else [40, 60]
        dX = check(slice_grad, raw, shape, [-1 if step < 0 else 0], [I64.max], [1], [step])
        assert same_bits(np.ascontiguousarray(dX[:, ::step]), raw)


ENDS = [*range(-6, 7), I32.max, I32.min, I64.max, I64.min, I64.max - 1, I32.max - 1]
STEPS = [1, 2, 3, 5, -1, -2, -3, -5, I32.max, I32.min, I64.max, I64.min]


@pytest.mark.parametrize("dim", range(5))
@pytest.mark.parametrize("step", STEPS)
def test_every_slice_of_a_small_axis(dim, step):
    for start, end in itertools.product(ENDS, repeat=2):
        positions = walk(dim, start, end, step)
        dY = np.arange(1, len(positions) + 1, dtype=F32)
        expected = np.zeros(dim, F32)
        expected[positions] = dY
        assert call(slice_grad, dY, dim, start, end, 0, step).tolist() == expected.tolist(), (start, end)
        fits = all(I32.min <= v <= I32.max for v in (start, end, step))
        if fits:
            args = [np.array([v], np.int32) for v in (start, end, 0, step)]
            assert call(slice_grad, dY, dim, *args).tolist() == expected.tolist(), (start, end)


@pytest.mark.parametrize("dim", range(1, 6))
def test_numpy_reads_the_same_wherever_it_has_a_say(dim):
    """NumPy differs only in a start before the first element with a negative step, and in INT_MAX as "to the end"."""
    X = np.arange(1, dim + 1, dtype=F32)
    for start, end, step in itertools.product(range(-dim, dim + 3), range(-dim - 3, dim + 3), (1, 2, 3, -1, -2, -3)):
        dY = X[start:end:step]
        expected = np.zeros(dim, F32)
        expected[start:end:step] = dY
        dX = call(slice_grad, dY, [dim], [start], [end], None, [step])
        assert dX.tolist() == expected.tolist(), (start, end, step)


@settings(max_examples=examples(120), deadline=None, derandomize=True)
@given(st.data())
def test_any_slice(data):
    shape = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=5), "shape")
    axes = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True), "axes")
    bounds = st.integers(-8, 8) | st.sampled_from([I32.max, I32.min])
    starts, ends = ([data.draw(bounds) for _ in axes] for _ in range(2))
    steps = [data.draw(st.integers(-4, 4).filter(bool) | st.sampled_from([I32.max, I32.min])) for _ in axes]
    dY = numbers(sliced(shape, starts, ends, axes, steps), data.draw(st.sampled_from(SMALL)))
    index = data.draw(st.sampled_from(INDICES))
    axes = [a - len(shape) if data.draw(st.booleans()) else a for a in axes]
    dX = check(slice_grad, dY, shape, *(np.array(v, index) for v in (starts, ends, axes, steps)))
    assert dX.astype(bool).sum() == dY.astype(bool).sum()


@pytest.mark.parametrize(
    "dtype", [np.uint8, np.float16, np.float32, np.float64, np.complex128], ids=lambda t: t.__name__
)
@pytest.mark.parametrize(
    ("shape", "where"),
    [
        ((700, 300), np.s_[350:]),
        ((700, 300), np.s_[:, ::2]),
        ((700, 300), np.s_[::-1, ::-1]),
        ((700, 300), np.s_[::3, 5:290]),
        ((700, 300), np.s_[-1:0:-2, 7:8]),
        ((300_000,), np.s_[::-1]),
        ((300_000,), np.s_[1:-1]),
        ((40, 30, 50), np.s_[1:, ::-3, 1::4]),
        ((70_000, 3, 2), np.s_[:, 1:]),
        ((70_000, 2, 3), np.s_[::2, ::-1, ::2]),
        ((2, 3, 2, 3, 2, 3, 2, 3, 2), np.s_[1:, ::2, :, ::-1, :1, 1:, ::-1, 2:, ::2]),
        ((1, 1, 5), np.s_[:, :, 4:]),
    ],
    ids=str,
)
def test_larger_sizes(shape, where, dtype):
    where = where if isinstance(where, tuple) else (where,)
    dY = numbers(np.empty(shape, bool)[where].shape, np.dtype(dtype))
    starts, ends, steps = zip(*[_spelled(s, d) for s, d in zip(where, shape, strict=False)], strict=True)
    expected = np.zeros(shape, dtype)
    expected[where] = dY
    assert same_bits(check(slice_grad, dY, shape, starts, ends, None, steps), expected)


def _spelled(s, dim):
    """A Python slice as ONNX spells it: "through element 0" is an end before the first."""
    start, end, step = s.indices(dim)
    return start, -dim - 1 if end < 0 else end, step


@pytest.mark.parametrize("rank", [33, 63, 64])
def test_more_dimensions_than_numpy_indexes(rank):
    dY = np.arange(1, 5, dtype=F32).reshape([2] + [1] * (rank - 2) + [2])
    args = dY, [2] + [1] * (rank - 2) + [4], [3], [I64.max], [rank - 1], [-2]
    for dX in (call(slice_grad, *args), slice_grad.definition(*args)):
        np.testing.assert_array_equal(dX.reshape(2, 4), [[0, 2, 0, 1], [0, 4, 0, 3]])


@pytest.mark.parametrize(
    ("dY_shape", "shape", "starts", "ends"),
    [
        ((0, 3), (4, 3), [2], [2]),
        ((0, 3), (4, 3), [3], [1]),
        ((0, 0), (0, 0), [0, 0], [9, 9]),
        ((0, 3), (0, 3), [0], [5]),
        ((0, 2), (0, 3), [0, 1], [0, 3]),
        ((2, 0), (3, 0), [1, 0], [3, 0]),
        ((4, 3), (4, 3), [], []),
        ((0,), (0,), [], []),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.complex128], ids=lambda t: t.__name__)
def test_empty_slices_and_dimensions(dY_shape, shape, starts, ends, dtype):
    check(slice_grad, np.ones(dY_shape, dtype), shape, starts, ends)
    check(slice_grad, np.ones(dY_shape, dtype), shape, np.array(starts, np.int32), np.array(ends, np.int32), [], [])


@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "bfloat16", "float", "int64", "complex64", "complex128"])
@pytest.mark.parametrize("layout", list(layouts(np.zeros((2, 2), F32))))
def test_layouts(layout, dtype):
    dY = numbers((3, 4, 5), DTYPES[dtype])
    dY = layouts(dY).get(layout, dY)
    args = [layouts(np.array(v, np.int64))[layout] for v in ([3, 8, 9], [0, 8], [4, I64.max], [1, -1], [1, -2])]
    check(slice_grad, dY, *args)
    check(slice_grad, np.broadcast_to(dY[:1, :1, :1], (3, 4, 5)), *args)


def test_python_integers_and_defaults():
    ones = np.ones((2, 3), F32)
    check(slice_grad, ones, (5, 3), 1, 3)
    check(slice_grad, ones, [5, 3], [1], (3,))
    check(slice_grad, ones, [2, 5], 0, 3, axes=-1)
    check(slice_grad, ones, [5, 3], 4, 0, steps=-2)
    check(slice_grad, ones, range(2, 4), [], [])
    check(slice_grad, ones[0], 7, np.int32(2), 5)
    check(slice_grad, ones, np.array([5, 3], np.uint8), np.array([1], np.int32), 3, [0], (1,))


def test_an_end_of_int32_max_runs_to_the_end_of_longer_axes_too():
    dX = call(slice_grad, np.zeros((2**32 - 1, 0), np.uint8), [2**32, 0], [1], [I32.max])
    assert dX.shape == (2**32, 0)


ONES = np.ones((2, 3), F32)
NARROW = np.array([1], np.int32)
TYPES = ", ".join(str(d) for d in list(DTYPES.values())[:-1]) + " or complex128"


@pytest.mark.parametrize(
    ("error", "text", "args", "kwargs"),
    [
        (TypeError, "shape is missing", (ONES,), {}),
        (TypeError, "ends is missing", (ONES, [5, 3], [0]), {}),
        (TypeError, f"dY is None, expected an array of {TYPES}", (None, [5, 3], [0], [2]), {}),
        (TypeError, f"dY is a float, expected a NumPy array of {TYPES}", (1.0, [5, 3], [0], [2]), {}),
        (TypeError, f"dY is <U1, expected {TYPES}", (np.array(["a"]), [5], [0], [1]), {}),
        (TypeError, f"dY is datetime64[ns], expected {TYPES}", (np.zeros(1, "M8[ns]"), [5], [0], [1]), {}),
        (TypeError, f"dY is object, expected {TYPES}", (np.array([None]), [5], [0], [1]), {}),
        (TypeError, "shape is None, expected an array of int64", (ONES, None, [0], [2]), {}),
        (ValueError, "shape is empty, expected at least one dimension", (np.float32(1), [], [], []), {}),
        (ValueError, "shape is [5, -3], expected no negative dimension", (ONES, [5, -3], [0], [2]), {}),
        (ValueError, "starts has shape (1, 1), expected one dimension", (ONES, [5, 3], [[0]], [2]), {}),
        (TypeError, "starts is uint8, expected int32 or int64", (ONES, [5, 3], np.zeros(1, np.uint8), [2]), {}),
        (TypeError, "starts is None, expected an array of int32 or int64", (ONES, [5, 3], None, [2]), {}),
        (TypeError, "ends is int64, expected int32 as starts is", (ONES, [5, 3], NARROW, NARROW.astype(int)), {}),
        (TypeError, "steps is int32, expected int64 as ends is",
         (ONES, [5, 3], [1], NARROW.astype(int), [0], NARROW), {}),
        (ValueError, "ends holds values that do not fit int32", (ONES, [5, 3], NARROW, [2**31]), {}),
        (ValueError, "ends has 2 values, expected 1 as starts has", (ONES, [5, 3], [0], [2, 3]), {}),
        (ValueError, "ends has 0 values, expected 1 as starts has", (ONES, [5, 3], [0], []), {}),
        (ValueError, "axes has 2 values, expected 1 as starts has", (ONES, [5, 3], [0], [2], [0, 1]), {}),
        (ValueError, "steps has 2 values, expected 1 as starts has", (ONES, [5, 3], [0], [2]), {"steps": [1, 1]}),
        (ValueError, "starts has 3 values, expected at most 2 for shape [5, 3]", (ONES, [5, 3], [0] * 3, [1] * 3), {}),
        (ValueError, "axes names 2, expected -2 to 1 for shape [5, 3]", (ONES, [5, 3], [0], [2], [2]), {}),
        (ValueError, "axes names -3, expected -2 to 1 for shape [5, 3]", (ONES, [5, 3], [0], [2], [-3]), {}),
        (ValueError, "axes is [1, -1], expected no axis twice", (ONES, [5, 3], [0, 0], [2, 2], [1, -1]), {}),
        (ValueError, "steps is [0], expected no 0", (ONES, [5, 3], [0], [2], None, [0]), {}),
        (ValueError, "dY has shape [2, 3], expected [3, 3], the slice of shape [5, 3]", (ONES, [5, 3], [0], [3]), {}),
        (ValueError, "dY has shape [6], expected [2, 3], the slice of shape [5, 3]",
         (ONES.reshape(6), [5, 3], [0], [2]), {}),
        (ValueError, "dY has shape [1], expected [0], the slice of shape [0]", (ONES[0, :1], [0], [0], [2]), {}),
        (ValueError, "dY has shape [], expected [1], the slice of shape [5]", (ONES[0, 0], [5], [0], [1]), {}),
        (TypeError, "has no argument 'axis', expected one of dY, shape, starts, ends, axes, steps",
         (ONES, [5, 3], [0], [2]), {"axis": 0}),
    ],
)  # fmt: skip
def test_bad_calls(error, text, args, kwargs):
    check_refused(slice_grad, error, text, *args, **kwargs)


def test_results_too_large():
    with raises(MemoryError, "SliceGrad: the result of shape [1099511627776] needs 1024.0 GiB, more than there is"):
        slice_grad(np.zeros(0, np.uint8), [2**40], [0], [0])
    for dims in ([2**30, 2**30], [2**59, 0], [2**60, 0, 7]):
        with raises(ValueError, f"SliceGrad: dX would have shape {dims}, too large for any memory"):
            slice_grad(np.zeros((0,) * len(dims), np.complex128), dims, [0] * len(dims), [0] * len(dims))


expected = exact  # how far a right kernel may be from the definition


def node_cases() -> Iterator[NodeCase]:
    """Small calls for every runtime to run."""
    for name, index, present in itertools.product(ELEMENT_TYPES, INDICES, ((), ("axes",), ("axes", "steps"))):

        def make(dtype=DTYPES[name], index=index, present=present):
            dY = (np.arange(12) % 5).astype(dtype).reshape(2, 6)
            backwards = "steps" in present
            numbers = ([3, 6], [0, -1], [2, -99], [0, -1], [1, -1]) if backwards else ([3, 8], [0, 2], [2, 8], [0, 1])
            shape, *others = (np.array(n, index) for n in numbers)
            return dY, shape.astype(np.int64), *others[: 2 + len(present)]

        absent = [n for n in ("axes", "steps") if n not in present]
        yield NodeCase(slice_grad, {"type": name, "index": f"{index}_starts", "absent": without(absent)}, make)
