"""What onnx knows of the operators: the checker, shape inference and the reference evaluator, on models of each."""

import inspect

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from tests.gru_cases import GRADIENTS, case

import onnxgrad
from onnxgrad.op import OPERATORS
from onnxgrad.schema import MICROSOFT, OWN
from onnxgrad.tensor_types import DTYPES

FLOAT, INT32, INT64 = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64
UNKNOWN = "unknown"
OPSETS = [helper.make_opsetid(domain, version) for domain, version in (("", 21), (MICROSOFT, 1), (OWN, 1))]


def model(op_type, inputs, outputs, constants=None, before=(), **attributes):
    """A model of one node: inputs and outputs as {name: (type, shape)}, names starting with "-" being left out."""
    constants = constants or {}
    node_inputs = ["" if name.startswith("-") else name for name in inputs]
    node_outputs = ["" if name.startswith("-") else name for name in outputs]
    node = helper.make_node(op_type, node_inputs, node_outputs, domain=OPERATORS[op_type].domain, **attributes)
    made = {name for earlier in before for name in earlier.output} | set(constants)
    graph = helper.make_graph(
        [*before, node],
        "one",
        [value(n, *spec) for n, spec in inputs.items() if not n.startswith("-") and n not in made],
        [value(n, *spec) for n, spec in outputs.items() if not n.startswith("-")],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=OPSETS, ir_version=10)


def value(name, element_type, shape):
    return helper.make_tensor_value_info(name, element_type, None if shape is UNKNOWN else shape)


def inferred(proto):
    """{output: (type, shape)} by strict inference alone: what the model itself declares of its outputs is taken off."""
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    for output in bare.graph.output:
        output.type.tensor_type.ClearField("shape")
    result = onnx.shape_inference.infer_shapes(bare, strict_mode=True, data_prop=True, check_type=True)
    found = {}
    for output in result.graph.output:
        tensor = output.type.tensor_type
        dims = tuple(
            d.dim_value if d.HasField("dim_value") else None if d.dim_param.startswith("unk__") else d.dim_param or None
            for d in tensor.shape.dim
        )
        found[output.name] = tensor.elem_type, dims if tensor.HasField("shape") else UNKNOWN
    return found


def agrees(proto, **expected):
    """The checker, which wants a shape for every input of a graph, is content, and inference finds these shapes."""
    if all(i.type.tensor_type.HasField("shape") for i in proto.graph.input):
        onnx.checker.check_model(proto, full_check=True)
    assert {name: shape for name, (_, shape) in inferred(proto).items()} == expected


def gather(shape, indices, dY, constants=None, before=(), dX=("a", "b"), **attributes):
    inputs = {"shape": (INT64, shape), "indices": (INT64, indices), "dY": (FLOAT, dY)}
    return model("GatherGrad", inputs, {"dX": (FLOAT, dX)}, constants, before, **attributes)


def ints(*values):
    return np.array(values, np.int64)


def test_constant_shapes():
    agrees(gather([2], [2, 3], [5, 2, 3], {"shape": ints(5, 4)}, axis=1), dX=(5, 4))
    proto = model(
        "GatherElementsGrad",
        {"dY": (FLOAT, [2, 3]), "shape": (INT64, [2]), "indices": (INT32, [2, 3])},
        {"dX": (FLOAT, [4, 3])},
        {"shape": ints(4, 3)},
    )
    agrees(proto, dX=(4, 3))
    agrees(slice_model({"shape": ints(9, 3)}), dX=(9, 3))
    proto = broadcast_model({"a_shape": ints(2, 1, 3), "b_shape": ints(4, 1)})
    agrees(proto, a_axes=(1,), b_axes=(2,))


def slice_model(
    constants=None, names=("dY", "shape", "starts", "ends", "axes", "steps"), element_type=FLOAT, dX=("a", "b")
):
    kinds = {"dY": (element_type, [2, 3]), "shape": (INT64, [2])}
    inputs = {name: kinds.get(name, (INT32, [1])) for name in names}
    return model("SliceGrad", inputs, {"dX": (element_type, dX)}, constants)


