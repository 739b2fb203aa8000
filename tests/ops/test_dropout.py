"""SeededDropout: what it drops, how often, and that its gradient is itself."""

import numpy as np
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator
from tests.checks import FLOATS, check, check_refused, same_bits
from tests.runtime.nodes import feeds_of, model_of

import onnxgrad
from onnxgrad.ops.dropout import seeded_dropout


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
