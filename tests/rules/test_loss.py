"""NegativeLogLikelihoodLoss, SoftmaxCrossEntropyLoss, SoftmaxCrossEntropyLossInternal and LinearCrossEntropy."""

import numpy as np
import pytest
import torch
from tests.checks import raises
from tests.gradients import check_rule, evaluate, model_of_node

import onnxgrad

RNG = np.random.default_rng(5)
REDUCTIONS = ["none", "mean", "sum"]
REDUCED = [("mean", (5, 4)), ("mean", (2, 4, 3, 2)), ("sum", (2, 4, 3)), ("none", (2, 4, 3))]
WEIGHTED = [("mean", None), ("mean", 2), ("mean", -1), ("sum", -1), ("none", 2)]


def given(shape, ignored=None):
    scores = RNG.standard_normal(shape)
    labels = np.arange(np.prod(shape) // 4).reshape(shape[0], *shape[2:]) * 3 % 4
    if ignored is not None:
        labels.reshape(-1)[::3] = ignored
    return scores, labels, RNG.uniform(0.5, 1.5, 4)


@pytest.mark.parametrize(("reduction", "shape"), REDUCED)
def test_negative_log_likelihood(reduction, shape):
    scores, labels, _ = given(shape)
    check_rule("NegativeLogLikelihoodLoss", scores, labels, reduction=reduction)


@pytest.mark.slow
@pytest.mark.parametrize(("reduction", "ignored"), WEIGHTED)
def test_negative_log_likelihood_with_weights(reduction, ignored):
    inputs = given((2, 4, 3), ignored)
    check_rule("NegativeLogLikelihoodLoss", *inputs, reduction=reduction, **optional(ignored))


def optional(ignored):
    return {} if ignored is None else {"ignore_index": ignored}


@pytest.mark.parametrize(("reduction", "shape"), REDUCED)
def test_cross_entropy(reduction, shape):
    scores, labels, _ = given(shape)
    check_rule("SoftmaxCrossEntropyLoss", scores, labels.astype(np.int32), reduction=reduction)


@pytest.mark.slow
@pytest.mark.parametrize(("reduction", "ignored"), WEIGHTED)
def test_cross_entropy_with_weights(reduction, ignored):
    inputs = given((2, 4, 3), ignored)
    check_rule("SoftmaxCrossEntropyLoss", *inputs, reduction=reduction, **optional(ignored))


@pytest.mark.slow
def test_cross_entropy_without_weights_but_ignored_labels():
    scores, labels, _ = given((2, 4, 3), 1)
    check_rule("SoftmaxCrossEntropyLoss", scores, labels, ignore_index=1)
    check_rule("NegativeLogLikelihoodLoss", scores, labels, ignore_index=1)


@pytest.mark.slow
@pytest.mark.parametrize("of", [[0, 1], [1]])
def test_cross_entropy_whose_log_prob_is_used(of):
    check_rule("SoftmaxCrossEntropyLoss", *given((2, 4, 3)), outputs=2, of=of, wrt=[0])


INTERNAL = "SoftmaxCrossEntropyLossInternal"


@pytest.mark.parametrize(("reduction", "shape"), REDUCED)
def test_internal_cross_entropy(reduction, shape):
    scores, labels, _ = given(shape)
    check_rule(INTERNAL, scores, labels.astype(np.int32), reduction=reduction, domain="com.microsoft")


@pytest.mark.slow
@pytest.mark.parametrize(("reduction", "ignored"), WEIGHTED)
def test_internal_cross_entropy_with_weights(reduction, ignored):
    inputs = [*given((2, 4, 3), ignored), *([] if ignored is None else [np.array(ignored)])]
    check_rule(INTERNAL, *inputs, reduction=reduction, fixed=[3], domain="com.microsoft")


@pytest.mark.slow
def test_internal_cross_entropy_without_an_ignored_label_ignores_minus_1():
    scores, labels, weights = given((2, 4, 3), -1)
    check_rule(INTERNAL, scores, labels, domain="com.microsoft")
    check_rule(INTERNAL, scores, labels, weights, domain="com.microsoft")


@pytest.mark.slow
@pytest.mark.parametrize("of", [[0, 1], [1]])
def test_internal_cross_entropy_whose_log_prob_is_used(of):
    check_rule(INTERNAL, *given((2, 4, 3)), outputs=2, of=of, wrt=[0], domain="com.microsoft")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("trans", [0, 1])
def test_cross_entropy_of_a_linear_layer(trans, reduction):
    rng = np.random.default_rng(0)
    X, W = rng.standard_normal((2, 3, 4)), rng.standard_normal((5, 4) if trans else (4, 5))
    labels, bias = rng.integers(-1, 5, (2, 3)), rng.standard_normal(5)
    how = {"domain": "onnxgrad", "twice": False, "transW": trans, "reduction": reduction}
    check_rule("LinearCrossEntropy", X, W, labels, bias, wrt=[0, 1, 3], **how)
    check_rule("LinearCrossEntropy", X, W, labels, None, None, np.array(8.0), wrt=[0, 1], **how)


def test_an_ignored_label_that_is_computed():
    inputs = (*given((5, 4)), np.array(1))
    model, _ = model_of_node(INTERNAL, inputs, domain="com.microsoft")
    sentence = f"gradient of {INTERNAL} (node 'node'): ignore_index is computed by the model, expected a constant"
    for source in ("in_0", "in_2"):
        with raises(ValueError, sentence):
            onnxgrad.gradient(model, [source])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
def test_half_numbers(name):
    scores, labels, weights = given((3, 4, 2))
    found = []
    for dtype in (np.float16, np.float32):
        model, feeds = model_of_node(name, (scores, labels, weights), dtype=dtype)
        found.append(evaluate(onnxgrad.gradient(model, ["in_0", "in_2"]), feeds))
    for got, expected in zip(*found, strict=True):
        assert got.dtype == np.float16
        np.testing.assert_allclose(got, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
def test_as_in_torch(name, reduction):
    scores, labels, weights = given((3, 4, 2), -100)
    model, feeds = model_of_node(
        name, (scores, labels, weights), attributes={"reduction": reduction, "ignore_index": -100}, dtype=np.float32
    )
    loss_of = torch.nn.functional.cross_entropy if name.startswith("Soft") else torch.nn.functional.nll_loss
    x = torch.tensor(feeds["in_0"], requires_grad=True)
    loss = loss_of(x, torch.tensor(labels), torch.tensor(feeds["in_2"]), reduction=reduction, ignore_index=-100)
    seed = torch.tensor(RNG.standard_normal(loss.shape).astype(np.float32)) if loss.ndim else torch.tensor(1.0)
    loss.backward(seed)
    once = onnxgrad.gradient(model, ["in_0"])
    seeds = {"out_0_grad": seed.numpy()} if loss.ndim else {}
    found_loss, found = evaluate(once, {**feeds, **seeds})
    np.testing.assert_allclose(found_loss, loss.detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found, x.grad.numpy(), rtol=1e-5, atol=1e-6)
