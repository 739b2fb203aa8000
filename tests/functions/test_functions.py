"""Every operator as an ONNX function: the same results on stock onnxruntime and in onnx.reference, without onnxgrad."""

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from tests.checks import as_tuple, same_bits
from tests.functions.models import FLOATS, check_functions, model_of, node_of, session
from tests.gru_cases import case

import onnxgrad
from onnxgrad import (
    add_functions,
    broadcast_gradient_args,
    gather_elements_grad,
    gather_grad,
    gru_grad,
    gru_training,
    slice_grad,
)
from onnxgrad.runtime.register import register

END = 2**63 - 1
RNG = np.random.default_rng(0)


def some(shape: Any, dtype: Any = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def gather_call(shape: list[int], indices: Any, axis: int, dtype: Any = np.float32, index: Any = np.int64) -> Any:
    indices = np.asarray(indices, index)
    a = axis % len(shape)
    dY = some((*shape[:a], *indices.shape, *shape[a + 1 :]), dtype)
    return (np.array(shape, index), indices, dY), {"axis": axis}


GATHERS = {
    "rows": ([4, 3], [0, -1, 3, 0], 0),
    "columns": ([4, 3], [[0, -1], [1, 2]], 1),
    "middle": ([2, 3, 2], [2, 2, -3], -2),
    "last": ([2, 5], [[0], [4], [-5]], -1),
    "scalar": ([4, 2], -1, 0),
    "no indices": ([4, 2], np.zeros((0, 3)), 0),
    "no columns": ([4, 0], [1, 2], 0),
    "nothing around": ([0, 3], [1, 2], 1),
    "vector": ([5], [1, 1, 1, 1], 0),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", GATHERS)
def test_gather_grad(name, dtype):
    index = np.int32 if name in ("columns", "vector") else np.int64
    check_functions(gather_grad, gather_call(*GATHERS[name], dtype, index))


def test_gather_grad_of_different_axes_in_one_model():
    model = check_functions(gather_grad, *(gather_call(*g) for g in GATHERS.values()))
    assert [a.name for a in model.graph.node[0].attribute] == ["axis"]


def test_attributes_that_differ_are_written_out():
    (arguments, _), other = gather_call([4, 3], [1, 1], 0), gather_call([4, 3], [1], 1)
    model = check_functions(gather_grad, (arguments, {}), other)
    assert [helper.get_attribute_value(n.attribute[0]) for n in model.graph.node] == [0, 1]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_types_round_once(dtype):
    """2048 + 1 + 1 and 256 + 1 + 1 are lost where every addition rounds."""
    limit = 2 / float(ml_dtypes.finfo(dtype).eps)
    dY = np.array([limit, 1, 1], dtype)
    node, feeds = node_of(gather_grad, (np.array([1]), np.array([0, 0, 0]), dY), {}, "")
    model = add_functions(model_of([node], feeds))
    assert float(ReferenceEvaluator(model).run(None, feeds)[0][0]) == limit + 2
    if dtype is np.float16:
        assert float(session(model).run(None, feeds)[0][0]) == limit + 2


def test_repeats_are_not_lost_on_many_threads():
    """As they would be with ScatterND, which onnxruntime spreads over its threads."""
    count = 300_000
    node, feeds = node_of(gather_grad, (np.array([2]), np.zeros(count, np.int64), np.ones(count, np.float32)), {}, "")
    assert session(add_functions(model_of([node], feeds))).run(None, feeds)[0].tolist() == [count, 0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("shape", "taken", "axis"),
    [([4, 3], (6, 2), 0), ([4, 3], (4, 5), -1), ([2, 3, 4], (1, 7, 3), 1), ([5], (3,), 0), ([3, 2], (0, 2), 0)],
)
def test_gather_elements_grad(shape, taken, axis, dtype, index):
    indices = RNG.integers(-shape[axis], shape[axis], taken).astype(index)
    check_functions(gather_elements_grad, ((some(taken, dtype), np.array(shape), indices), {"axis": axis}))


def test_gather_elements_grad_of_different_axes_in_one_model():
    calls = [((some((2, 2)), np.array([3, 3]), RNG.integers(-3, 3, (2, 2))), {"axis": a}) for a in (-2, -1, 0, 1)]
    check_functions(gather_elements_grad, *calls)


SHAPES = [[], [1], [0], [3], [2, 3], [1, 3], [2, 1, 3], [1, 1, 1], [4, 2, 1, 3], [2, 1, 0]]


def broadcasts(a: list[int], b: list[int]) -> bool:
    try:
        np.broadcast_shapes(tuple(a), tuple(b))
    except ValueError:
        return False
    return True


def test_broadcast_gradient_args():
    pairs = [(a, b) for a, b in itertools.product(SHAPES, repeat=2) if broadcasts(a, b)]
    check_functions(broadcast_gradient_args, *(((np.array(a, np.int64), np.array(b, np.int64)), {}) for a, b in pairs))


@pytest.mark.parametrize("wanted", [["a_axes"], ["b_axes"]])
def test_broadcast_gradient_args_with_one_result(wanted):
    check_functions(broadcast_gradient_args, ((np.array([2, 1, 3]), np.array([1, 5, 3])), {}), wanted=wanted)


def test_shapes_that_do_not_broadcast_are_refused():
    node, feeds = node_of(broadcast_gradient_args, (np.array([2, 3]), np.array([2, 4])), {}, "")
    with pytest.raises(Exception, match="out of data bounds"):
        session(add_functions(model_of([node], feeds))).run(None, feeds)


SLICES = {
    "plain": ([5, 4], [1], [3], None, None),
    "steps": ([5, 4], [0, 1], [5, 4], None, [2, 2]),
    "backwards": ([5, 4], [4], [END], [0], [-1]),
    "backwards to -1": ([5, 4], [-1], [-6], [1], [-2]),
    "to the end": ([5, 4], [2], [END], [-1], None),
    "to the end of int32": ([5, 4], [3], [2**31 - 1], [0], [-2]),
    "start out of range": ([5, 4], [-9, 9], [3, END], [0, 1], [2, -1]),
    "start far below, backwards": ([5, 4], [-9], [END], [0], [-1]),
    "end out of range": ([5, 4], [1], [99], [0], [3]),
    "empty": ([5, 4], [3], [2], [0], None),
    "nothing to take from": ([0, 4], [0], [END], [0], [-1]),
    "no slices": ([5, 4], [], [], [], []),
    "axes and steps that are empty": ([5, 4], [1, 1], [3, 3], [], []),
    "large step": ([5], [0], [5], None, [2**40]),
}


def slice_call(name: str, dtype: Any = np.float32, index: Any = np.int64) -> Any:
    shape, *bounds = SLICES[name]
    taken = [None if b is None else np.minimum(b, np.iinfo(index).max).astype(index) for b in bounds]
    ranges = onnxgrad.ops.slice.ranges_of(shape, *taken)
    dY = (RNG.integers(0, 5, [r.length for r in ranges])).astype(dtype)
    return (dY, np.array(shape), *taken), {}


@pytest.mark.parametrize("dtype", [*FLOATS, np.int64])
@pytest.mark.parametrize("name", SLICES)
def test_slice_grad(name, dtype):
    check_functions(slice_grad, slice_call(name, dtype))


def test_slice_grad_of_every_kind_in_one_model():
    names = [n for n in SLICES if n != "large step"]
    check_functions(slice_grad, *(slice_call(n) for n in SLICES), *(slice_call(n, index=np.int32) for n in names))


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32, np.uint64, np.bool_])
def test_slice_grad_of_any_type(dtype):
    check_functions(slice_grad, slice_call("steps", dtype))


