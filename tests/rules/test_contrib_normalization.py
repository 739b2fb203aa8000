"""SimplifiedLayerNormalization, SkipLayerNormalization, SkipSimplifiedLayerNormalization."""

import numpy as np
import pytest
from tests.gradients import check_rule

pytestmark = pytest.mark.slow  # kernels that few models have, and that take long to compile

RNG = np.random.default_rng(5)
X = RNG.standard_normal((2, 3, 4))
SKIP = "SkipLayerNormalization"
SKIP_SIMPLIFIED = "SkipSimplifiedLayerNormalization"


def positive(*shape):
    return RNG.uniform(0.5, 1.5, shape)


@pytest.mark.parametrize("axis", [-1, 1])
def test_simplified(axis):
    check_rule("SimplifiedLayerNormalization", X, positive(*X.shape[axis:]), axis=axis, epsilon=0.1)


@pytest.mark.parametrize("shape", [(2, 3, 4), (3, 4)])
def test_skip(shape):
    skip = RNG.standard_normal(shape)
    check_rule(SKIP, X, skip, positive(4), positive(4), positive(4), domain="com.microsoft", epsilon=0.1)
    check_rule(SKIP_SIMPLIFIED, X, skip, positive(4), positive(4), domain="com.microsoft", epsilon=0.1)


def test_skip_without_shifts():
    check_rule(SKIP, X, X[::-1], positive(4), None, positive(4), domain="com.microsoft")
    check_rule(SKIP_SIMPLIFIED, X, X[::-1], positive(4), domain="com.microsoft")


@pytest.mark.parametrize("of", [[0, 3], [3]])
def test_skip_whose_sum_is_used(of):
    wrt = None if 0 in of else [0, 1]
    inputs = X, X[::-1], positive(4)
    check_rule(SKIP, *inputs, outputs=4, of=of, wrt=wrt, domain="com.microsoft", epsilon=0.1)
    check_rule(SKIP_SIMPLIFIED, *inputs, outputs=4, of=of, wrt=wrt, domain="com.microsoft", epsilon=0.1)
