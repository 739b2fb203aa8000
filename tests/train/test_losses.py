"""Losses against PyTorch's, values and gradients."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812, its usual name
from onnx import helper
from tests.checks import raises

import onnxgrad
from onnxgrad.autodiff.check import evaluator
from onnxgrad.graph.builder import Builder, op
from onnxgrad.passes.append_loss import append_loss
from onnxgrad.passes.prepare import prepare
from onnxgrad.train import losses

RNG = np.random.default_rng(0)
SHAPE = (4, 5, 3)
X = RNG.standard_normal(SHAPE)
Y = RNG.standard_normal(SHAPE)
CLASSES = RNG.integers(0, 5, (4, 3))
PROBABLE = np.exp(Y) / np.exp(Y).sum(1, keepdims=True)
WEIGHTS = [0.5, 1.0, 2.0, 1.5, 0.1]


def model_with(loss, shape=SHAPE):
    """A model that gives its input as `y`, with the loss added."""
    infos = [helper.make_tensor_value_info(n, onnx.TensorProto.DOUBLE, shape) for n in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", infos[:1], infos[1:])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    prepared = prepare(ir.from_proto(proto), "test")
    builder = Builder(prepared.graph)
    value = append_loss(builder, loss if isinstance(loss, str) else loss.parts)
    value.name = "loss"
    prepared.model.graph.outputs.append(value)
    return ir.to_proto(prepared.model)


def assert_agree(loss, theirs, target, x=X, **more):
    given, x = x, torch.tensor(x, requires_grad=True)
    expected = theirs(x, torch.tensor(target))
    expected.backward()
    for shape in (SHAPE, ("N", "C", "d")):
        model = onnxgrad.gradient(model_with(loss, shape), ["x"], "loss")
        names = [o.name for o in model.graph.output]
        results = dict(zip(names, evaluator(model)({"x": given, "target": target, **more}), strict=True))
        assert np.allclose(results["loss"], expected.item(), rtol=1e-9)
        assert np.allclose(results["x_grad"], x.grad.numpy(), rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_differences(reduction):
    how = {"reduction": reduction}
    assert_agree(losses.MSE("y", **how), lambda x, t: F.mse_loss(x, t, **how), Y)
    assert_agree(losses.L1("y", **how), lambda x, t: F.l1_loss(x, t, **how), Y)
    for delta in (0.3, 1.0):
        assert_agree(losses.Huber("y", delta=delta, **how), lambda x, t, d=delta: F.huber_loss(x, t, delta=d, **how), Y)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weights"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(smoothing, weights, reduction):
    how = {"label_smoothing": smoothing, "reduction": reduction}
    weight = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    mine = losses.CrossEntropy("y", weights=weights, **how)
    assert_agree(mine, lambda x, t: F.cross_entropy(x, t, weight, **how), CLASSES)
    ignored = losses.CrossEntropy("y", weights=weights, ignore_index=2, **how)
    assert_agree(ignored, lambda x, t: F.cross_entropy(x, t, weight, ignore_index=2, **how), CLASSES)
    soft = losses.CrossEntropy("y", weights=weights, probabilities=True, **how)

    def per_example(x, t):
        """PyTorch divides by the examples, of which there are N·d here, not by all numbers."""
        return F.cross_entropy(x, t, weight, **how)

    assert_agree(soft, per_example, PROBABLE)
    last = losses.CrossEntropy("y", axis=-1, label_smoothing=smoothing, reduction=reduction)
    assert_agree(last, lambda x, t: F.cross_entropy(x.movedim(2, 1), t, **how), RNG.integers(0, 3, (4, 5)))


@pytest.mark.parametrize("weight", [None, 2.5, [0.5, 1.0, 3.0]], ids=str)
def test_binary_cross_entropy(weight):
    target = (Y > 0).astype(np.float64)
    theirs = None if weight is None else torch.tensor(weight, dtype=torch.float64)
    mine = losses.BCEWithLogits("y", pos_weight=weight)
    assert_agree(mine, lambda x, t: F.binary_cross_entropy_with_logits(x, t, pos_weight=theirs), target)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weights"])
def test_likelihood(weights, reduction):
    weight = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    how = {"weights": weights, "reduction": reduction}

    def theirs(x, t, **more):
        return F.nll_loss(x, t, weight, reduction=reduction, **more)

    assert_agree(losses.NLL("y", **how), theirs, CLASSES)
    ignored = losses.NLL("y", ignore_index=2, **how)
    assert_agree(ignored, lambda x, t: theirs(x, t, ignore_index=2), CLASSES)
    last = losses.NLL("y", axis=-1, reduction=reduction)
    classes = RNG.integers(0, 3, (4, 5))
    assert_agree(last, lambda x, t: F.nll_loss(x.movedim(2, 1), t, reduction=reduction), classes)
    probable = losses.NLL("y", log_prediction=False, **how)
    assert_agree(probable, lambda x, t: theirs(torch.log(x), t), CLASSES, x=PROBABLE)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_binary_cross_entropy_of_probabilities(reduction):
    target = RNG.random(SHAPE)
    mine = losses.BCE("y", reduction=reduction)
    assert_agree(mine, lambda x, t: F.binary_cross_entropy(x, t, reduction=reduction), target, x=PROBABLE)
    certain = np.where(RNG.random(SHAPE) < 0.5, 0.0, 1.0)
    model = onnxgrad.gradient(model_with(mine), ["x"], "loss")
    names = [o.name for o in model.graph.output]
    found = dict(zip(names, evaluator(model)({"x": certain, "target": target}), strict=True))
    expected = F.binary_cross_entropy(torch.tensor(certain), torch.tensor(target), reduction=reduction)
    assert found["loss"] == pytest.approx(expected.item())  # logarithms end at -100
    assert np.isfinite(found["x_grad"]).all()


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum"])
def test_divergence(reduction):
    zeros = np.where(RNG.random(SHAPE) < 0.2, 0.0, PROBABLE)
    assert_agree(losses.KLDiv("y", reduction=reduction), lambda x, t: F.kl_div(x, t, reduction=reduction), zeros)
    mine = losses.KLDiv("y", reduction=reduction, log_target=True)
    assert_agree(mine, lambda x, t: F.kl_div(x, t, reduction=reduction, log_target=True), np.log(PROBABLE))


def test_several_losses_and_one_of_your_own():
    own = losses.Custom("y", lambda y, t: op.ReduceMean(op.Abs(y - t), keepdims=0))
    both = 2 * losses.MSE("y") + 0.5 * own
    assert_agree(both, lambda x, t: 2 * F.mse_loss(x, t) + 0.5 * F.l1_loss(x, t), Y)
    apart = losses.MSE("y") + losses.MSE("y", target="other")
    assert_agree(apart, lambda x, t: F.mse_loss(x, t) + F.mse_loss(x, torch.tensor(PROBABLE)), Y, other=PROBABLE)


def scores():
    """A model with scores along its last axis, and labels."""
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 18]>
        g (float[N, S, 2] x) => (int64[N, S] label, float[N, S, 5] y) {
            y = MatMul(x, w)
            label = ArgMax <axis = -1, keepdims = 0> (y)
        }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((2, 5), np.float32), "w"))
    return model


@pytest.mark.parametrize("loss", [losses.CrossEntropy, losses.NLL])
def test_targets_for_scores_along_the_last_axis(loss):
    trainer = onnxgrad.Trainer(scores(), loss("y"), onnxgrad.optim.SGD(lr=0.1))
    advice = f": {loss.__name__} takes dimension 1 of 'y', which has the shape ['N', 'S', 5], for the classes; axis=-1 "
    x = np.zeros((2, 3, 2), np.float32)
    for shape, expected in (((2, 3), "['N', 5]"), ((2, 3, 1, 1), "2 dimensions"), ((3, 5), "but N is 2 in x")):
        said = (
            f"the batch's target has shape {list(shape)}, {'' if expected.startswith('but') else 'expected '}{expected}"
        )
        with raises(ValueError, said + advice + "takes the last"):
            trainer.step({"x": x, "target": np.zeros(shape, np.int64)})


def test_what_is_refused():
    sentence = "MSE: 'z' is neither an output of the model nor a value inside it, expected 'y' or an inner value"
    with raises(ValueError, sentence):
        model_with(losses.MSE("z"))
    with raises(ValueError, "MSE: the target 'y' has the name of a value in the model: give it another"):
        model_with(losses.MSE("y", target="y"))
    with raises(ValueError, "MSE: the target 'w' has the name of a value in the model: give it another"):
        onnxgrad.Trainer(scores(), losses.MSE("y", target="w"), onnxgrad.optim.SGD(lr=0.1))
    sentence = "MSE: 'label' holds int64, which has no gradient, expected an output of floating-point numbers: 'y'"
    with raises(ValueError, sentence):
        onnxgrad.Trainer(scores(), losses.MSE("label"), onnxgrad.optim.SGD(lr=0.1))
    unknown = scores()
    for value in (*unknown.graph.input, *unknown.graph.output):
        value.type.tensor_type.ClearField("shape")
    sentence = (
        "the number of dimensions of 'y' is not known: declare its shape in the model's value_info, dimensions may "
    )
    with raises(ValueError, sentence + "stay unknown"):
        onnxgrad.Trainer(unknown, losses.MSE("y"), onnxgrad.optim.SGD(lr=0.1))
    with raises(ValueError, "MSE: reduction is 'all', expected one of 'mean', 'sum'"):
        losses.MSE("y", reduction="all")
    with raises(ValueError, "loss is 'z', expected a loss, an output of the model ('y') or a value inside it"):
        model_with("z")
    with raises(
        ValueError,
        "the output 'y' has shape [4, 5, 3], expected one number, the loss: losses such as CrossEntropy and MSE "
        "compare an output with a target",
    ):
        model_with("y")
    with raises(ValueError, "NLL: weights has shape [2], expected [5], a number for each class of 'y'"):
        model_with(losses.NLL("y", weights=[1, 2]))
    with raises(ValueError, "CrossEntropy: axis is 3, but 'y' has 3 dimensions"):
        model_with(losses.CrossEntropy("y", axis=3))
    with raises(ValueError, "the loss has shape [4, 5, 3], expected a scalar: reduce it"):
        model_with(losses.Custom("y", lambda y, t: y - t))
    with raises(ValueError, "CrossEntropy: weights has shape [2], expected [5], a number for each class of 'y'"):
        model_with(losses.CrossEntropy("y", weights=[1, 2]))
    for wrong, kind, example in ((losses.L1, "the class L1", "L1"), (F.mse_loss, "a function", "MSE")):
        sentence = f"Trainer: loss is {kind}, expected one of onnxgrad.losses with an output's name, as {example}(…)"
        with raises(TypeError, f"{sentence}, or the name of a value that is the loss"):
            onnxgrad.Trainer(scores(), wrong, onnxgrad.optim.SGD(lr=0.1))
    with raises(TypeError, "a int is added to a loss, expected another loss"):
        losses.MSE("y") + 1


@pytest.mark.parametrize("index", [10**30, 2**63, -(2**63) - 1, 1.5, "1", True])
def test_an_ignored_class_is_a_class_number(index):
    with raises(ValueError, f"CrossEntropy: ignore_index is {index!r}, expected a class number, which fits int64"):
        losses.CrossEntropy("logits", ignore_index=index)
