"""BroadcastGradientArgs against NumPy's broadcasting: summing over its axes undoes it."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import mutually_broadcastable_shapes
from tests.checks import check, check_refused, layouts, poisoned
from tests.expected import exact
from tests.node_cases import NodeCase, only

from onnxgrad import broadcast_gradient_args


@pytest.mark.parametrize(
    ("a", "b", "a_axes", "b_axes"),
    [
        ([2, 16, 16, 16], [1, 1, 16, 16], [], [1, 0]),
        ([2, 3], [3], [], [0]),
        ([3], [2, 3], [0], []),
        ([2, 1, 3], [1, 4, 1], [1], [2, 0]),
        ([1], [1], [], []),
        ([1], [], [], [0]),
        ([], [1, 1], [1, 0], []),
        ([], [], [], []),
        ([2, 3], [], [], [1, 0]),
        ([1, 1], [1, 1, 1], [0], []),
        ([0], [1], [], [0]),
        ([1], [0], [0], []),
        ([0], [0], [], []),
        ([3, 0, 1], [0, 5], [2, ], [0]),
        ([1] * 9, [2] * 9, [8, 7, 6, 5, 4, 3, 2, 1, 0], []),
    ],
    ids=str,
)  # fmt: skip
def test_examples(a, b, a_axes, b_axes):
    given_a, given_b = check(broadcast_gradient_args, a, b)
    assert given_a.tolist() == a_axes and given_b.tolist() == b_axes
    assert given_a.shape == (len(a_axes),) and given_b.shape == (len(b_axes),)


def undoes_broadcasting(a, b):
    """Whether summing over the axes gives back both shapes."""
    a_axes, b_axes = check(broadcast_gradient_args, np.array(a, np.int64), np.array(b, np.int64))
    whole = np.zeros(np.broadcast_shapes(a, b), np.int8)
    for axes, shape in ((a_axes, a), (b_axes, b)):
        assert axes.tolist() == sorted(set(axes.tolist()), reverse=True)
        assert all(whole.shape[k] != 1 or k < whole.ndim - len(shape) for k in axes)  # nothing is summed in vain
        np.testing.assert_array_equal(whole.sum(tuple(axes.tolist()), keepdims=True).reshape(shape).shape, shape)


def test_every_pair_of_small_shapes():
    shapes = [s for rank in range(4) for s in itertools.product((0, 1, 2), repeat=rank)]
    for a, b in itertools.product(shapes, repeat=2):
        try:
            np.broadcast_shapes(a, b)
        except ValueError:
            with pytest.raises(ValueError, match=r"^BroadcastGradientArgs: a_shape .* do not broadcast: "):
                broadcast_gradient_args(a, b)
        else:
            undoes_broadcasting(a, b)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(mutually_broadcastable_shapes(num_shapes=2, min_dims=0, max_dims=9, min_side=0, max_side=3))
def test_any_shapes(shapes):
    undoes_broadcasting(*shapes.input_shapes)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2**62), max_size=64), st.data())
def test_dimensions_of_any_size(shape, data):
    a = [data.draw(st.sampled_from([1, d])) for d in shape]
    b = [1 if d != 1 and a[k] != 1 and data.draw(st.booleans()) else d for k, d in enumerate(shape)]
    a_axes, b_axes = check(broadcast_gradient_args, a, b)
    assert a_axes.tolist() == [k for k in reversed(range(len(a))) if a[k] == 1 != b[k]]
    assert b_axes.tolist() == [k for k in reversed(range(len(a))) if b[k] == 1 != a[k]]


def test_more_dimensions_than_an_array_can_have():
    a_axes, b_axes = check(broadcast_gradient_args, [1] * 200, [2] * 100)
    assert a_axes.tolist() == list(range(199, 99, -1)) and b_axes.tolist() == list(range(99, -1, -1))


@pytest.mark.parametrize("layout", list(layouts(np.zeros(2, np.int64))))
def test_layouts(layout):
    a, b = layouts(np.array([3, 1, 5]))[layout], layouts(np.array([4, 1]))[layout]
    check(broadcast_gradient_args, a, b)
    check(broadcast_gradient_args, np.broadcast_to(np.int64(7), (3,)), np.array([7, 1, 7]))


def test_shapes_as_python_or_any_integers():
    for a in (5, [5], (5,), np.int8(5), np.array([5], np.int32), np.array([5], np.uint64), range(5, 6)):
        assert check(broadcast_gradient_args, a, (2, 1))[0].tolist() == [0]
        assert check(broadcast_gradient_args, a, b_shape=[])[1].tolist() == [0]


@pytest.mark.parametrize(
    ("error", "text", "args", "kwargs"),
    [
        (ValueError, "a_shape [2, 3] and b_shape [4] do not broadcast: 3 against 4 on axis -1", ([2, 3], 4), {}),
        (ValueError, "a_shape [2, 3] and b_shape [5, 3] do not broadcast: 2 against 5 on axis -2",
         ([2, 3], [5, 3]), {}),
        (ValueError, "a_shape [0] and b_shape [2] do not broadcast: 0 against 2 on axis -1", ([0], [2]), {}),
        (ValueError, "a_shape [2] and b_shape [7, 0] do not broadcast: 2 against 0 on axis -1", ([2], [7, 0]), {}),
        (ValueError, "a_shape is [-1], expected no negative dimension", ([-1], [2]), {}),
        (ValueError, "b_shape is [3, -2], expected no negative dimension", ([3], np.array([3, -2])), {}),
        (ValueError, "a_shape has shape (1, 1), expected one dimension", ([[3]], [2]), {}),
        (ValueError, "b_shape holds values that do not fit int64", ([3], [2**63]), {}),
        (TypeError, "a_shape holds float64 values, expected integers", ([1.5], [2]), {}),
        (TypeError, "a_shape is float64, expected int64", (np.array([1.5]), [2]), {}),
        (TypeError, "b_shape is bool, expected int64", ([1], np.array([True])), {}),
        (TypeError, "b_shape is None, expected an array of int64", ([1], None), {}),
        (TypeError, "b_shape is missing", ([1],), {}),
        (TypeError, "got a_shape twice, by position and by name", ([1],), {"a_shape": [1]}),
        (TypeError, "takes at most 2 arguments (a_shape, b_shape), got 3", ([1], [1], [1]), {}),
        (TypeError, "has no argument 'c_shape', expected one of a_shape, b_shape", ([1], [1]), {"c_shape": [1]}),
    ],
)  # fmt: skip
def test_bad_calls(error, text, args, kwargs):
    out = poisoned((1,), np.dtype(np.int64)), poisoned((1,), np.dtype(np.int64))
    check_refused(broadcast_gradient_args, error, text, *args, out=out, **kwargs)


expected = exact  # how far a right kernel may be from the definition


def node_cases() -> Iterator[NodeCase]:
    """Small calls for every runtime to run."""
    for a, b in (([2, 3], [3]), ([], [4]), ([1, 5, 1], [7, 1, 1, 2]), ([3], [3])):
        shapes = "_and_".join("x".join(map(str, shape)) or "scalar" for shape in (a, b))
        for outputs in (None, ["a_axes"], ["b_axes"]):

            def make(a=a, b=b):
                return np.array(a, np.int64), np.array(b, np.int64)

            parameters = {"shapes": shapes, "outputs": only(outputs)}
            yield NodeCase(broadcast_gradient_args, parameters, make, outputs=outputs)
