"""GRUTraining and GRUGrad as ONNX functions, on stock onnxruntime and in onnx.reference."""

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from tests.checks import assert_close, expect
from tests.functions.models import FLOATS, check_functions, model_of, node_of, run_everywhere, session
from tests.gru_cases import GRADIENTS, case

from onnxgrad import add_functions, gru_grad, gru_training


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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("name", GRADIENTS)
def test_gru_with_one_result(name):
    check_gru(case(), wanted=[name])


def test_gru_training_without_the_last_state():
    check_functions(gru_training, (case().forward, {}), wanted=["HAll", "ZRH"])


@pytest.mark.slow
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


BAD_LENGTHS = [5, 6, 2**31 - 1, -1, -4, -5, -(2**31)]  # of a case of 4 steps


@pytest.mark.parametrize("length", BAD_LENGTHS)
@pytest.mark.parametrize("op", [gru_training, gru_grad], ids=lambda op: op.name)
def test_gru_refuses_lengths_that_there_are_not(op, length):
    """Also where one function serves nodes with lengths and without."""
    given, whole = case(lengths=True, dtype=np.float32), case(dtype=np.float32)
    calls = [c.forward if op is gru_training else c.backward() for c in (given, whole)]
    for count in (1, 2):
        made = [node_of(op, call, {}, f"_{k}") for k, call in enumerate(calls[:count])]
        feeds = {name: array for _, some in made for name, array in some.items()}
        model = add_functions(model_of([node for node, _ in made], feeds))
        good, bad = feeds["SL_0"], feeds["SL_0"].copy()
        bad[1] = length
        stock, reference = session(model, quiet()), ReferenceEvaluator(model)
        with pytest.raises(Exception, match=r"indices element out of data bounds"):
            stock.run(None, feeds | {"SL_0": bad})
        with pytest.raises(IndexError, match=r"out of bounds"):
            reference.run(None, feeds | {"SL_0": bad})
        stock.run(None, feeds | {"SL_0": good})


def test_gru_refuses_constant_lengths_that_there_are_not():
    node, feeds = node_of(gru_training, case(lengths=True, dtype=np.float32).forward, {}, "")
    model = add_functions(model_of([node], feeds))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.full_like(feeds.pop("SL"), 5), "SL"))
    model.graph.input.remove(next(i for i in model.graph.input if i.name == "SL"))
    with pytest.raises(Exception, match=r"indices element out of data bounds"):
        session(model, quiet()).run(None, feeds)


def quiet() -> onnxruntime.SessionOptions:
    """Errors are raised; they need not be printed too."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return options


@pytest.mark.slow
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
@pytest.mark.slow
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
