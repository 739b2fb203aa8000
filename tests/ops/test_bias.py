"""BiasGrad against its definition, and as an ONNX function; on the CPU there is no kernel."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.checks import (
    DEVICE,
    FLOATS,
    PRECISION,
    Expected,
    bound_of_sum,
    check,
    in_float64,
    raises,
    result_dtype,
    with_storage,
)
from tests.functions.models import FLOATS as IN_ONNXRUNTIME
from tests.functions.models import check_functions
from tests.node_cases import NodeCase

from onnxgrad.ops.bias import bias_grad

SHAPES = [(5,), (3, 4), (2, 3, 70), (0, 3), (3, 0), (2, 0, 3), (4100, 65), (2, 2050, 3), (20, 2070), (3, 8500)]


def array(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_types(shape, dtype):
    dY = array(shape, dtype)
    if DEVICE != "cpu":
        check(bias_grad, dY)
    dB = bias_grad.definition(dY)
    expected = in_float64(dY).reshape(int(np.prod(shape[:-1])), shape[-1]).sum(0)
    assert dB.dtype == dtype and dB.shape == shape[-1:]
    assert np.allclose(in_float64(dB), expected, rtol=4 * PRECISION[np.dtype(dtype)].stored, atol=1e-3)


@pytest.mark.parametrize("dtype", IN_ONNXRUNTIME)
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 7), (0, 3)], ids=str)
def test_function(shape, dtype):
    check_functions(bias_grad, ((array(shape, dtype),), {}))


def test_a_single_number():
    with raises(ValueError, "BiasGrad: dY is a single number, expected at least one dimension"):
        bias_grad.definition(np.float32(1).reshape(()))


def expected(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    precision, dY = PRECISION[result_dtype(op, args, kwargs)], in_float64(np.asarray(args[0]))
    absolute = op.definition(np.abs(dY))
    bound = bound_of_sum(precision, np.full_like(absolute, dY.size // max(1, dY.shape[-1])), absolute)
    found = op.definition(dY)
    return (found,), (with_storage(precision, found, bound),)


def node_cases() -> Iterator[NodeCase]:
    """Small calls for every runtime to run."""
    for dtype in FLOATS:
        yield NodeCase(bias_grad, {"type": str(dtype)}, lambda dtype=dtype: [array((2, 3, 5), dtype)])
