"""SoftmaxCrossEntropyLossInternal and its gradient against their definitions, PyTorch, and their error sentences."""

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checks import (
    FLOATS,
    INDICES,
    PRECISION,
    REFERENCE,
    VALUE_ROUNDINGS,
    Expected,
    bound_of_sum,
    call,
    check,
    check_refused,
    examples,
    in_float64,
    layouts,
    result_dtype,
    with_storage,
)
from tests.functions.models import check_functions
from tests.node_cases import NodeCase, only, without

from onnxgrad.ops.softmax_cross_entropy_loss import (
    softmax_cross_entropy_loss_grad,
    softmax_cross_entropy_loss_internal,
)

LOSS = softmax_cross_entropy_loss_internal
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


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("ignored", [None, -1, 1, -100, 2**31 - 1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_settings(reduction, weighted, ignored, index):
    given = {} if ignored is None else {"ignore_index": ignored}
    for shape in ((6, 4), (2, 4, 5)):
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


# The loss itself.


def scored(shape, dtype=np.float32, weighted=True, ignored=None, index=np.int64, seed=0):
    """scores, labels, weights and ignore_index; every third label is `ignored`."""
    _, _, labels, weights = arrays(shape, dtype, "mean", weighted, ignored, index, seed)
    scores = np.random.default_rng(seed + 1).normal(0, 3, shape).astype(dtype)
    return [scores, labels, weights, None if ignored is None else np.array(ignored)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (65, 31), (5, 32), (3, 64), (4, 97), (2000, 9)], ids=str)
def test_loss_of_shapes_and_types(shape, dtype):
    check(LOSS, *scored(shape, dtype))


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("ignored", [None, -1, 1, -100, 2**31 - 1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_loss_with_settings(reduction, weighted, ignored, index):
    for shape in ((6, 4), (2, 4, 5)):
        check(LOSS, *scored(shape, np.float32, weighted, ignored, index), reduction=reduction)


@pytest.mark.parametrize("wanted", [["output"], ["log_prob"], ["output", "log_prob"]], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_some_results_of_the_loss(reduction, wanted):
    for shape in ((7, 40), (2, 5, 3)):
        found = check(LOSS, *scored(shape, ignored=1), reduction=reduction, outputs=wanted)
        assert [name for name, f in zip(LOSS.output_names, found, strict=True) if f is not None] == wanted


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_loss_of_any_shape(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 30), min_size=2, max_size=4)))
    reduction, ignored = data.draw(st.sampled_from(REDUCTIONS)), data.draw(st.sampled_from([None, -1, 0, -100]))
    check(LOSS, *scored(shape, weighted=data.draw(st.booleans()), ignored=ignored), reduction=reduction)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(0, 3), (3, 0, 0), (2, 3, 0), (0, 0)], ids=str)
def test_loss_of_nothing(shape, reduction):
    labels = np.zeros((shape[0], *shape[2:]), np.int64)
    output, log_prob = call(LOSS, np.zeros(shape, np.float32), labels, reduction=reduction)
    assert output.shape == (labels.shape if reduction == "none" else ())
    assert not output.any()
    assert log_prob.shape == shape


def test_loss_without_classes():
    output, log_prob = check(LOSS, np.zeros((2, 0), np.float32), np.full(2, -1), reduction="none")
    assert output.tolist() == [0, 0]
    assert log_prob.shape == (2, 0)


@pytest.mark.parametrize("layout", layouts(np.zeros((2, 2), np.float32)))
def test_layouts_of_the_loss(layout):
    scores, labels, weights, _ = scored((6, 8))
    check(LOSS, layouts(scores)[layout], labels, weights)
    check(LOSS, scores, layouts(labels)[layout], layouts(weights)[layout], reduction="none")


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_where_nothing_counts_there_is_no_loss(reduction):
    scores, labels, weights, _ = scored((4, 3))
    assert not call(LOSS, scores, labels, np.zeros_like(weights), reduction=reduction)[0].any()
    scores[0, 0] = np.nan
    assert not call(LOSS, scores, np.full_like(labels, -1), weights, reduction=reduction)[0].any()


@pytest.mark.parametrize("shape", [(4, 40), (4, 3), (2, 5, 2)], ids=str)
def test_loss_of_scores_that_are_no_numbers(shape):
    scores, labels, _, _ = scored(shape, weighted=False)
    first = (slice(None), *(0,) * (len(shape) - 2))
    labels[...] = 1
    scores[(0, 0, *first[1:])], scores[(1, 0, *first[1:])] = np.nan, -np.inf
    losses, log_prob = check(LOSS, scores, labels, reduction="none")
    assert np.isnan(log_prob[(0, slice(None), *first[1:])]).all()
    assert np.isnan(losses).sum() == 1
    assert np.isnan(log_prob).sum() == shape[1]
    assert log_prob[(1, 0, *first[1:])] == -np.inf
    scores[(1, 1, *first[1:])] = -np.inf  # the right class is ruled out
    scores[(0, 0, *first[1:])] = np.inf
    losses, log_prob = check(LOSS, scores, labels, reduction="none")
    assert losses[(1, *first[1:])] == np.inf
    assert np.isnan(log_prob).sum() == shape[1]
    scores[(0, slice(None), *first[1:])] = -np.inf  # no class is possible
    assert np.isnan(check(LOSS, scores, labels, reduction="none")[1]).sum() == shape[1]


