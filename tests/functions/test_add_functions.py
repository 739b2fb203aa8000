"""add_functions on models of all kinds: subgraphs, functions of their own, old opsets, paths."""

from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import TensorProto, helper
from tests.checks import raises
from tests.functions.models import model_of, run_everywhere

from onnxgrad import add_functions


def gather_node(shape: str = "shape", **attributes: Any) -> Any:
    return helper.make_node("GatherGrad", [shape, "indices", "dY"], ["dX"], domain="com.microsoft", **attributes)


FEEDS = {"shape": np.array([3, 2]), "indices": np.array([0, -1, 0]), "dY": np.arange(6, dtype=np.float32).reshape(3, 2)}
EXPECTED = [[4.0, 6.0], [0.0, 0.0], [2.0, 3.0]]


def test_the_model_given_stays_as_it_is():
    given = model_of([gather_node()], FEEDS)
    before = given.SerializeToString(deterministic=True)
    assert add_functions(given).functions
    assert given.SerializeToString(deterministic=True) == before


def test_a_model_without_our_operators_comes_back_unchanged():
    given = model_of([helper.make_node("Neg", ["dY"], ["y"])], FEEDS, opset=13)
    assert add_functions(given) == given


def test_nothing_is_added_twice():
    once = add_functions(model_of([gather_node()], FEEDS))
    assert add_functions(once) == once


def test_a_function_of_ours_keeps_up_with_its_nodes():
    """A node that came later may use the operator in another way."""
    model = add_functions(model_of([gather_node()], FEEDS))
    other = gather_node(axis=1)
    other.input[2], other.output[0] = "dY2", "dX2"
    model.graph.node.append(other)
    model.graph.input.append(helper.make_tensor_value_info("dY2", TensorProto.FLOAT, [3, 3]))
    model.graph.output.append(helper.make_tensor_value_info("dX2", TensorProto.FLOAT, [3, 2]))
    feeds = {**FEEDS, "indices": np.array([0, -1, 0]), "dY2": np.ones((3, 3), np.float32)}
    for results in run_everywhere(add_functions(model), feeds).values():
        assert results["dX"].tolist() == EXPECTED
        assert results["dX2"].tolist() == [[2, 1]] * 3


@pytest.mark.parametrize("types", [["float32"], ["float16"], ["float32", "float64"], ["float32", "float16"]])
def test_a_function_asks_for_its_type_only_where_the_model_leaves_it_open(types):
    """onnxruntime 1.31 folds the condition of an If that asks, and loses values, or itself, where Ifs are in Ifs."""
    nodes, feeds = [], {}
    for kind in types:
        nodes.append(helper.make_node("TanhGrad", [f"dY_{kind}", f"Y_{kind}"], [f"dX_{kind}"], domain="com.microsoft"))
        feeds |= {f"dY_{kind}": np.array([0.3, 2], kind), f"Y_{kind}": np.array([0.5, -0.25], kind)}
    model = add_functions(model_of(nodes, feeds))
    asks = any(node.op_type == "If" for node in model.functions[0].node)
    assert asks == (types == ["float32", "float16"])
    for results in run_everywhere(model, feeds).values():
        for kind in types:
            dY, Y = (feeds[f"{name}_{kind}"].astype(np.float64) for name in ("dY", "Y"))
            np.testing.assert_allclose(results[f"dX_{kind}"], (dY * (1 - Y**2)).astype(kind), rtol=1e-6)
    for value in [*model.graph.input, *model.graph.value_info, *model.graph.output]:
        value.type.tensor_type.ClearField("elem_type")
    assert any(node.op_type == "If" for node in add_functions(model).functions[0].node)


def test_a_function_asks_for_a_rank_only_where_the_model_leaves_it_open():
    feeds = {"dY": np.ones((1, 2, 5, 6), np.float32), "X": np.ones((1, 2, 3, 4), np.float32)}
    feeds["grid"] = np.full((1, 5, 6, 2), 0.25, np.float32)
    node = helper.make_node("GridSampleGrad", ["dY", "X", "grid"], ["dX", "dgrid"], domain="onnxgrad")
    model = add_functions(model_of([node], feeds))
    assert not any(node.op_type == "If" for node in model.functions[0].node)
    for results in run_everywhere(model, feeds).values():
        assert results["dX"].sum() == pytest.approx(60)
    for value in model.graph.input:
        value.type.tensor_type.ClearField("shape")
    assert any(node.op_type == "If" for node in add_functions(model).functions[0].node)


def test_a_function_of_the_model_itself_stays():
    own = add_functions(model_of([gather_node()], FEEDS))
    own.functions[0].doc_string = "my own"
    assert add_functions(own) == own


@pytest.mark.parametrize("condition", [True, False])
def test_nodes_in_subgraphs_of_if(condition):
    branches = []
    for name in ("then_branch", "else_branch"):
        inside = gather_node()
        inside.output[0] = f"{name}_dX"
        branches.append(helper.make_graph([inside], name, [], [onnx.ValueInfoProto(name=f"{name}_dX")]))
    branches[1].node.append(helper.make_node("Neg", ["else_branch_dX"], ["negated"]))
    branches[1].output[0].name = "negated"
    node = helper.make_node("If", ["condition"], ["dX"], then_branch=branches[0], else_branch=branches[1])
    feeds = {**FEEDS, "condition": np.array(condition)}
    for results in run_everywhere(add_functions(model_of([node], feeds)), feeds).values():
        assert results["dX"].tolist() == ((1 if condition else -1) * np.array(EXPECTED)).tolist()


