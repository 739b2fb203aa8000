"""The models of optimizers: inputs, node and output as onnxruntime-training's runtimes expect them."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from tests.checks import raises

from onnxgrad.ort_training import onnxblock
from onnxgrad.ort_training.onnxblock import optim

PARAMETERS = [numpy_helper.from_array(np.zeros(3, np.float32), "weight")], []
FLOATS = onnx.TensorProto.FLOAT


def model_of(block, parameters=PARAMETERS):
    with onnxblock.empty_base(14) as accessor:
        name = block(parameters)
        assert accessor.model == block.to_model_proto()
    model = block.to_model_proto()
    assert [o.name for o in model.graph.output] == [name]
    return model


def attributes(node):
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def test_adamw():
    model = model_of(optim.AdamW())
    names = ["learning_rate", "step", "params", "gradients", "first_order_moments", "second_order_moments"]
    assert [i.name for i in model.graph.input] == names
    rate, step, *sequences = (i.type for i in model.graph.input)
    assert rate.tensor_type.elem_type == FLOATS and step.tensor_type.elem_type == onnx.TensorProto.INT64
    assert [[d.dim_value for d in kind.tensor_type.shape.dim] for kind in (rate, step)] == [[1], [1]]
    assert {kind.sequence_type.elem_type.tensor_type.elem_type for kind in sequences} == {FLOATS}
    (node,) = model.graph.node
    assert (node.op_type, node.domain, list(node.input)) == ("AdamWOptimizer", "com.microsoft", names)
    expected = {"alpha": 0.9, "beta": 0.999, "epsilon": 1e-6, "weight_decay": 0, "correct_bias": 1, "adam_mode": 1}
    assert attributes(node) == pytest.approx(expected)
    (output,) = model.graph.output
    assert output.name.startswith("onnx::adamw.updated_flag::")
    assert output.type.tensor_type.elem_type == onnx.TensorProto.BOOL
    (node,) = model_of(optim.AdamW(False, (0.5, 0.6), 1e-3, 123)).graph.node
    changed = {"alpha": 0.5, "beta": 0.6, "epsilon": 1e-3, "weight_decay": 123.0, "correct_bias": 0, "adam_mode": 1}
    assert attributes(node) == pytest.approx(changed)


def test_sgd():
    model = model_of(optim.SGD())
    names = [i.name for i in model.graph.input]
    assert names == ["learning_rate", "step", "params", "gradients", "first_order_moments"]
    (node,) = model.graph.node
    assert (node.op_type, list(node.input)) == ("SGDOptimizerV2", ["learning_rate", "params", "gradients"])
    assert model.graph.output[0].name.startswith("onnx::update_completed::")


@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD])
def test_gradients_are_clipped_first(kind):
    clip, update = model_of(kind(clip_grad=optim.ClipGradNorm(2))).graph.node
    assert (clip.op_type, clip.domain, list(clip.input)) == ("InplaceClipGradNorm", "com.microsoft", ["gradients"])
    assert attributes(clip) == {"max_norm": 2.0}
    assert clip.output[0].startswith("onnx::clip_grad_norm_output::") and clip.output[0] in update.input


def test_half_and_double_parameters():
    parameters = [numpy_helper.from_array(np.zeros(3, np.float64), "weight")], []
    kinds = {
        i.type.sequence_type.elem_type.tensor_type.elem_type for i in model_of(optim.SGD(), parameters).graph.input[2:]
    }
    assert kinds == {onnx.TensorProto.DOUBLE}


def test_nothing_to_update():
    with (
        onnxblock.empty_base(),
        raises(RuntimeError, "the optimizer has nothing to update: no parameter requires a gradient"),
    ):
        optim.AdamW()(([], PARAMETERS[0]))