def test_loss_of_large_scores():
    scores, labels, weights, _ = scored((5, 70))
    check(LOSS, scores * np.float32(1e4), labels, weights)
    check(LOSS, scores + np.float32(1e6), labels, weights)


@pytest.mark.parametrize("ignored", [-100, 1])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_loss_as_in_torch(reduction, ignored):
    scores, labels, weights, _ = scored((3, 5, 4), np.float64, True, ignored)
    x, target, weight = map(torch.tensor, (scores, labels, weights))
    expected = torch.nn.functional.cross_entropy(x, target, weight, reduction=reduction, ignore_index=ignored)
    output, log_prob = call(LOSS, scores, labels, weights, np.array(ignored), reduction=reduction)
    np.testing.assert_allclose(output, expected.numpy(), rtol=1e-12)
    np.testing.assert_allclose(log_prob, torch.log_softmax(x, 1).numpy(), rtol=1e-12)


def test_the_ignored_label_may_be_a_plain_number_and_the_type_be_given():
    scores, labels, _, _ = scored((4, 3), weighted=False, ignored=1)
    expected = call(LOSS, scores, labels, None, np.array(1))
    for ignored in (1, [1], np.array([1])):
        for found, one in zip(call(LOSS, scores, labels, None, ignored, output_type=1), expected, strict=True):
            assert np.array_equal(found, one)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_loss_as_a_function(reduction, dtype):
    calls = [
        (scored(shape, dtype, weighted, ignored, index), {"reduction": reduction})
        for shape, weighted, ignored, index in (
            ((4, 3), True, None, np.int64),
            ((2, 3, 2), True, 2**31 - 1, np.int32),
            ((2, 3, 2), False, None, np.int64),
            ((5, 4), False, -100, np.int64),
        )
    ]
    for some in (*([c] for c in calls), calls):
        check_functions(LOSS, *[(tuple(a), kw) for a, kw in some])
    check_functions(LOSS, (tuple(calls[0][0]), {"reduction": reduction}), wanted=["output"])


def test_loss_as_a_function_where_all_are_ignored():
    scores, labels, weights, _ = scored((4, 3))
    check_functions(LOSS, ((scores, np.full_like(labels, -1), weights), {}))


@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 2)])
def test_labels_of_the_loss_out_of_range(shape):
    scores, labels, weights, _ = scored(shape)
    out = np.full((), 7, np.float32), np.full_like(scores, 7)
    for value in (3, -2, 2**40):
        wrong = labels.copy()
        wrong.reshape(-1)[2] = value
        where = "[2]" if len(shape) == 2 else "[1, 0]"
        text = f"label{where} is {value}, expected 0 to 2 or ignore_index -1"
        check_refused(LOSS, IndexError, text, scores, wrong, weights, out=out)
    check(LOSS, scores, wrong, weights, np.array(2**40))


def test_refused_losses():
    scores, labels, weights, _ = scored((4, 3))
    out = np.full((), 7, np.float32), np.full_like(scores, 7)
    refused = [
        (ValueError, "reduction is 'all', expected one of 'none', 'mean', 'sum'", (), {"reduction": "all"}),
        (ValueError, "scores has shape [3], expected at least two dimensions", (scores[0],), {}),
        (ValueError, "labels has shape [3], expected [4] for scores of shape [4, 3]", (scores, labels[1:]), {}),
        (ValueError, "weights has shape [2], expected [3], one per class", (scores, labels, weights[1:]), {}),
        (ValueError, "ignore_index has shape [2], expected a single number", (), {"ignore_index": np.array([1, 2])}),
        (ValueError, "output_type is 11, expected none or 1: float32 as scores are", (), {"output_type": 11}),
        (TypeError, "weights is float64, expected float32 as scores is", (scores, labels, weights.astype("f8")), {}),
    ]
    for error, text, changed, attributes in refused:
        arguments = [*changed, *(scores, labels, weights)[len(changed) :]]
        check_refused(LOSS, error, text, *arguments, out=out, **attributes)


