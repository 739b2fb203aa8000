"""Cross entropies of training steps as one operator each: the same losses, gradients and predictions."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from tests.train.two_layers import batch, mlp

import onnxgrad
from onnxgrad.graph.files import load
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.fuse_loss import fuse_losses
from onnxgrad.passes.prepare import prepare
from onnxgrad.train import losses, optim
from onnxgrad.train.graphs import Selection, evaluation_graph, step_graph
from onnxgrad.train.trainer import Trainer

FUSED, STANDARD = "SoftmaxCrossEntropyLossInternal", "SoftmaxCrossEntropyLoss"


def model_of(nodes, scores, labels, weights=None, opset=20):
    """A model that takes scores and labels; weights are its own."""
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for name, a in (("scores", scores), ("labels", labels))
    ]
    outputs = [onnx.ValueInfoProto(name=name) for node in nodes for name in node.output if name]
    initializers = [] if weights is None else [numpy_helper.from_array(weights, "weights")]
    graph = helper.make_graph(nodes, "g", infos, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model)


def loss_node(outputs, weighted=True, **attributes):
    inputs = ["scores", "labels", *(["weights"] if weighted else [])]
    return helper.make_node(STANDARD, inputs, outputs, name="/" + outputs[0], **attributes)


def fused(model):
    made = ir.from_proto(model)
    count = fuse_losses(Draft(made, "test"))
    proto = ir.to_proto(made)
    onnx.checker.check_model(proto, full_check=True)
    return count, proto


@pytest.mark.parametrize("opset", [12, 13, 20])
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_every_kind_gives_the_same_numbers(dtype, index, opset):
    rng = np.random.default_rng(0)
    scores, weights = rng.standard_normal((4, 5, 3)).astype(dtype), rng.uniform(0.5, 1.5, 5).astype(dtype)
    labels = rng.integers(0, 5, (4, 3)).astype(index)
    nodes = [
        loss_node(["mean", "mean_log"]),
        loss_node(["plain"], weighted=False),
        loss_node(["sum"], reduction="sum", ignore_index=1),
        loss_node(["ignoring", "ignoring_log"], weighted=False, ignore_index=1),
        loss_node(["each"], reduction="none", ignore_index=2),
    ]
    model = model_of(nodes, scores, labels, weights, opset)
    count, changed = fused(model)
    assert count == 5
    assert {n.op_type for n in changed.graph.node} == {"Constant", FUSED}
    feeds = {"scores": scores, "labels": labels}
    # onnx.reference has the operator; onnxruntime expands it, in float32 only.
    expected = ReferenceEvaluator(model).run(None, feeds)
    session = onnxruntime.InferenceSession(changed.SerializeToString(), onnxgrad.register())
    near = {"rtol": 20 * np.finfo(dtype).eps, "atol": 20 * np.finfo(dtype).eps}
    for output, found, wanted in zip(changed.graph.output, session.run(None, feeds), expected, strict=True):
        assert found.dtype == dtype
        np.testing.assert_allclose(found, wanted, **near, err_msg=output.name)


def test_other_nodes_stay():
    scores, labels = np.zeros((2, 3), np.float32), np.zeros(2, np.int64)
    node = helper.make_node("NegativeLogLikelihoodLoss", ["scores", "labels"], ["loss"])
    model = model_of([node], scores, labels)
    count, changed = fused(model)
    assert count == 0
    assert changed.graph.node == model.graph.node
    assert [i.domain for i in changed.opset_import] == [""]


def op_types(model):
    return [node.op_type for node in model.graph]


def test_steps_and_evaluations_have_it():
    loss = losses.CrossEntropy("logits")
    prepared = prepare(load(mlp(), "test"), "test")
    inference = prepared.clone()
    step = step_graph(prepared, loss, Selection())
    evaluation = evaluation_graph(inference, loss, step)
    for made, outputs in ((step, 2), (evaluation, 1)):
        assert STANDARD not in op_types(made.model)
        (node,) = [n for n in made.model.graph if n.op_type == FUSED]
        assert len(node.outputs) == outputs  # the gradient alone needs log_prob
        assert node.outputs[0].name == made.loss
    assert "SoftmaxCrossEntropyLossGrad" in op_types(step.model)


def test_a_target_that_is_ignored_does_not_train():
    loss = losses.CrossEntropy("logits", ignore_index=-7, weights=[0.5, 1.0, 2.0])
    trainer = Trainer(mlp(), loss, optim.SGD(lr=0.1))
    given = batch(0)
    given["target"][::2] = -7
    logits = onnxruntime.InferenceSession(mlp().SerializeToString()).run(None, {"x": given["x"]})[0]
    expected = torch.nn.functional.cross_entropy(
        torch.tensor(logits), torch.tensor(given["target"]), torch.tensor([0.5, 1.0, 2.0]), ignore_index=-7
    )
    assert np.isclose(trainer.evaluate([given])["loss"], expected.item(), rtol=1e-6)
    assert np.isclose(trainer.step(given), expected.item(), rtol=1e-6)