def test_slice_grad_of_another_shape_is_refused():
    (_, *rest), _ = slice_call("plain")
    node, feeds = node_of(slice_grad, (some((3, 4)), *rest), {}, "")
    node.input[2:4] = ["first", "last"]  # not known to be constant
    feeds["first"], feeds["last"] = feeds.pop("starts"), feeds.pop("ends")
    with pytest.raises(Exception, match=r"[Rr]eshape"):
        session(add_functions(model_of([node], feeds))).run(None, feeds)


CALLS = [
    (gather_grad, *gather_call([4, 3], [0, -1, 0], 0)),
    (gather_elements_grad, (some((2, 2)), np.array([3, 3]), np.array([[0, -1], [0, 0]])), {"axis": 1}),
    (broadcast_gradient_args, (np.array([2, 1, 3]), np.array([5, 3])), {}),
    (slice_grad, *slice_call("steps")),
    (gru_training, case(N=5, H=7, dtype=np.float32).without("B").forward, {}),
    (gru_grad, case(N=5, H=7, dtype=np.float32).without("SL").backward(), {}),
]


@pytest.mark.parametrize(("op", "arguments", "attributes"), CALLS, ids=[c[0].name for c in CALLS])
def test_the_kernel_runs_where_it_is_registered(op, arguments, attributes):
    node, feeds = node_of(op, arguments, attributes, "")
    model = add_functions(model_of([node], feeds))
    expected = as_tuple(op(*arguments, **attributes))
    # A function that gives something else shows which of the two has run.
    nodes = [helper.make_node("Identity", [op.inputs[0].name], [o.name]) for o in op.outputs]
    model.functions[0].ClearField("node")
    model.functions[0].node.extend(nodes)
    actual = session(model, register()).run(None, feeds)
    assert all(same_bits(a, e) for a, e in zip(actual, expected, strict=True))
