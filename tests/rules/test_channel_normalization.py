"""BatchNormalization, InstanceNormalization, GroupNormalization."""

import ml_dtypes
import numpy as np
import pytest
from tests.gradients import check_rule, model_of_node

import onnxgrad

RNG = np.random.default_rng(5)


def positive(*shape):
    return RNG.uniform(0.5, 1.5, shape)


@pytest.mark.parametrize("shape", [(3, 4), (2, 4, 3, 2)])
def test_batch_normalization(shape):
    channels = [positive(4) for _ in range(4)]
    check_rule("BatchNormalization", RNG.standard_normal(shape), *channels, epsilon=0.1)


@pytest.mark.parametrize("shape", [(5, 4), (2, 4, 3, 2)])
def test_batch_normalization_in_training(shape):
    """And twice: the gradient of BatchNormalizationGrad, whose statistics are those of X."""
    channels = [positive(4) for _ in range(4)]
    x = RNG.standard_normal(shape)
    check_rule(
        "BatchNormalization", x, *channels, outputs=3, of=[0], wrt=[0, 1, 2], training_mode=1, epsilon=0.1, momentum=0.7
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("static", [True, False])
def test_one_node_for_all_inputs(static, dtype):
    inputs = RNG.standard_normal((2, 4, 3, 2)), *(positive(4) for _ in range(4))
    how = {"attributes": {"training_mode": 1}, "static": static, "dtype": dtype}
    model, _ = model_of_node("BatchNormalization", inputs, 3, **how)
    once = onnxgrad.gradient(model, ["in_0", "in_1", "in_2"], ["out_0"])
    kinds = {n.op_type for n in once.graph.node} - {"Identity"}
    assert kinds == {"BatchNormalization", "BatchNormalizationGrad"}


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(5, 4), (2, 4, 3, 2), (6,)])
def test_batch_normalization_grad_of_given_statistics(shape):
    channels = (*shape, 1)[1]
    inputs = RNG.standard_normal(shape), RNG.standard_normal(shape), *(positive(channels) for _ in range(3))
    check_rule("BatchNormalizationGrad", *inputs, outputs=3, domain="com.microsoft")


@pytest.mark.slow
@pytest.mark.parametrize("of", [0, 1, 2])
def test_batch_normalization_grad_of_one_output(of):
    inputs = RNG.standard_normal((3, 4, 2)), RNG.standard_normal((3, 4, 2)), positive(4)
    wrt = {0: None, 1: [0, 1], 2: [0]}[of]  # the others do not matter to it
    check_rule("BatchNormalizationGrad", *inputs, outputs=3, of=[of], wrt=wrt, domain="com.microsoft", epsilon=0.1)


@pytest.mark.parametrize("shape", [(2, 4, 3), (2, 4, 3, 2)])
def test_instance_normalization(shape):
    check_rule("InstanceNormalization", RNG.standard_normal(shape), positive(4), positive(4), epsilon=0.1)


@pytest.mark.parametrize("groups", [2, 4])
def test_group_normalization(groups):
    x = RNG.standard_normal((2, 4, 3, 2))
    check_rule("GroupNormalization", x, positive(4), positive(4), num_groups=groups, epsilon=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2])
def test_group_normalization_with_a_scale_for_each_group(groups):
    x = RNG.standard_normal((2, 4, 3))
    check_rule("GroupNormalization", x, positive(groups), positive(groups), num_groups=groups, opset=18)
