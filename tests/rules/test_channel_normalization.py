"""BatchNormalization, InstanceNormalization, GroupNormalization."""

import numpy as np
import pytest
from tests.gradients import check_rule

RNG = np.random.default_rng(5)


def positive(*shape):
    return RNG.uniform(0.5, 1.5, shape)


@pytest.mark.parametrize("shape", [(3, 4), (2, 4, 3, 2)])
def test_batch_normalization(shape):
    channels = [positive(4) for _ in range(4)]
    check_rule("BatchNormalization", RNG.standard_normal(shape), *channels, epsilon=0.1)


@pytest.mark.parametrize("shape", [(5, 4), (2, 4, 3, 2)])
def test_batch_normalization_in_training(shape):
    channels = [positive(4) for _ in range(4)]
    x = RNG.standard_normal(shape)
    check_rule(
        "BatchNormalization", x, *channels, outputs=3, of=[0], wrt=[0, 1, 2], training_mode=1, epsilon=0.1, momentum=0.7
    )


@pytest.mark.parametrize("shape", [(2, 4, 3), (2, 4, 3, 2)])
def test_instance_normalization(shape):
    check_rule("InstanceNormalization", RNG.standard_normal(shape), positive(4), positive(4), epsilon=0.1)


@pytest.mark.parametrize("groups", [2, 4])
def test_group_normalization(groups):
    x = RNG.standard_normal((2, 4, 3, 2))
    check_rule("GroupNormalization", x, positive(4), positive(4), num_groups=groups, epsilon=0.1)


@pytest.mark.parametrize("groups", [1, 2])
def test_group_normalization_with_a_scale_for_each_group(groups):
    x = RNG.standard_normal((2, 4, 3))
    check_rule("GroupNormalization", x, positive(groups), positive(groups), num_groups=groups, opset=18)
