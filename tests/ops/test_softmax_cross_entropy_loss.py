"""SoftmaxCrossEntropyLossGrad against its definition, PyTorch, and its own error sentences."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checks import FLOATS, INDICES, call, check, check_refused, examples, layouts
from tests.function_models import check_functions

from onnxgrad.ops.softmax_cross_entropy_loss import softmax_cross_entropy_loss_grad

GRAD = softmax_cross_entropy_loss_grad
REDUCTIONS = ["none", "mean", "sum"]
SHAPES = [(1, 1), (5, 4), (3, 40), (2, 5000), (700, 3), (2, 3, 5), (2, 21, 300), (2, 4, 3, 2, 2), (600, 2, 7)]


def arrays(shape, dtype=np.float32, reduction="mean", weighted=True, ignored=None, index=np.int64, seed=0):
    """dY, log_prob, label and weight, as a session would have them; every third label is `ignored`."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    log_prob = x - np.log(np.exp(x).sum(1, keepdims=True))
    label = rng.integers(0, shape[1], (shape[0], *shape[2:])).astype(index)
    if ignored is not None:
        label.reshape(-1)[::3] = ignored
    dY = rng.standard_normal(label.shape if reduction == "none" else ())
    weight = rng.uniform(0.5, 1.5, shape[1]) if weighted else None
    return [
        None if a is None else np.asarray(a, a.dtype if a is label else dtype) for a in (dY, log_prob, label, weight)
    ]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_types(shape, dtype):
    check(GRAD, *arrays(shape, dtype))


@pytest.mark.parametrize("ignored", [None, -1, 1, -100, 2**31 - 1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_settings(reduction, weighted, ignored):
    for shape, index in zip(((6, 4), (2, 4, 5)), INDICES, strict=True):
        given = {} if ignored is None else {"ignore_index": ignored}
        check(GRAD, *arrays(shape, np.float32, reduction, weighted, ignored, index), reduction=reduction, **given)


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_any_shape(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 30), min_size=2, max_size=4)))
    reduction = data.draw(st.sampled_from(REDUCTIONS))
    check(GRAD, *arrays(shape, reduction=reduction, weighted=data.draw(st.booleans())), reduction=reduction)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0, 0), (2, 3, 0), (0, 0)], ids=str)
def test_nothing(shape):
    dY, log_prob = np.ones((), np.float32), np.zeros(shape, np.float32)
    assert call(GRAD, dY, log_prob, np.zeros((shape[0], *shape[2:]), np.int64)).shape == shape


@pytest.mark.parametrize("layout", layouts(np.zeros((2, 2), np.float32)))
def test_layouts(layout):
    dY, log_prob, label, weight = arrays((6, 8), reduction="none")
    check(GRAD, dY, layouts(log_prob)[layout], label, weight, reduction="none")
    check(GRAD, layouts(dY)[layout], log_prob, layouts(label)[layout], layouts(weight)[layout], reduction="none")


def test_where_nothing_counts_everything_is_zero():
    dY, log_prob, label, weight = arrays((4, 3))
    log_prob[0, 0] = np.nan
    assert not call(GRAD, dY, log_prob, np.full_like(label, -1), weight).any()
    assert not call(GRAD, dY, log_prob[1:], label[1:], np.zeros_like(weight)).any()


def test_nan_and_classes_that_are_ruled_out():
    dY, log_prob, label, _ = arrays((3, 40), weighted=False)
    log_prob[1, 3], log_prob[2, 5] = np.nan, -np.inf
    found = call(GRAD, dY, log_prob, label)
    assert np.argwhere(np.isnan(found)).tolist() == [[1, 3]]
    assert found[2, 5] == (-dY / 3 if label[2] == 5 else 0)


@pytest.mark.parametrize("ignored", [-100, 1])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_as_in_torch(reduction, ignored):
    dY, log_prob, label, weight = arrays((3, 5, 4), np.float64, reduction, True, ignored)
    x = torch.tensor(log_prob, requires_grad=True)  # their own logarithms of probabilities
    loss = torch.nn.functional.cross_entropy(
        x, torch.tensor(label), torch.tensor(weight), reduction=reduction, ignore_index=ignored
    )
    loss.backward(torch.tensor(dY))
    found = call(GRAD, dY, log_prob, label, weight, reduction=reduction, ignore_index=ignored)
    np.testing.assert_allclose(found, x.grad.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_as_a_function(reduction, dtype):
    calls = [
        (arrays(shape, dtype, reduction, weighted, ignored, index), {"reduction": reduction, **given})
        for shape, weighted, ignored, index, given in (
            ((4, 3), True, None, np.int64, {}),
            ((2, 3, 2), True, 2**31 - 1, np.int32, {"ignore_index": 2**31 - 1}),
            ((2, 3, 2), False, -1, np.int64, {}),
        )
    ]
    for some in (calls[:1], calls[1:2], calls[2:], calls):
        check_functions(GRAD, *[(tuple(a), kw) for a, kw in some])


def test_all_ignored_as_a_function():
    dY, log_prob, label, weight = arrays((4, 3))
    check_functions(GRAD, ((dY, log_prob, np.full_like(label, -1), weight), {}))


@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 2)])
def test_labels_out_of_range(shape):
    dY, log_prob, label, weight = arrays(shape)
    for value in (3, -2, 2**40):
        wrong = label.copy()
        wrong.reshape(-1)[2] = value
        where = "[2]" if len(shape) == 2 else "[1, 0]"
        text = f"label{where} is {value}, expected 0 to 2 or ignore_index -1"
        check_refused(GRAD, IndexError, text, dY, log_prob, wrong, weight, out=np.full_like(log_prob, 7))
    check(GRAD, dY, log_prob, wrong, weight, ignore_index=2**40)


def test_refused():
    dY, log_prob, label, weight = arrays((4, 3))
    half = ml_dtypes.bfloat16
    refused = [
        (ValueError, "reduction is 'all', expected one of 'none', 'mean', 'sum'", (), {"reduction": "all"}),
        (ValueError, "dY has shape [], expected [4] as label has", (), {"reduction": "none"}),
        (ValueError, "dY has shape [4], expected a single number for reduction 'mean'", (np.ones(4, np.float32),), {}),
        (ValueError, "log_prob has shape [3], expected at least two dimensions", (dY, log_prob[0]), {}),
        (ValueError, "label has shape [3], expected [4] for log_prob of shape [4, 3]", (dY, log_prob, label[1:]), {}),
        (ValueError, "weight has shape [2], expected [3], one per class", (dY, log_prob, label, weight[1:]), {}),
        (TypeError, "weight is bfloat16, expected float32 as dY is", (dY, log_prob, label, weight.astype(half)), {}),
    ]
    for error, text, changed, attributes in refused:
        arguments = [*changed, *(dY, log_prob, label, weight)[len(changed) :]]
        check_refused(GRAD, error, text, *arguments, **attributes)