def broadcast_model(constants=None, outputs=("a_axes", "b_axes"), shapes=([3], [2])):
    inputs = {"a_shape": (INT64, shapes[0]), "b_shape": (INT64, shapes[1])}
    return model("BroadcastGradientArgs", inputs, {name: (INT64, ["k" + name]) for name in outputs}, constants)


def test_shapes_read_off_another_tensor():
    """Shape(x): its symbols arrive in dX."""
    before = [helper.make_node("Shape", ["x"], ["shape"])]
    proto = gather([2], [3], ["batch", 3], before=before, axis=1)
    proto.graph.input.append(value("x", FLOAT, ["batch", 7]))
    agrees(proto, dX=("batch", 7))
    proto = slice_model()
    proto.graph.node.insert(0, before[0])
    del proto.graph.input[1]
    proto.graph.input.append(value("x", FLOAT, ["rows", "columns"]))
    agrees(proto, dX=("rows", "columns"))
    proto = broadcast_model()
    proto.graph.node.insert(0, helper.make_node("Shape", ["x"], ["a_shape"]))
    del proto.graph.input[0]
    proto.graph.input.append(value("x", FLOAT, ["rows", "columns"]))
    agrees(proto, a_axes=(None,), b_axes=(None,))


def test_shapes_that_are_computed():
    """Only the length of `shape` is known, so only the rank, and what dY tells around the axis."""
    agrees(gather([2], [2, 3], ["batch", 2, 3], axis=1), dX=("batch", None))
    agrees(gather([2], [2, 3], ["batch", 2, 3], axis=-1), dX=("batch", None))
    agrees(gather([2], [], [6], axis=0), dX=(None, 6))
    agrees(gather([2], UNKNOWN, UNKNOWN), dX=(None, None))
    agrees(gather(["r"], UNKNOWN, UNKNOWN), dX=UNKNOWN)
    agrees(gather(UNKNOWN, UNKNOWN, UNKNOWN), dX=UNKNOWN)
    agrees(broadcast_model(shapes=(["p"], UNKNOWN)), a_axes=(None,), b_axes=(None,))
    agrees(slice_model(), dX=(None, None))


GRU_INPUTS = {"X": ["s", "n", 3], "W": [1, 12, 3], "R": [1, 12, 4], "B": [1, 24], "SL": ["n"], "Ht0": [1, "n", 4]}
STATES = {"HAll": ["s", 1, "n", 4], "ZRH": ["s", 1, "n", 12], "dHAll": ["s", 1, "n", 4], "dHFinal": [1, "n", 4]}
TRAINING = {"HAll": ("s", 1, "n", 4), "HFinal": (1, "n", 4), "ZRH": ("s", 1, "n", 12)}
GRADIENT_SHAPES = dict(zip(GRADIENTS, [("s", "n", 3), (1, 12, 3), (1, 12, 4), (1, 24), (1, "n", 4)], strict=True))


def gru(op_type, outputs, missing=(), changed=None, **attributes):
    shapes = {**GRU_INPUTS, **(STATES if op_type == "GRUGrad" else {}), **(changed or {})}
    inputs = {("-" if n in missing else "") + n: (INT32 if n == "SL" else FLOAT, s) for n, s in shapes.items()}
    return model(
        op_type,
        inputs,
        {n: (FLOAT, list("abcd")[: 4 if n in ("HAll", "ZRH") else rank(n)]) for n in outputs},
        **attributes,
    )


def rank(name):
    return {"dB": 2}.get(name, 3)


def test_gru_shapes():
    agrees(gru("GRUTraining", TRAINING), **TRAINING)
    agrees(gru("GRUTraining", ["HAll", "-HFinal", "ZRH"], ["B", "SL"]), HAll=TRAINING["HAll"], ZRH=TRAINING["ZRH"])
    both = {"W": [2, 12, 3], "R": [2, 12, 4], "B": [2, 24], "Ht0": [2, "n", 4]}
    proto = gru("GRUTraining", TRAINING, changed=both, direction="bidirectional")
    agrees(proto, HAll=("s", 2, "n", 4), HFinal=(2, "n", 4), ZRH=("s", 2, "n", 12))
    agrees(gru("GRUGrad", GRADIENTS), **GRADIENT_SHAPES)
    agrees(gru("GRUGrad", ["-dX", "-dW", "-dR", "dB"], ["B", "SL", "Ht0", "dHAll"]), dB=(1, 24))
    agrees(gru("GRUGrad", ["dX", "-dW", "-dR", "-dB", "dH0"]), dX=("s", "n", 3), dH0=(1, "n", 4))


