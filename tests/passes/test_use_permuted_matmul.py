"""Products of a training graph as PermutedMatMul: what is taken in, what is left alone, and the same results."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import onnxgrad
from onnxgrad.passes import use_permuted_matmul as products
from onnxgrad.passes.draft import Draft
from onnxgrad.schema import MICROSOFT
from onnxgrad.train import devices, losses, optim

RNG = np.random.default_rng(0)
FLOAT = TensorProto.FLOAT
DOUBLES = {"X": [2, 3], "W": [3, 4], "Y": [2, 4]}


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch):
    """Products of a few numbers, which would be left alone, show what there is to see as well as large ones."""
    monkeypatch.setattr(products, "FEWEST", 1)


def model_of(nodes, inputs, outputs=("Y",), initializers=()):
    """A model whose inputs are {name: shape}, with types and shapes inferred."""
    kinds = [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in inputs.items()]
    results = [onnx.ValueInfoProto(name=name) for name in outputs]
    graph = helper.make_graph(nodes, "g", kinds, results, initializer=list(initializers))
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=9)
    return onnx.shape_inference.infer_shapes(model)


def run(model, feeds):
    options = onnxgrad.register()
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feeds)


def changed(model, feeds=None):
    """The nodes of the graph with its products changed, which computes the same."""
    made = ir.from_proto(model)
    found = products.use_permuted_matmul(Draft(made, "test"))
    proto = ir.to_proto(made)
    onnx.checker.check_model(proto)
    if feeds is None:
        feeds = {
            i.name: RNG.standard_normal([d.dim_value or 3 for d in i.type.tensor_type.shape.dim]).astype(np.float32)
            for i in model.graph.input
        }
    for before, after in zip(run(model, feeds), run(proto, feeds), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-4)
    assert found == sum(n.op_type == "PermutedMatMul" for n in proto.graph.node)
    return list(proto.graph.node)


def attributes(node):
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def test_a_linear_layer_is_one_node():
    nodes = [helper.make_node("MatMul", ["X", "W"], ["P"]), helper.make_node("Add", ["b", "P"], ["Y"])]
    (node,) = changed(model_of(nodes, {"X": ["N", 4, 5], "W": [5, 6], "b": [6]}))
    assert list(node.input) == ["X", "W", "b"] and list(node.output) == ["Y"] and not attributes(node)


def test_heads_of_attention_are_not_copied():
    nodes = [
        helper.make_node("Transpose", ["Q"], ["q"], perm=[0, 2, 1, 3]),
        helper.make_node("Transpose", ["K"], ["k"], perm=[0, 2, 1, 3]),
        helper.make_node("Transpose", ["k"], ["t"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "t"], ["P"]),
        helper.make_node("Transpose", ["P"], ["Y"], perm=[0, 2, 1, 3]),
    ]
    (node,) = changed(model_of(nodes, {"Q": [2, 5, 3, 4], "K": [2, 6, 3, 4]}))
    assert attributes(node) == {"permA": [0, 2, 1, 3], "permB": [0, 2, 3, 1], "permY": [0, 2, 1, 3]}


@pytest.mark.parametrize("transA", [0, 1])
@pytest.mark.parametrize("transB", [0, 1])
def test_gemm(transA, transB):
    nodes = [helper.make_node("Gemm", ["A", "B", "C"], ["Y"], transA=transA, transB=transB, alpha=0.5)]
    shapes = {"A": [5, 4] if transA else [4, 5], "B": [6, 5] if transB else [5, 6], "C": [6]}
    (node,) = changed(model_of(nodes, shapes))
    assert attributes(node)["alpha"] == 0.5 and ("permA" in attributes(node)) == bool(transA)


@pytest.mark.parametrize(("transA", "transB"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_products_that_onnxruntime_has_fused(transA, transB):
    nodes = [
        helper.make_node("FusedMatMul", ["A", "B"], ["Y"], domain=MICROSOFT, transA=transA, transB=transB, alpha=0.5)
    ]
    A, B = [2, 3, 5, 4] if transA else [2, 3, 4, 5], [2, 3, 6, 5] if transB else [2, 3, 5, 6]
    model = model_of(nodes, {"A": A, "B": B})
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("Y", FLOAT, [2, 3, 4, 6]))
    (node,) = changed(model)
    assert node.op_type == "PermutedMatMul" and attributes(node)["alpha"] == 0.5


def test_fused_products_of_other_axes_stay():
    node = ir.Node(MICROSOFT, "FusedMatMul", [None, None], [ir.AttrInt64("transBatchA", 1)])
    assert not products._is_product(node)


@pytest.mark.parametrize(
    ("C", "more"), [([4, 1], {}), ([1], {}), ([], {}), ([6], {"beta": 2.0})], ids=["rows", "one", "scalar", "beta"]
)
def test_gemm_that_adds_something_else_stays(C, more):
    nodes = [helper.make_node("Gemm", ["A", "B", "C"], ["Y"], **more)]
    assert [n.op_type for n in changed(model_of(nodes, {"A": [4, 5], "B": [5, 6], "C": C}))] == ["Gemm"]


def test_what_others_use_stays():
    nodes = [
        helper.make_node("Transpose", ["X"], ["T"], perm=[1, 0]),
        helper.make_node("MatMul", ["T", "W"], ["P"]),
        helper.make_node("Add", ["P", "b"], ["Y"]),
        helper.make_node("Neg", ["T"], ["Z"]),
        helper.make_node("Relu", ["P"], ["R"]),
    ]
    made = changed(model_of(nodes, {"X": [5, 4], "W": [5, 6], "b": [6]}, ("Y", "Z", "R")))
    assert sorted(n.op_type for n in made) == ["Add", "Neg", "PermutedMatMul", "Relu", "Transpose"]


def test_a_result_of_the_model_keeps_its_name():
    nodes = [helper.make_node("MatMul", ["X", "W"], ["P"]), helper.make_node("Transpose", ["P"], ["Y"], perm=[1, 0])]
    made = changed(model_of(nodes, {"X": [4, 5], "W": [5, 6]}, ("Y", "P")))
    assert [n.op_type for n in made] == ["PermutedMatMul", "Transpose"]


@pytest.mark.parametrize("shapes", [{"X": [5], "W": [5, 6]}, {"X": [4, 5], "W": [5]}], ids=str)
def test_products_with_vectors_stay(shapes):
    assert [n.op_type for n in changed(model_of([helper.make_node("MatMul", ["X", "W"], ["Y"])], shapes))] == ["MatMul"]


def test_an_add_that_is_no_bias_stays():
    nodes = [helper.make_node("MatMul", ["X", "W"], ["P"]), helper.make_node("Add", ["P", "b"], ["Y"])]
    for bias in ([1], [4, 6], [4, 1]):
        assert len(changed(model_of(nodes, {"X": [4, 5], "W": [5, 6], "b": bias}))) == 2


SCALE = {
    "a constant": [helper.make_node("Constant", [], ["s"], value_float=0.25)],
    "a power": [
        helper.make_node("Constant", [], ["base"], value_float=16.0),
        helper.make_node("Constant", [], ["exponent"], value_float=-0.5),
        helper.make_node("Pow", ["base", "exponent"], ["s"]),
    ],
}


@pytest.mark.parametrize("scale", SCALE)
def test_constant_factors_before_and_after(scale):
    nodes = [
        *SCALE[scale],
        helper.make_node("Mul", ["s", "X"], ["x"]),
        helper.make_node("MatMul", ["x", "W"], ["P"]),
        helper.make_node("Div", ["P", "s"], ["Q"]),
        helper.make_node("Mul", ["Q", "s"], ["R"]),
        helper.make_node("Add", ["R", "b"], ["Y"]),
    ]
    (node,) = changed(model_of(nodes, {"X": [4, 5], "W": [5, 6], "b": [6]}))
    assert list(node.input) == ["X", "W", "b"] and attributes(node) == {"alpha": 0.25}


def test_factors_that_are_no_constants_stay():
    nodes = [helper.make_node("MatMul", ["X", "W"], ["P"]), helper.make_node("Mul", ["P", "s"], ["Y"])]
    assert len(changed(model_of(nodes, {"X": [4, 5], "W": [5, 6], "s": []}))) == 2


def test_a_factor_that_adds_an_axis_stays():
    nodes = [
        helper.make_node("Constant", [], ["s"], value=numpy_helper.from_array(np.full((1, 1, 1), 2.0, np.float32))),
        helper.make_node("MatMul", ["X", "W"], ["P"]),
        helper.make_node("Mul", ["P", "s"], ["Y"]),
    ]
    assert "Mul" in [n.op_type for n in changed(model_of(nodes, {"X": [4, 5], "W": [5, 6]}))]


def test_twice_the_product_is_no_bias():
    nodes = [helper.make_node("MatMul", ["X", "W"], ["P"]), helper.make_node("Add", ["P", "P"], ["Y"])]
    assert len(changed(model_of(nodes, {"X": [4, 5], "W": [5, 6]}))) == 2


def test_columns_of_unknown_number_have_no_bias():
    nodes = [helper.make_node("MatMul", ["X", "W"], ["P"]), helper.make_node("Add", ["P", "b"], ["Y"])]
    assert len(changed(model_of(nodes, {"X": [4, 5], "W": [5, None], "b": [None]}))) == 2


def test_axes_that_end_up_neither_rows_nor_columns_are_moved_before():
    nodes = [helper.make_node("Transpose", ["X"], ["T"], perm=[2, 0, 1]), helper.make_node("MatMul", ["T", "W"], ["Y"])]
    made = changed(model_of(nodes, {"X": [4, 5, 3], "W": [5, 6]}))
    assert [n.op_type for n in made] == ["Transpose", "PermutedMatMul"]


@pytest.mark.parametrize(
    ("X", "W", "stays"),
    [
        ([64, 64], [64, 31], True),
        ([64, 31], [31, 64], True),
        ([31, 64], [64, 64], True),
        ([4, 8, 64], [64, 64], False),
        ([4, 7, 64], [64, 64], True),
        ([4, 8, 64], [4, 64, 64], True),
        (["N", 64], [64, 64], False),
    ],
    ids=str,
)
def test_small_products_stay(X, W, stays, monkeypatch):
    monkeypatch.setattr(products, "FEWEST", 32)
    made = ir.from_proto(model_of([helper.make_node("MatMul", ["X", "W"], ["Y"])], {"X": X, "W": W}))
    assert products.use_permuted_matmul(Draft(made, "test")) == (0 if stays else 1)


def test_other_types_stay():
    X, W, Y = (helper.make_tensor_value_info(n, TensorProto.DOUBLE, s) for n, s in DOUBLES.items())
    graph = helper.make_graph([helper.make_node("MatMul", ["X", "W"], ["Y"])], "g", [X, W], [Y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    assert products.use_permuted_matmul(Draft(ir.from_proto(onnx.shape_inference.infer_shapes(model)), "test")) == 0


def _curve_by_hand(X, target, weights):
    """The losses of the same training by PyTorch, in float64."""
    W1, b1, W2 = (torch.tensor(w / 5, requires_grad=True) for w in weights.values())
    optimizer = torch.optim.Adam([W1, b1, W2], lr=1e-2)
    curve = []
    for _ in range(20):
        loss = torch.mean((torch.tanh(torch.tensor(X).double() @ W1 + b1) @ W2 - torch.tensor(target)) ** 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_a_trainer_learns_the_same_either_way(own, monkeypatch):
    """Whose products is the processor's matter; here both are made to happen, and the graph shows which it was."""
    monkeypatch.setattr(devices.Cpu, "own_products", own)
    rng = np.random.default_rng(1)
    weights = {"W1": rng.standard_normal((20, 30)), "b1": np.zeros(30), "W2": rng.standard_normal((30, 5))}
    nodes = [
        helper.make_node("Gemm", ["X", "W1", "b1"], ["H"]),
        helper.make_node("Tanh", ["H"], ["T"]),
        helper.make_node("MatMul", ["T", "W2"], ["Y"]),
    ]
    constants = [numpy_helper.from_array((w / 5).astype(np.float32), name) for name, w in weights.items()]
    trainer = onnxgrad.Trainer(
        model_of(nodes, {"X": ["N", 20]}, initializers=constants), losses.MSE("Y"), optim.Adam(lr=1e-2)
    )
    kinds = {node.op_type for node in trainer._model.step.model.graph}
    assert ("PermutedMatMul" in kinds) == own and ("Gemm" in kinds) != own
    X, target = rng.standard_normal((64, 20)).astype(np.float32), rng.standard_normal((64, 5)).astype(np.float32)
    curve = [trainer.step({"X": X, "target": target}) for _ in range(20)]
    np.testing.assert_allclose(curve, _curve_by_hand(X, target, weights), rtol=1e-5)
