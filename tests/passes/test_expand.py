"""Operators that have no rule but a definition by others, which is differentiated in their place."""

import numpy as np
import onnx
import pytest
from onnx import helper

import onnxgrad
from onnxgrad.rules import RULES

RNG = np.random.default_rng(5)


def numbers(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def model_of(op_type, inputs, outputs, attributes, opset):
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for name, a in inputs.items()
    ]
    names = [f"y{k}" for k in range(outputs)]
    node = helper.make_node(op_type, list(inputs), names, name="node", **attributes)
    graph = helper.make_graph([node], "graph", infos, [helper.make_empty_tensor_value_info(n) for n in names])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=11)
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


QKV = {"q": numbers(2, 4, 3, 8), "k": numbers(2, 4, 5, 8), "v": numbers(2, 4, 5, 6)}
FLAT = {"q": numbers(2, 3, 16), "k": numbers(2, 5, 8), "v": numbers(2, 5, 8)}
COSINES = {"cos": numbers(6, 4), "sin": numbers(6, 4)}


@pytest.mark.parametrize(
    "op_type, inputs, attributes",
    [
        ("Attention", QKV, {}),
        ("Attention", QKV, {"is_causal": 1, "scale": 0.3}),
        ("Attention", {**QKV, "mask": numbers(3, 5)}, {"softcap": 2.0}),
        ("Attention", FLAT, {"q_num_heads": 4, "kv_num_heads": 2}),
        ("RotaryEmbedding", {"x": numbers(2, 3, 6, 8), **COSINES, "at": np.array([[0, 1, 2, 3, 4, 5]] * 2)}, {}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_onnx_defines_by_other_operators(op_type, inputs, attributes):
    assert ("", op_type) not in RULES, "it has a rule now, which wants tests of its own"
    model = model_of(op_type, inputs, 1, attributes, 23)
    smooth = [name for name, a in inputs.items() if a.dtype.kind == "f"]
    checked = onnxgrad.check_gradient(model, inputs, smooth)
    assert checked.worst < 2e-6, checked
    once = onnxgrad.gradient(model, smooth)
    onnx.checker.check_model(once, full_check=True)
    assert not any(function.domain == "onnxgrad.expanded" for function in once.functions)
    assert [i.domain for i in once.opset_import if i.domain] == ["com.microsoft"]


@pytest.mark.parametrize("opset", [25, 26])
def test_opsets_for_which_onnx_does_not_repeat_a_definition(opset):
    checked = onnxgrad.check_gradient(model_of("Attention", QKV, 1, {"is_causal": 1}, opset), QKV, ["q", "k", "v"])
    assert checked.worst < 2e-6, checked