def test_gru_shapes_partly_known():
    """hidden_size says what an R of unknown shape does not."""
    unknown = {n: UNKNOWN for n in GRU_INPUTS if n != "X"}
    proto = gru("GRUTraining", TRAINING, changed=unknown, hidden_size=4)
    agrees(proto, HAll=("s", 1, "n", 4), HFinal=(1, "n", 4), ZRH=("s", 1, "n", 12))
    unknown["X"] = UNKNOWN
    agrees(
        gru("GRUTraining", TRAINING, changed=unknown),
        HAll=(None, 1, None, None),
        HFinal=(1, None, None),
        ZRH=(None, 1, None, None),
    )


OUT = {"dX": (FLOAT, ["a", "b"])}
WRONG_RANKS = [
    gather([2], [2, 3], [5, 2], {"shape": ints(5, 4)}, axis=1),
    gather([2], [2, 3], [5, 2, 3, 1], {"shape": ints(5, 4)}, axis=1),
    gather([2], [2, 3], ["batch", 2], axis=1),
    gather([2], [2, 3], ["batch", 2, 3, 4], axis=1),
    gather([2, 1], UNKNOWN, UNKNOWN),
    gather([0], UNKNOWN, UNKNOWN, dX=()),
    broadcast_model(shapes=([3, 1], [2])),
    model("SliceGrad", {"dY": (FLOAT, [2]), "s": (INT64, [2]), "b": (INT64, [1]), "e": (INT64, [1])}, OUT),
    model("SliceGrad", {"dY": (FLOAT, [2, 2]), "s": (INT64, [2]), "b": (INT64, [1, 1]), "e": (INT64, [1])}, OUT),
    model("GatherElementsGrad", {"dY": (FLOAT, [2]), "s": (INT64, [2]), "i": (INT64, [2, 3])}, OUT),
    model("GatherElementsGrad", {"dY": (FLOAT, [2, 3]), "s": (INT64, [3]), "i": (INT64, [2, 3])}, OUT),
    gru("GRUTraining", TRAINING, changed={"X": ["s", "n"]}),
    gru("GRUTraining", TRAINING, changed={"W": [12, 3]}),
    gru("GRUTraining", TRAINING, changed={"R": [1, 12, 4, 1]}),
    gru("GRUTraining", TRAINING, changed={"B": [24]}),
    gru("GRUTraining", TRAINING, changed={"SL": ["n", 1]}),
    gru("GRUTraining", TRAINING, changed={"Ht0": ["n", 4]}),
    gru("GRUGrad", GRADIENTS, changed={"X": ["s", "n"]}),
    gru("GRUGrad", GRADIENTS, changed={"HAll": ["s", "n", 4]}),
    gru("GRUGrad", GRADIENTS, changed={"ZRH": [1]}),
    gru("GRUGrad", GRADIENTS, changed={"dHFinal": ["n", 4]}),
]
CONTRADICTIONS = [
    gather([2], [2, 3], [7, 2, 3], {"shape": ints(5, 4)}, axis=1),
    gather([2], UNKNOWN, UNKNOWN, {"shape": ints(5, -4)}),
    gather([1], [2], [2], {"shape": ints(5)}, dX=("a",), axis=1),
    gather([2], UNKNOWN, UNKNOWN, axis=2),
    broadcast_model({"a_shape": ints(2, 3), "b_shape": ints(4)}),
    broadcast_model({"a_shape": ints(-1), "b_shape": ints(4)}),
    slice_model({"shape": ints(-9, 3)}),
    gru("GRUTraining", TRAINING, changed={"R": [1, 9, 4]}),
    gru("GRUTraining", TRAINING, direction="sideways"),
    gru("GRUTraining", TRAINING, direction="bidirectional"),
    gru("GRUTraining", TRAINING, hidden_size=5),
    gru("GRUGrad", GRADIENTS, changed={"ZRH": ["s", 1, "n", 4]}),
]


