"""Normalizations over the last axes or over axes of one's choice."""

import numpy as np
import pytest
from tests.gradients import check_rule

RNG = np.random.default_rng(5)
X = RNG.standard_normal((2, 4, 3, 2))


def positive(*shape):
    return RNG.uniform(0.5, 1.5, shape)


@pytest.mark.parametrize("axis", [-1, 2])
def test_layer_normalization(axis):
    shape = X.shape[axis:]
    check_rule("LayerNormalization", X, positive(*shape), positive(*shape), axis=axis, epsilon=0.1)


def test_layer_normalization_alone():
    check_rule("LayerNormalization", RNG.standard_normal((3, 5)), positive(5), opset=18)


@pytest.mark.parametrize("shape", [(1,), (4, 1, 2)])
def test_layer_normalization_broadcasts(shape):
    check_rule("LayerNormalization", X, positive(*shape), positive(*shape), axis=2)


@pytest.mark.parametrize(("axis", "shape"), [(-1, (2,)), (2, (4, 1, 1))])
def test_rms_normalization(axis, shape):
    check_rule("RMSNormalization", X, positive(*shape), axis=axis, opset=23, epsilon=0.1)


@pytest.mark.parametrize(("p", "axis"), [(1, -1), (2, 1)])
def test_lp_normalization(p, axis):
    check_rule("LpNormalization", X, p=p, axis=axis)


def test_mean_variance_normalization():
    check_rule("MeanVarianceNormalization", X)
    check_rule("MeanVarianceNormalization", X[:, :, 0, 0], axes=[-1])


@pytest.mark.parametrize("size", [3, 4])
def test_lrn(size):
    check_rule("LRN", X, size=size, alpha=0.7, beta=0.6, bias=1.3)
