"""Dropout."""

import numpy as np
import pytest
from tests.gradients import check_rule, evaluate, model_of_node

import onnxgrad

RNG = np.random.default_rng(5)
X = RNG.standard_normal((3, 40))


def test_inference():
    check_rule("Dropout", X)
    check_rule("Dropout", X, np.array(0.3), wrt=[0])
    check_rule("Dropout", X, np.array(0.3), np.array(False), wrt=[0])
    check_rule("Dropout", X, np.array(0.3), np.array(False), fixed=[1, 2])


def test_inference_changes_nothing():
    model, _ = model_of_node("Dropout", [X, np.array(0.3), np.array(False)], fixed=[1, 2])
    once = onnxgrad.gradient(model, ["in_0"])
    assert {n.op_type for n in once.graph.node} == {"Dropout", "Identity"}


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("fixed", [(), (1,), (1, 2)])
@pytest.mark.parametrize("ratio", [0.25, 0.0, None])
def test_training(ratio, fixed, static):
    given = [X, None if ratio is None else np.array(ratio), np.array(True)]
    for dtype in (np.float32, np.float64):
        model, feeds = model_of_node(
            "Dropout", given, 2, fixed=[k for k in fixed if given[k] is not None], dtype=dtype, static=static
        )
        once = onnxgrad.gradient(model, ["in_0"], ["out_0"])
        g = RNG.standard_normal(X.shape).astype(dtype)
        _, mask, found = evaluate(once, {**feeds, "out_0_grad": g})
        ratio_ = 0.5 if ratio is None else ratio
        scale = 1 / (1 - ratio_)
        assert 0 < mask.sum() < mask.size or ratio_ == 0
        np.testing.assert_allclose(found, np.where(mask, g * scale, 0), rtol=1e-6)
        twice = onnxgrad.gradient(once, ["out_0_grad"], ["in_0_grad"])
        _, mask, _, found = evaluate(twice, {**feeds, "out_0_grad": g, "in_0_grad_grad": g})
        np.testing.assert_allclose(found, np.where(mask, g * scale, 0), rtol=1e-6)
