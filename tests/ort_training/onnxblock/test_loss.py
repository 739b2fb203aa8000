"""Losses of onnxblock: the inputs that they add, and values and gradients against PyTorch's."""

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F  # noqa: N812, its usual name
from onnx import helper
from tests.checks import raises

import onnxgrad
from onnxgrad.ort_training import onnxblock
from onnxgrad.ort_training.onnxblock import blocks, loss

RNG = np.random.default_rng(0)
REDUCTIONS = ["mean", "sum", "none"]


class Forward(onnxblock.ForwardBlock):
    """A loss of the output `y`."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def build(self, *names, **more):
        return self.block(*names, **more)


def with_loss(block, shape, kind=np.float32, **more):
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    infos = [helper.make_tensor_value_info(name, kind, shape) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", infos[:1], infos[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    forward = Forward(block)
    with onnxblock.base(model):
        forward("y", **more)
    return forward.to_model_proto()


def assert_agrees(block, theirs, x, target, tolerance=1e-5):
    model = with_loss(block, x.shape, x.dtype)
    given, x = x, torch.tensor(x, requires_grad=True)
    expected = theirs(x, torch.tensor(target))
    expected.backward(torch.ones_like(expected))
    names = [i.name for i in model.graph.input]
    gradient = onnxgrad.gradient(model, ["x"])
    seeds = {i.name: np.ones(expected.shape, given.dtype) for i in gradient.graph.input[len(names) :]}
    feeds = {"x": given, names[1]: target, **seeds}
    value, found = onnxgrad.session(gradient).run(None, feeds)
    assert np.allclose(value, expected.detach().numpy(), tolerance, tolerance)
    assert np.allclose(found, x.grad.numpy(), tolerance, tolerance)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 5)])
def test_differences(shape, reduction):
    x, target = RNG.standard_normal((2, *shape)).astype(np.float32)
    assert_agrees(loss.MSELoss(reduction), lambda x, t: F.mse_loss(x, t, reduction=reduction), x, target)
    assert_agrees(loss.L1Loss(reduction), lambda x, t: F.l1_loss(x, t, reduction=reduction), x, target)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy(weighted, reduction):
    weight = np.array([0.5, 1.0, 2.0]) if weighted else None
    for shape in ((4, 3), (2, 3, 5)):
        x = RNG.standard_normal(shape).astype(np.float32)
        target = RNG.integers(0, 3, shape[:1] + shape[2:])

        def theirs(x, t):
            return F.cross_entropy(
                x, t, None if weight is None else torch.tensor(weight, dtype=x.dtype), reduction=reduction
            )

        assert_agrees(loss.CrossEntropyLoss(weight, reduction), theirs, x, target)
    assert_agrees(loss.CrossEntropyLoss(ignore_index=1), lambda x, t: F.cross_entropy(x, t, ignore_index=1), x, target)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_binary_cross_entropy(kind, weighted, reduction):
    x = (RNG.standard_normal((4, 3)) * 3).astype(kind)
    x[0] = [80, -80, 30]  # where a Sigmoid is 0 or 1
    target = RNG.integers(0, 2, x.shape).astype(kind)
    weight, positive = (np.array([0.5, 2.0, 1.0]), np.array([3.0, 1.0, 0.2])) if weighted else (None, None)
    how = {
        "weight": None if weight is None else torch.tensor(weight, dtype=torch.tensor(x).dtype),
        "pos_weight": None if positive is None else torch.tensor(positive, dtype=torch.tensor(x).dtype),
        "reduction": reduction,
    }
    block = loss.BCEWithLogitsLoss(weight, reduction, positive)
    assert_agrees(block, lambda x, t: F.binary_cross_entropy_with_logits(x, t, **how), x, target)


@pytest.mark.parametrize("name", loss.__all__)
def test_inputs_of_old_names(name):
    model = with_loss(getattr(loss, name)(), ["N", 10])
    labels = model.graph.input[1]
    assert [i.name for i in model.graph.input] == ["x", "labels" if name == "CrossEntropyLoss" else "target"]
    kind, shape = (
        labels.type.tensor_type.elem_type,
        [d.dim_param or d.dim_value for d in labels.type.tensor_type.shape.dim],
    )
    expected = (onnx.TensorProto.INT64, ["N"]) if name == "CrossEntropyLoss" else (onnx.TensorProto.FLOAT, ["N", 10])
    assert (kind, shape) == expected
    (output,) = model.graph.output
    assert not output.type.tensor_type.shape.dim  # a scalar


@pytest.mark.parametrize("name", loss.__all__)
def test_a_target_that_the_graph_has_stays(name):
    """An input, or what another block computes."""

    class Doubled(onnxblock.Block):
        def build(self, prediction):
            target = blocks.InputLike(prediction)("given")
            if name == "CrossEntropyLoss":
                self.base.graph.input[-1].CopyFrom(helper.make_tensor_value_info("given", onnx.TensorProto.INT64, [4]))
                return getattr(loss, name)()(prediction, labels_name="given")
            return getattr(loss, name)()(prediction, target_name=blocks.Add()(target, target))

    assert [i.name for i in with_loss(Doubled(), (4, 3)).graph.input] == ["x", "given"]


def test_cross_entropy_keeps_what_its_gradient_reads():
    node = with_loss(loss.CrossEntropyLoss(), (4, 3)).graph.node[-1]
    assert node.op_type == "SoftmaxCrossEntropyLoss"
    assert [name.split("::")[1] for name in node.output] == ["loss", "log_prob"]
    assert [a.name for a in node.attribute] == ["reduction"]


@pytest.mark.parametrize("name", loss.__all__)
def test_reductions_that_are_not_known(name):
    with raises(RuntimeError, "the reduction 'median' of a loss is not known, expected 'mean', 'sum' or 'none'"):
        getattr(loss, name)(reduction="median")