def expected(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """How far a right kernel may be from the definition."""
    return (expected_loss if op is softmax_cross_entropy_loss_internal else expected_grad)(op, args, kwargs)


def expected_grad(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """A probability, which is an exponential, minus 1 or not, times a number over a sum of weights in float64."""
    precision = PRECISION[result_dtype(op, args, kwargs)]
    wide = [in_float64(a) for a in args]
    expected = op.definition(*wide, **kwargs)
    nothing = [wide[0], np.full_like(wide[1], -np.inf), *wide[2:]]  # no probability leaves what is taken off
    absolute = np.abs(expected) + 2 * np.abs(op.definition(*nothing, **kwargs))
    bound = VALUE_ROUNDINGS * precision.unit * absolute + 2 * bound_of_sum(REFERENCE, args[2].size, absolute)
    return (expected,), (with_storage(precision, expected, bound),)


def expected_loss(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """Differences to the highest score and to a logarithm, of a sum of exponentials; losses add up in float64."""
    precision = PRECISION[result_dtype(op, args, kwargs)]
    bound = inspect.signature(op.body).bind(*(in_float64(a) for a in args), **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    scores, labels, weights = given["scores"], given["labels"], given["weights"]
    expected = op.definition(**given)
    if not scores.size:
        return expected, tuple(None if e is None else np.zeros_like(e) for e in expected)
    losses, log_prob = op.definition(**{**given, "reduction": "none", "outputs": None})
    with np.errstate(invalid="ignore"):
        apart = scores - np.max(scores, 1, keepdims=True)
    few = VALUE_ROUNDINGS * precision.unit
    sizes = [np.where(np.isfinite(x), np.abs(x), 0) for x in (apart, log_prob, losses)]
    off = bound_of_sum(precision, scores.shape[1], 1.0) + few * (1 + sizes[0] + sizes[1])
    ignored = labels == (-1 if given["ignore_index"] is None else given["ignore_index"])
    chosen = np.where(ignored, 0, labels)
    counts = np.where(ignored, 0, 1 if weights is None else weights[chosen])
    of_loss = np.take_along_axis(off, np.expand_dims(chosen, 1), 1)[:, 0] * np.abs(counts) + few * sizes[2]
    if given["reduction"] != "none":
        of_loss = np.sum(of_loss) + bound_of_sum(REFERENCE, losses.size, np.sum(sizes[2]))
    if given["reduction"] == "mean":
        of_loss = of_loss / (np.abs(np.sum(counts)) or 1)
    pairs = zip(expected, (of_loss, off), strict=True)
    return expected, tuple(None if e is None else with_storage(precision, e, b) for e, b in pairs)


def node_cases() -> Iterator[NodeCase]:
    """Small calls for every runtime to run."""
    yield from _loss_cases()
    yield from _grad_cases()


def _loss_cases() -> Iterator[NodeCase]:
    for dtype, index, weighted, ignored in itertools.product(FLOATS, INDICES, (False, True), (None, 1)):
        for reduction, shape in (("mean", (4, 5)), ("none", (2, 5, 3))):

            def make(dtype=dtype, index=index, weighted=weighted, ignored=ignored, shape=shape):
                rng = np.random.default_rng(0)
                labels = rng.integers(-1 if ignored is None else 0, 5, (shape[0], *shape[2:])).astype(index)
                weights = rng.uniform(0.5, 2, 5).astype(dtype) if weighted else None
                return rng.standard_normal(shape).astype(dtype), labels, weights, ignored and np.array(ignored)

            absent = [*([] if weighted else ["weights"]), *([] if ignored else ["ignore_index"])]
            parameters = {"type": str(dtype), "index": f"{index}_labels", "reduction": reduction}
            parameters["absent"] = without(absent)
            yield NodeCase(softmax_cross_entropy_loss_internal, parameters, make, {"reduction": reduction})
            if dtype == np.float32 and weighted:
                parameters = {**parameters, "outputs": only(["output"])}
                how = {"reduction": reduction}
                yield NodeCase(softmax_cross_entropy_loss_internal, parameters, make, how, outputs=["output"])


def _grad_cases() -> Iterator[NodeCase]:
    for dtype, index, weighted in itertools.product(FLOATS, INDICES, (False, True)):
        for reduction, shape in (("mean", (4, 5)), ("none", (2, 5, 3))):

            def make(dtype=dtype, index=index, weighted=weighted, reduction=reduction, shape=shape):
                rng = np.random.default_rng(0)
                x = rng.standard_normal(shape)
                label = rng.integers(-1, 5, (shape[0], *shape[2:])).astype(index)
                dY = np.asarray(rng.standard_normal(label.shape if reduction == "none" else ()), dtype)
                weight = rng.uniform(0.5, 2, 5).astype(dtype) if weighted else None
                return dY, (x - np.log(np.exp(x).sum(1, keepdims=True))).astype(dtype), label, weight

            parameters = {"type": str(dtype), "index": f"{index}_label", "reduction": reduction}
            parameters["absent"] = without([] if weighted else ["weight"])
            yield NodeCase(softmax_cross_entropy_loss_grad, parameters, make, {"reduction": reduction})
