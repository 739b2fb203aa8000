"""A classifier of scikit-learn gives a list of dicts: what is made of it does, too."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests.edit.adapted import model_of, run, weights

import onnxgrad

MADE = {
    "lora": lambda model: onnxgrad.lora(model, "w"),
    "merge_lora": lambda model: onnxgrad.merge_lora(onnxgrad.lora(model, "w")),
    "quantize": lambda model: onnxgrad.quantize(model, activations=None),
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_of_a_model_that_gives_maps_gives_maps(name):
    labels = list(range(32))
    model = model_of("p = MatMul (x, w) y = Identity (p)", w=weights(6, 32))
    model.graph.node[1].CopyFrom(
        helper.make_node("ZipMap", ["p"], ["y"], domain="ai.onnx.ml", classlabels_int64s=labels)
    )
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    numbers = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
    maps = helper.make_sequence_type_proto(helper.make_map_type_proto(TensorProto.INT64, numbers))
    model.graph.output[0].CopyFrom(helper.make_value_info("y", maps))
    found = MADE[name](model)
    onnx.checker.check_model(found)
    x = np.ones((1, 6), np.float32)
    assert run(found, x)[0] == pytest.approx(run(model, x)[0], abs=0.1)