def test_nodes_in_the_body_of_loop():
    inside = gather_node()
    go_on = helper.make_node("Identity", ["cond"], ["go_on"])
    add = helper.make_node("Add", ["total", "dX"], ["new"])
    typed = [("i", TensorProto.INT64), ("cond", TensorProto.BOOL), ("total", TensorProto.FLOAT)]
    inputs = [helper.make_tensor_value_info(n, t, [3, 2] if n == "total" else []) for n, t in typed]
    outputs = [onnx.ValueInfoProto(name=n) for n in ("go_on", "new")]
    body = helper.make_graph([inside, go_on, add], "body", inputs, outputs)
    node = helper.make_node("Loop", ["count", "go", "start"], ["sum"], body=body)
    feeds = {**FEEDS, "count": np.array(2), "go": np.array(True), "start": np.zeros((3, 2), np.float32)}
    model = model_of([node], feeds)
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("sum", TensorProto.FLOAT, [3, 2]))
    for results in run_everywhere(add_functions(model), feeds).values():
        assert results["sum"].tolist() == (2 * np.array(EXPECTED)).tolist()


@pytest.mark.parametrize("passed_on", [False, True])
def test_nodes_in_functions_of_the_model(passed_on):
    inside = gather_node()
    if passed_on:
        axis = inside.attribute.add(name="axis", ref_attr_name="along")
        axis.type = onnx.AttributeProto.INT
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    function = helper.make_function("mine", "F", list(FEEDS), ["dX"], [inside], imports, ["along"] * passed_on)
    calls = [
        helper.make_node("F", list(FEEDS), [f"dX{k}"], domain="mine", **({"along": 0} if passed_on else {}))
        for k in range(2)
    ]
    model = add_functions(model_of(calls, FEEDS, functions=[function]))
    for results in run_everywhere(model, FEEDS).values():
        assert results["dX0"].tolist() == results["dX1"].tolist() == EXPECTED


@pytest.mark.parametrize("opset", [9, 13, 17, 18, 19, 22, 24])
def test_models_of_any_opset(opset):
    model = model_of([helper.make_node("Neg", ["dY"], ["y"]), gather_node()], FEEDS, opset=opset)
    model = add_functions(model)
    assert model.opset_import[0].version == max(opset, 18)
    for results in run_everywhere(model, FEEDS).values():
        assert results["dX"].tolist() == EXPECTED


def test_a_path_is_welcome(tmp_path):
    given = model_of([gather_node()], FEEDS)
    onnx.save(given, tmp_path / "model.onnx")
    expected = add_functions(given)
    assert add_functions(tmp_path / "model.onnx") == expected
    assert add_functions(str(tmp_path / "model.onnx")) == expected


def test_a_model_of_onnx_ir_is_welcome():
    given = model_of([helper.make_node("Neg", ["dY"], ["y"]), gather_node()], FEEDS, opset=13)
    in_ir = onnx_ir.from_proto(given)
    before = onnx_ir.to_proto(in_ir)
    model = add_functions(in_ir)
    assert onnx_ir.to_proto(in_ir) == before
    assert model.functions == add_functions(given).functions
    for results in run_everywhere(model, FEEDS).values():
        assert results["dX"].tolist() == EXPECTED
    again = add_functions(onnx_ir.from_proto(model))
    assert again.functions == model.functions


@pytest.mark.parametrize("load", [str, onnx_ir.load], ids=["path", "onnx_ir"])
def test_weights_in_a_file_of_their_own_come_along(tmp_path, load):
    given = model_of([gather_node()], FEEDS)
    given.graph.initializer.append(onnx.numpy_helper.from_array(FEEDS["dY"], "dY"))
    given.graph.input.remove(next(i for i in given.graph.input if i.name == "dY"))
    onnx.save(given, tmp_path / "model.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    assert (tmp_path / "weights").exists()
    loaded = load(tmp_path / "model.onnx")
    feeds = {name: array for name, array in FEEDS.items() if name != "dY"}
    for results in run_everywhere(add_functions(loaded), feeds).values():
        assert results["dX"].tolist() == EXPECTED
    if load is onnx_ir.load:
        assert isinstance(loaded.graph.initializers["dY"].const_value, onnx_ir.ExternalTensor)  # as it was


def test_what_is_no_model_is_refused(tmp_path):
    expected = "expected an onnx.ModelProto, an onnx_ir.Model or a path"
    with raises(TypeError, f"add_functions: model is a int, {expected}"):
        add_functions(3)
    with raises(TypeError, f"add_functions: model is a Graph, {expected}"):
        add_functions(onnx_ir.from_proto(model_of([gather_node()], FEEDS)).graph)
    with raises(FileNotFoundError, "add_functions: 'nowhere.onnx' does not exist, expected an ONNX model"):
        add_functions("nowhere.onnx")
    (tmp_path / "model.onnx").write_bytes(b"\xff\xff not a model")
    with pytest.raises(ValueError, match=r"^add_functions: '.*model.onnx' is not an ONNX model"):
        add_functions(tmp_path / "model.onnx")
