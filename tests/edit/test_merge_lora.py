"""merge_lora(): the model computes the same without adapters, and quantized weights stay quantized."""

import re

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from tests.edit import adapted
from tests.edit.adapted import X, arrays, linear, perturbed, run

import onnxgrad
from onnxgrad.edit.requantize import packed, unpacked

FLOATING = adapted.floating()
QUANTIZED = adapted.quantized()


def graph_of(model):
    """Nodes and initializers, by all that matters."""
    nodes = sorted((n.op_type, n.name, *n.input, "→", *n.output) for n in model.graph.node)
    return nodes, sorted((t.name, t.data_type, *t.dims) for t in model.graph.initializer)


@pytest.mark.parametrize("name", FLOATING)
@pytest.mark.parametrize("dropout", [0, 0.1])
def test_merged(name, dropout):
    model, x = FLOATING[name]
    found = perturbed(onnxgrad.lora(model, "*", rank=2, dropout=dropout))
    merged = onnxgrad.merge_lora(found)
    assert np.allclose(run(merged, x), run(found, x), atol=1e-4)
    assert not np.allclose(run(merged, x), run(model, x), atol=1e-2)
    plain = onnxgrad.merge_lora(onnxgrad.lora(model, "*", rank=2))
    assert graph_of(merged) == graph_of(plain) and not merged.metadata_props
    assert len(merged.graph.node) == len(model.graph.node) and arrays(merged).keys() == arrays(model).keys()
    assert all(np.array_equal(a, arrays(plain)[n]) for n, a in arrays(model).items())


@pytest.mark.parametrize("name", QUANTIZED)
def test_merged_into_quantized_weights(name):
    """As near as a step of the new scales allows; without a change, every number stays."""
    model = QUANTIZED[name]
    found = perturbed(onnxgrad.lora(model, "layer", rank=2, alpha=2), 0.5)
    merged = onnxgrad.merge_lora(found)
    assert graph_of(onnxgrad.merge_lora(onnxgrad.lora(model, "layer"))) == graph_of(merged)
    assert len(merged.graph.node) == len(model.graph.node)
    before, after = arrays(model), arrays(merged)
    assert {n: (a.dtype, a.shape) for n, a in before.items()} == {n: (a.dtype, a.shape) for n, a in after.items()}
    eye = np.eye(adapted.INPUTS, dtype=np.float32)
    old, wide, new = (run(m, eye) for m in (model, found, merged))
    # Half a step, and what a zero point, a whole number, is off: of the largest scale there is.
    step = after["scale"].max() * (0.5 if "Gemm" in name else 1)
    assert np.abs(new - wide).max() <= step * 1.01 and np.abs(old - wide).max() > 2 * step
    same = onnxgrad.merge_lora(onnxgrad.lora(model, "layer"))
    assert all(np.array_equal(a, arrays(same)[n]) for n, a in before.items())


def test_half_types_are_rounded_once():
    found = perturbed(onnxgrad.lora(adapted.half(np.float16), "layer"))
    w = arrays(found)
    a, b = (w[f"layer.lora_{part}.weight"].astype(np.float32) for part in "AB")
    expected = (w["layer.weight"].astype(np.float32) + a @ b * np.float32(2)).astype(np.float16)
    assert np.array_equal(arrays(onnxgrad.merge_lora(found))["layer.weight"], expected)


def test_what_cannot_be_merged():
    with pytest.raises(ValueError, match="merge_lora: the model has no adapters, expected a model from lora"):
        onnxgrad.merge_lora(linear())
    rounding = "q = QuantizeLinear(layer__weight, scale) d = DequantizeLinear(q, scale) y = MatMul(x, d)"
    model = adapted.model_of(rounding, layer__weight=adapted.W, scale=np.array(0.1, np.float32))
    with pytest.raises(ValueError, match=re.escape("the weight of 'layer' is rounded by QuantizeLinear")):
        onnxgrad.merge_lora(onnxgrad.lora(model, "layer"))
    text = "d = DequantizeLinear(layer__weight, scale) y = MatMul(x, d)"
    levels = np.zeros((adapted.INPUTS, 4), ml_dtypes.float8_e4m3fn)
    model = adapted.model_of(text, scale=np.array(0.1, np.float32))
    model.graph.initializer.append(numpy_helper.from_array(levels, "layer.weight"))
    model.graph.node[0].input[0] = "layer.weight"
    with pytest.raises(ValueError, match="cannot be quantized again: its numbers are float8e4m3fn, expected integers"):
        onnxgrad.merge_lora(onnxgrad.lora(model, "layer"))


def test_a_graph_that_somebody_has_changed():
    found = onnxgrad.lora(linear(), "first")
    multiply = next(n for n in found.graph.node if n.op_type == "Mul")
    multiply.op_type = "Add"
    with pytest.raises(ValueError, match="the nodes of the adapter of 'first' have changed since it was added"):
        onnxgrad.merge_lora(found)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packing(bits):
    numbers = np.random.default_rng(0).integers(0, 2**bits, (3, 16))
    assert np.array_equal(unpacked(packed(numbers, bits), 3, bits), numbers)


def test_from_a_file_into_another(tmp_path):
    onnx.save(perturbed(onnxgrad.lora(linear(), "first")), tmp_path / "adapted.onnx")
    merged = onnxgrad.merge_lora(tmp_path / "adapted.onnx")
    assert isinstance(merged, onnx.ModelProto)
    assert np.allclose(run(merged, X), run(tmp_path / "adapted.onnx", X), atol=1e-5)
