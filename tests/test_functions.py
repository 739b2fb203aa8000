"""Every operator as an ONNX function: the same results on stock onnxruntime and in onnx.reference, without onnxgrad."""

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from tests.checks import as_tuple, assert_close, expect, result_dtype, same_bits
from tests.function_models import model_of, node_of, run_everywhere, session
from tests.gru_cases import GRADIENTS, case

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

FLOATS = [np.float16, np.float32, np.float64]
END = 2**63 - 1
RNG = np.random.default_rng(0)


def check_functions(op: Any, *calls: Any, wanted: Any = None, **how: Any) -> onnx.ModelProto:
    """One model with all the calls gives what the definition does; `calls` are (arguments, attributes)."""
    made = [node_of(op, a, kw, f"_{k}", wanted) for k, (a, kw) in enumerate(calls)]
    feeds = {name: array for _, some in made for name, array in some.items()}
    plain = model_of([node for node, _ in made], feeds, **how)
    model = add_functions(plain)
    assert [f.name for f in model.functions] == [op.name]
    for results in run_everywhere(model, feeds).values():
        for k, (arguments, attributes) in enumerate(calls):
            expected, bounds = expect(op, *arguments, **attributes)
            for output, value, bound in zip(op.outputs, expected, bounds, strict=True):
                if wanted is not None and output.name not in wanted:
                    continue
                actual = results[f"{output.name}_{k}"]
                assert actual.dtype == result_dtype(op, arguments, attributes)
                if bound is None:
                    assert same_bits(actual, value), f"{output.name}: {actual} is not {value}"
                else:
                    assert_close(actual, value, bound, output.name)
    return model


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


def check_gru(given: Any, *, wanted: Any = None, grad: bool = True, **attributes: Any) -> None:
    check_functions(gru_training, (given.forward, attributes))
    if grad:
        check_functions(gru_grad, (given.backward(**attributes), attributes), wanted=wanted)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("linear_before_reset", [0, 1])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_gru(direction, linear_before_reset, dtype):
    given = case(direction=direction, lengths=True, dtype=dtype)
    check_gru(given, direction=direction, linear_before_reset=linear_before_reset)


@pytest.mark.parametrize("linear_before_reset", [0, 1])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_gru_with_clip(direction, linear_before_reset):
    given = case(direction=direction, lengths=True)
    check_gru(given, direction=direction, linear_before_reset=linear_before_reset, clip=0.25)


