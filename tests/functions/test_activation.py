"""The gradients of activations and of Dropout as ONNX functions."""

import numpy as np
import pytest
from tests.functions.models import FLOATS, check_functions
from tests.ops import test_gelu
from tests.ops.test_activation import ALL, arrays
from tests.ops.test_dropout import of_dropout

from onnxgrad.ops.activation import leaky_relu_grad
from onnxgrad.ops.dropout import dropout_grad
from onnxgrad.ops.gelu import quick_gelu_grad


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ALL, ids=lambda op: op.function_name)
def test_activation(op, dtype):
    check_functions(op, (arrays((3, 40), dtype), {}), (arrays((2, 0), dtype), {}))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", [*test_gelu.PLAIN, *test_gelu.BIASED], ids=lambda op: op.function_name)
def test_gelus(op, dtype):
    calls = [
        test_gelu.arrays(op, shape, dtype, scale=scale) for shape, scale in (((30, 40), 2), ((2, 0), 1), ((9,), 1e4))
    ]
    check_functions(op, *((call, {}) for call in calls))


def test_attributes_that_differ():
    check_functions(leaky_relu_grad, *((arrays((3, 4)), {"alpha": alpha}) for alpha in (0.5, -0.25)))
    check_functions(quick_gelu_grad, *((arrays((3, 4)), {"alpha": alpha}) for alpha in (1.0, -3.25)))


@pytest.mark.parametrize("training", [None, True, False])
@pytest.mark.parametrize("ratio", [None, 0.0, 0.1])
@pytest.mark.parametrize("dtype", FLOATS)
def test_dropout(dtype, ratio, training):
    ratio = None if ratio is None else np.array(ratio, np.float32)
    check_functions(dropout_grad, (of_dropout((3, 40), dtype, ratio, training), {}))


def test_dropouts_that_differ_in_their_inputs():
    ratio = np.array(0.25, np.float32)
    with pytest.raises(ValueError, match="give each node both"):
        check_functions(dropout_grad, (of_dropout((3, 4)), {}), (of_dropout((3, 4), ratio=ratio, training=True), {}))
