"""SeededDropout: what it drops, how often, and that its gradient is itself. DropoutGrad: against its definition."""

import itertools
from collections.abc import Iterator

import numpy as np
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from tests.checks import FLOATS, call, check, check_refused, layouts, same_bits
from tests.expected import exact
from tests.node_cases import NodeCase
from tests.runtime.nodes import feeds_of, model_of

import onnxgrad
from onnxgrad.ops.dropout import dropout_grad, seeded_dropout


def numbers(shape, dtype=np.float32):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4, 5), (300, 200)], ids=str)
def test_every_type(shape, dtype, ratio):
    check(seeded_dropout, numbers(shape, dtype), np.array([42]), ratio)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_any_seed(seed):
    check(seeded_dropout, numbers((40, 50)), np.array([seed]), 0.25)
    check(seeded_dropout, numbers((40, 50)), np.array(seed), 0.25)


def test_about_as_many_as_asked_for_and_others_with_another_seed():
    ones = np.ones(1_000_000, np.float32)
    masks = [seeded_dropout(ones, np.array([seed]), 0.3) == 0 for seed in (1, 2)]
    for mask in masks:
        assert abs(mask.mean() - 0.3) < 0.002
        assert abs(np.corrcoef(mask[:-1], mask[1:])[0, 1]) < 0.004
    assert abs(np.corrcoef(*masks)[0, 1]) < 0.004


def test_what_is_refused():
    data = numbers((2, 3))
    check_refused(
        seeded_dropout,
        ValueError,
        "ratio is 1.0, expected a number of at least 0 and under 1",
        data,
        np.array([1]),
        1.0,
    )
    check_refused(seeded_dropout, ValueError, "seed has shape [2], expected a single number", data, np.array([1, 2]))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(0,), (3, 4, 5), (40, 500)], ids=str)
def test_in_a_session_with_and_without_the_kernel(shape, dtype):
    args = numbers(shape, dtype), np.array([7])
    model = onnxgrad.add_functions(model_of(seeded_dropout, args, {"ratio": 0.25}))
    expected = seeded_dropout(*args, 0.25)
    for options in (onnxruntime.SessionOptions(), onnxgrad.register()):
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        assert same_bits(session.run(None, feeds_of(seeded_dropout, args))[0], expected)
    reference = ReferenceEvaluator(model)
    assert same_bits(np.asarray(reference.run(None, feeds_of(seeded_dropout, args))[0]), expected)


def test_its_gradient_is_itself():
    args = numbers((6, 7), np.float64), np.array([3])
    model = model_of(seeded_dropout, args, {"ratio": 0.5})
    checked = onnxgrad.check_gradient(model, feeds_of(seeded_dropout, args), "data")
    assert checked.worst < 1e-8


def of_dropout(shape, dtype=np.float32, ratio=None, training=None):
    """dy, mask, ratio and training_mode."""
    mask = np.random.default_rng(1).random(shape) < 0.7
    return numbers(shape, dtype), np.asarray(mask), ratio, None if training is None else np.array(training)


@pytest.mark.parametrize("training", [None, True, False])
@pytest.mark.parametrize("ratio", [None, 0.0, 0.1, 0.75])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (300, 200)], ids=str)
def test_gradient_of_every_type(shape, dtype, ratio, training):
    ratio = None if ratio is None else np.array(ratio, dtype)
    check(dropout_grad, *of_dropout(shape, dtype, ratio, training))


@pytest.mark.parametrize("ratio", [np.array([0.25], t) for t in FLOATS], ids=lambda r: str(r.dtype))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_ratio_of_any_type(dtype, ratio):
    check(dropout_grad, *of_dropout((30, 40), dtype, ratio, True))


def test_nothing_passes_what_was_dropped():
    dy, mask = np.array([np.nan, np.inf, np.nan, 3], np.float32), np.array([False, False, True, True])
    np.testing.assert_array_equal(call(dropout_grad, dy, mask), [0, 0, np.nan, 6])


def test_gradient_as_in_torch():
    dy, mask, *_ = of_dropout((40, 50))
    expected = torch.ops.aten.native_dropout_backward(torch.from_numpy(dy), torch.from_numpy(mask), 1 / (1 - 0.25))
    found = call(dropout_grad, dy, mask, np.array(0.25, np.float32))
    np.testing.assert_allclose(found, expected.numpy(), rtol=2e-7)


@pytest.mark.parametrize("layout", layouts(np.zeros((2, 2), np.float32)))
def test_gradient_in_any_layout(layout):
    dy, mask, *_ = of_dropout((6, 8))
    check(dropout_grad, layouts(dy)[layout], mask)
    check(dropout_grad, dy, layouts(mask).get(layout, mask))


def test_what_the_gradient_refuses():
    dy, mask, *_ = of_dropout((2, 3))
    two = np.zeros(2, np.float32)
    check_refused(dropout_grad, ValueError, "dy has shape [2, 3], expected [3] as mask has", dy, mask[0])
    check_refused(dropout_grad, ValueError, "ratio has shape [2], expected a single value", dy, mask, two)
    check_refused(
        dropout_grad, ValueError, "training_mode has shape [2], expected a single value", dy, mask, None, two > 0
    )


expected = exact  # how far a right kernel may be from the definition


def node_cases() -> Iterator[NodeCase]:
    """Small calls for every runtime to run."""
    yield from _seeded_cases()
    yield from _grad_cases()


def _seeded_cases() -> Iterator[NodeCase]:
    for dtype, ratio in itertools.product(FLOATS, (0.0, 0.25)):

        def make(dtype=dtype):
            return np.random.default_rng(0).standard_normal((3, 40)).astype(dtype), np.array([11])

        parameters = {"type": str(dtype), "ratio": f"ratio_{ratio}"}
        yield NodeCase(seeded_dropout, parameters, make, {"ratio": ratio})


def _grad_cases() -> Iterator[NodeCase]:
    for dtype, ratio_type, training in itertools.product(FLOATS, (None, *FLOATS), (None, True, False)):

        def make(dtype=dtype, ratio_type=ratio_type, training=training):
            rng = np.random.default_rng(0)
            dy, mask = rng.standard_normal((3, 40)).astype(dtype), rng.random((3, 40)) < 0.75
            return dy, mask, ratio_type and np.array(0.25, ratio_type), None if training is None else np.array(training)

        parameters = {
            "type": str(dtype),
            "ratio": f"{ratio_type}_ratio" if ratio_type else "without_ratio",
            "training": "without_training_mode" if training is None else "training" if training else "inference",
        }
        yield NodeCase(dropout_grad, parameters, make)