@pytest.mark.parametrize("proto", WRONG_RANKS, ids=lambda p: p.graph.node[-1].op_type)
def test_strict_inference_refuses_wrong_ranks(proto):
    refuses(proto)


@pytest.mark.parametrize("proto", CONTRADICTIONS, ids=lambda p: p.graph.node[-1].op_type)
def test_strict_inference_refuses_dimensions_and_attributes_that_contradict(proto):
    refuses(proto)


def refuses(proto):
    name = proto.graph.node[-1].op_type
    with pytest.raises((onnx.shape_inference.InferenceError, ValueError), match=rf"(?s){name}: "):
        inferred(proto)


@pytest.mark.parametrize(
    "proto",
    [
        model("GatherGrad", {"s": (INT64, [1]), "i": (FLOAT, [1]), "dY": (FLOAT, [1])}, {"dX": (FLOAT, ["a"])}),
        model("GatherGrad", {"s": (INT64, [1]), "i": (INT64, [1]), "dY": (INT64, [1])}, {"dX": (INT64, ["a"])}),
        slice_model(element_type=TensorProto.STRING),
        gather([1], [1], [1], nonsense=1),
        gru("GRUTraining", ["HAll", "HFinal"]),
        model("GatherGrad", {"s": (INT64, [1]), "i": (INT64, [1])}, {"dX": (FLOAT, ["a"])}),
    ],
)  # fmt: skip
def test_the_checker_refuses_wrong_types_and_attributes(proto):
    with pytest.raises((onnx.checker.ValidationError, onnx.shape_inference.InferenceError)):
        onnx.checker.check_model(proto, full_check=True)


def test_an_input_of_unknown_type_is_no_error_where_inference_is_lenient():
    proto = gather([2], [3], UNKNOWN, before=[helper.make_node("Mystery", ["x"], ["dY"], domain="elsewhere")])
    proto.graph.input.append(value("x", FLOAT, [1]))
    proto.opset_import.append(helper.make_opsetid("elsewhere", 1))
    result = onnx.shape_inference.infer_shapes(proto)
    assert result.graph.output[0].name == "dX"


def test_a_very_long_shape_is_not_spelled_out():
    """The rank of dX is the length of `shape`: a model may claim any, so it must not cost memory."""
    with pytest.raises((onnx.shape_inference.InferenceError, ValueError), match="GatherGrad: "):
        inferred(gather([1000], UNKNOWN, UNKNOWN))


@pytest.mark.parametrize("name", OPERATORS)
def test_schema_matches_the_signature(name):
    op, schema = OPERATORS[name], onnx.defs.get_schema(name, 1, OPERATORS[name].domain)
    parameters = inspect.signature(op.body).parameters
    assert [i.name for i in schema.inputs] == list(parameters)[: len(schema.inputs)]
    assert sorted([*schema.attributes, *[i.name for i in schema.inputs]]) == sorted(set(parameters) - {"outputs"})
    assert schema.doc == inspect.getdoc(op.body)
    for attribute in schema.attributes.values():
        default = parameters[attribute.name].default
        assert not attribute.required
        if default is not None:
            given = helper.get_attribute_value(attribute.default_value)
            if isinstance(default, float):
                default = float(np.float32(default))  # as wide as an attribute is
            assert (given.decode() if isinstance(given, bytes) else given) == default


def evaluate(proto, **feeds):
    return ReferenceEvaluator(proto, new_ops=onnxgrad.reference_ops()).run(None, feeds)