ACTIVATIONS = [
    {"activations": ["Relu", "HardSigmoid"]},
    {"activations": ["HardSigmoid", "Relu"], "activation_alpha": [0.25], "activation_beta": [0.375]},
    {"activations": ["LeakyRelu", "ScaledTanh"], "activation_alpha": [0.125, 1.5], "activation_beta": [0.75]},
    {"activations": ["ScaledTanh", "LeakyRelu"]},
    {"activations": ["Elu", "Softsign"], "activation_alpha": [0.5]},
    {"activations": ["Softsign", "ELU"]},
    {"activations": ["Softplus", "ThresholdedRelu"], "activation_alpha": [0.25]},
    {"activations": ["thresholdedrelu", "softplus"]},
    {"activations": ["Affine", "Affine"], "activation_alpha": [0.5, 0.25], "activation_beta": [0.125]},
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("attributes", ACTIVATIONS, ids=lambda a: "-".join(a["activations"]))
def test_gru_activations(attributes, dtype):
    check_gru(case(dtype=dtype), **attributes)


def test_gru_softplus_is_exact_far_out():
    """Where log(1 + e) would round e away."""
    given = case(dtype=np.float32, scale=0.01)
    given = given._replace(X=given.X * 0 - 1, W=np.full_like(given.W, 6))
    check_gru(given, activations=["Sigmoid", "Softplus"])


@pytest.mark.parametrize("linear_before_reset", [0, 1])
@pytest.mark.parametrize("absent", [("B",), ("SL",), ("Ht0",), ("B", "SL", "Ht0", "dHAll"), ("dHFinal",)])
def test_gru_without_some_inputs(absent, linear_before_reset):
    check_gru(case(lengths=True).without(*absent), linear_before_reset=linear_before_reset)


def test_gru_without_any_gradient():
    check_gru(case().without("dHAll", "dHFinal"))


@pytest.mark.parametrize("name", GRADIENTS)
def test_gru_with_one_result(name):
    check_gru(case(), wanted=[name])


def test_gru_training_without_the_last_state():
    check_functions(gru_training, (case().forward, {}), wanted=["HAll", "ZRH"])


@pytest.mark.parametrize("linear_before_reset", [0, 1])
@pytest.mark.parametrize("sizes", [{"S": 0}, {"N": 0}, {"inputs": 0}, {"H": 0}, {"S": 1, "N": 1, "inputs": 1, "H": 1}])
def test_gru_of_no_size(sizes, linear_before_reset):
    check_gru(case(**sizes), linear_before_reset=linear_before_reset, clip=2.0)


def test_gru_lets_nothing_through_past_a_length():
    given = case(lengths=True)
    X, HAll, ZRH = given.X.copy(), *(a.copy() for a in given.backward()[6:8])
    for n, length in enumerate(given.SL):
        X[length:, n], HAll[length:, :, n], ZRH[length:, :, n] = np.nan, np.nan, np.nan
    arguments = (X, *given.forward[1:], HAll, ZRH, given.dHAll, given.dHFinal)
    check_functions(gru_grad, (arguments, {}))


def test_gru_of_every_kind_in_one_model():
    both = "bidirectional"
    names = ["Relu", "Tanh", "Sigmoid", "LeakyRelu"]
    kinds = [
        (case(lengths=True), {}),
        (case(lengths=True, seed=1).without("B", "dHAll"), {"direction": "reverse", "clip": 0.5}),
        (case(direction=both, seed=2, dtype=np.float32).without("SL", "Ht0", "dHFinal"), {"direction": both}),
        (
            case(direction=both, S=2, H=5, seed=3),
            {"direction": both, "activations": names, "activation_alpha": [0.25], "hidden_size": 5},
        ),
        (case(seed=4).without("Ht0"), {"activations": ["Tanh", "Tanh"], "linear_before_reset": 1, "hidden_size": 2}),
    ]
    check_functions(gru_training, *((c.forward, kw) for c, kw in kinds))
    check_functions(gru_grad, *((c.backward(**kw), kw) for c, kw in kinds))


@pytest.mark.parametrize("constant", ["", "W R B", "W R B SL Ht0 HAll ZRH dHAll dHFinal", "X W R B Ht0 HAll ZRH dHAll"])
@pytest.mark.parametrize("level", ["DISABLE_ALL", "ENABLE_BASIC", "ENABLE_ALL"])
def test_gru_however_onnxruntime_rearranges_it(level, constant):
    """Branches chosen before anything runs: by attributes alone, by absent inputs, by constant ones."""
    both = {"direction": "bidirectional", "clip": 0.5}
    pairs = [
        [(case(lengths=True), {}), (case(lengths=True, seed=1), {"clip": 0.5})],
        [(case(lengths=True), {}), (case(seed=1).without("Ht0", "dHFinal"), {})],
        [(case(lengths=True), {"clip": 0.5}), (case(direction="bidirectional"), both)],
    ]
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{level}")
    for pair in pairs:
        calls = [(c.backward(**kw), kw) for c, kw in pair]
        made = [node_of(gru_grad, *call, f"_{k}") for k, call in enumerate(calls)]
        feeds = {name: array for _, some in made for name, array in some.items()}
        model = add_functions(model_of([node for node, _ in made], feeds))
        fixed = {n: feeds.pop(n) for n in list(feeds) if n.split("_")[0] in constant.split()}
        model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in fixed.items())
        for entry in [i for i in model.graph.input if i.name in fixed]:
            model.graph.input.remove(entry)
        results = iter(session(model, options).run(None, feeds))
        for arguments, attributes in calls:
            for value, bound in zip(*expect(gru_grad, *arguments, **attributes), strict=True):
                assert_close(next(results), value, bound)


def test_gru_in_a_branch_that_onnxruntime_resolves():
    given = case(lengths=True)
    node, feeds = node_of(gru_training, given.forward, {}, "")
    inside = onnx.GraphProto(node=[node], name="g", output=[onnx.ValueInfoProto(name=n) for n in node.output])
    other = onnx.GraphProto(node=[helper.make_node("Neg", ["X"], [f"no_{n}"]) for n in node.output], name="n")
    other.output.extend(onnx.ValueInfoProto(name=f"no_{n}") for n in node.output)
    yes = helper.make_node("Constant", [], ["yes"], value=onnx.numpy_helper.from_array(np.array(True)))
    names = [f"{n}_out" for n in node.output]
    plain = model_of([yes, helper.make_node("If", ["yes"], names, then_branch=inside, else_branch=other)], feeds)
    results = session(add_functions(plain)).run(names, feeds)
    for actual, value, bound in zip(results, *expect(gru_training, *given.forward), strict=True):
        assert_close(actual, value, bound)


def test_gru_of_inputs_whose_rank_is_not_known():
    given = case(lengths=True)
    node, feeds = node_of(gru_grad, given.backward(), {}, "")
    shapes = {f"{name}_shape": np.array(array.shape) for name, array in feeds.items()}
    hiding = [helper.make_node("Reshape", [name, f"{name}_shape"], [f"{name}_hidden"]) for name in feeds]
    node.input[:] = [f"{name}_hidden" for name in node.input]
    model = model_of([*hiding, node], feeds | shapes)
    for shape in model.graph.input[len(feeds) :]:
        shape.type.tensor_type.shape.dim[0].Clear()
    del model.graph.value_info[:], model.graph.output[: len(hiding)]
    model = add_functions(onnx.shape_inference.infer_shapes(model))
    assert not any(v.type.tensor_type.HasField("shape") for v in model.graph.value_info)
    expected, bounds = expect(gru_grad, *given.backward())
    for results in run_everywhere(model, feeds | shapes).values():
        for output, value, bound in zip(gru_grad.outputs, expected, bounds, strict=True):
            assert_close(results[output.name], value, bound, output.name)


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