def test_reference_evaluator_on_four():
    dY = np.ones((3, 4), np.float32)
    (dX,) = evaluate(gather(["r"], ["k"], ["k", 4]), shape=ints(5, 4), indices=ints(1, -1, 1), dY=dY)
    assert dX.sum(1).tolist() == [0, 8, 0, 0, 4]
    proto = gather(["r"], ["k"], [4, "k"], axis=1)
    (dX,) = evaluate(proto, shape=ints(4, 5), indices=ints(1, -1, 1), dY=dY.T)
    assert dX.sum(0).tolist() == [0, 8, 0, 0, 4]
    proto = model(
        "GatherElementsGrad",
        {"dY": (FLOAT, [2, 3]), "shape": (INT64, [2]), "indices": (INT32, [2, 3])},
        {"dX": (FLOAT, ["a", "b"])},
        axis=-1,
    )
    feeds = {"dY": dY[:2, :3], "shape": ints(4, 5), "indices": np.array([[0, 0, 4], [1, -1, 2]], np.int32)}
    assert evaluate(proto, **feeds)[0].tolist() == [[2, 0, 0, 0, 1], [0, 1, 1, 0, 1], [0] * 5, [0] * 5]
    assert [a.tolist() for a in evaluate(broadcast_model(), a_shape=ints(2, 1, 3), b_shape=ints(4, 1))] == [[1], [2, 0]]
    assert evaluate(broadcast_model(outputs=("-a_axes", "b_axes")), a_shape=ints(2, 1, 3), b_shape=ints(4, 1))[
        0
    ].tolist() == [2, 0]
    assert evaluate(broadcast_model(outputs=("a_axes",)), a_shape=ints(2, 1, 3), b_shape=ints(4, 1))[0].tolist() == [1]


@pytest.mark.parametrize("name", ["float", "double", "int8", "bool", "uint64", "complex64", "bfloat16", "float8e4m3fn"])
def test_reference_evaluator_on_slices(name):
    """axes left out in the middle."""
    element_type = helper.np_dtype_to_tensor_dtype(DTYPES[name])
    proto = slice_model(names=("dY", "shape", "starts", "ends", "-axes", "steps"), element_type=element_type)
    onnx.checker.check_model(proto, full_check=True)
    dY = np.ones((2, 3)).astype(DTYPES[name])
    one = np.array([1], np.int32)
    (dX,) = evaluate(proto, dY=dY, shape=ints(4, 3), starts=3 * one, ends=-one * 2**30, steps=-2 * one)
    assert dX.dtype == dY.dtype and dX.astype(bool).sum(1).tolist() == [0, 3, 0, 3]


@pytest.mark.parametrize("missing", [(), ("B",), ("SL",), ("Ht0",), ("B", "SL"), ("B", "SL", "Ht0")], ids="-".join)
@pytest.mark.parametrize("outputs", [("HAll", "HFinal", "ZRH"), ("HAll", "-HFinal", "ZRH")], ids=str)
def test_reference_evaluator_on_gru_training(missing, outputs):
    given = case(S=3, N=2, inputs=3, H=4, lengths=True, dtype=np.float32).without(*missing)
    attributes = {"linear_before_reset": 1, "direction": "reverse", "clip": 0.5, "activations": ["HardSigmoid", "Elu"],
                  "activation_alpha": [0.25, 0.5], "activation_beta": [0.5], "hidden_size": 4}  # fmt: skip
    feeds = {n: a for n, a in zip(GRU_INPUTS, given.forward, strict=True) if a is not None}
    results = evaluate(gru("GRUTraining", outputs, missing, **attributes), **feeds)
    expected = onnxgrad.gru_training.definition(*given.forward, **attributes)
    for got, want in zip(results, [e for n, e in zip(outputs, expected, strict=True) if n[0] != "-"], strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "missing", [(), ("B", "SL", "Ht0"), ("SL", "dHAll"), ("dHFinal",), ("dHAll", "dHFinal")], ids="-".join
)
@pytest.mark.parametrize("left_out", [(), ("dX",), ("dW", "dR"), ("dH0",), ("dX", "dW", "dR", "dH0")], ids=str)
def test_reference_evaluator_on_gru_grad(missing, left_out):
    given = case(S=3, N=2, inputs=3, H=4, lengths=True, dtype=np.float32).without(*missing)
    names = [*GRU_INPUTS, *STATES]
    feeds = {n: a for n, a in zip(names, given.backward(), strict=True) if a is not None}
    outputs = [("-" if n in left_out else "") + n for n in GRADIENTS]
    results = evaluate(gru("GRUGrad", outputs, missing), **feeds)
    expected = onnxgrad.gru_grad.definition(*given.backward(), outputs=[n for n in GRADIENTS if n not in left_out])
    for got, want in zip(results, [e for e in expected if e is not None], strict=True):
        np.testing.assert_array_equal(got, want)
