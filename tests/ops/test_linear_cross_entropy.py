"""LinearCrossEntropy against its definition and PyTorch, in chunks and whole, and its error sentences."""

import importlib
import inspect
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checks import (
    DEVICE,
    FLOATS,
    INDICES,
    PRECISION,
    VALUE_ROUNDINGS,
    Expected,
    bound_of_sum,
    call,
    check,
    check_refused,
    examples,
    in_float64,
    layouts,
    result_dtypes,
    with_storage,
)
from tests.functions.models import check_functions
from tests.node_cases import NodeCase, only, without

from onnxgrad.cpu.core.recording import record, without_memory
from onnxgrad.ops.linear_cross_entropy import linear_cross_entropy

pytestmark = pytest.mark.slow  # kernels that few models have, and that take long to compile

LOSS = linear_cross_entropy
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def arrays(
    rows=(6,), depth=8, classes=40, dtype=np.float32, wide=None, trans=1, biased=True, weighted=True, ignored=None,
    scaled=False, index=np.int64, seed=0,
):  # fmt: skip
    """X, W, labels, bias, weights and scale; every third label is `ignored`."""
    rng = np.random.default_rng(seed)
    wide = dtype if wide is None else wide
    X, W = rng.standard_normal((*rows, depth)), rng.standard_normal((classes, depth) if trans else (depth, classes))
    labels = rng.integers(0, max(classes, 1), rows).astype(index)
    if ignored is not None:
        labels.reshape(-1)[::3] = ignored
    bias = rng.standard_normal(classes).astype(wide) if biased else None
    weights = rng.uniform(0.5, 1.5, classes).astype(wide) if weighted else None
    scale = np.asarray(256, wide) if scaled else None
    return [X.astype(dtype), W.astype(wide), labels, bias, weights, scale]


def chunks_of(rows, width, itemsize=4):
    """So few rows at a time, on whatever device the test runs."""
    backend = importlib.import_module(f"onnxgrad.{'cpu' if DEVICE == 'cpu' else 'cuda'}.linear_cross_entropy")
    return mock.patch.object(backend, "CHUNK", rows * width * itemsize)


@pytest.mark.parametrize("trans", [0, 1])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "shape", [((1,), 1, 1), ((5,), 3, 70), ((2, 3), 40, 4), ((3,), 2, 5000), ((70,), 9, 33), ((4,), 3, 128)], ids=str
)
def test_shapes_and_types(shape, dtype, trans):
    check(LOSS, *arrays(*shape, dtype=dtype, trans=trans), transW=trans)


@pytest.mark.parametrize("wide", [np.float32, np.float64])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_weights_of_another_type(dtype, wide):
    check(LOSS, *arrays(dtype=dtype, wide=wide, scaled=True), transW=1)


@pytest.mark.parametrize("ignored", [None, -1, 1, -100, 2**31 - 1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_settings(reduction, weighted, ignored):
    how = {"reduction": reduction, **({} if ignored is None else {"ignore_index": ignored})}
    for trans, index in enumerate(INDICES):
        given = arrays((2, 4), trans=trans, biased=not weighted, weighted=weighted, ignored=ignored, index=index)
        check(LOSS, *given, transW=trans, **how)


@pytest.mark.parametrize("wanted", [["loss"], ["dX"], ["loss", "dW"], ["dB", "loss"], ["loss", "dX", "dW"]], ids=str)
def test_some_results(wanted):
    found = check(LOSS, *arrays(ignored=-1), transW=1, outputs=wanted)
    assert {name for name, f in zip(LOSS.output_names, found, strict=True) if f is not None} == set(wanted)


@pytest.mark.parametrize("trans", [0, 1])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=str)
def test_chunks(dtype, trans):
    given = arrays((2, 90), 5, 130, dtype=dtype, wide=np.float32, trans=trans, ignored=-1, scaled=True)
    with chunks_of(65, 192, 4 if dtype == np.float32 or DEVICE == "cpu" else 2):
        if DEVICE == "cpu":
            with mock.patch("onnxgrad.cpu.linear_cross_entropy.BLOCK", 100):
                check(LOSS, *given, transW=trans)
        else:
            check(LOSS, *given, transW=trans)


@settings(max_examples=examples(20), deadline=None)
@given(data=st.data())
def test_any_shape(data):
    rows = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    depth, classes, trans = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 90)), data.draw(st.integers(0, 1))
    ignored = data.draw(st.sampled_from([None, -1, 0]))
    with chunks_of(data.draw(st.integers(1, 100)), classes):
        how = {"transW": trans, **({} if ignored is None else {"ignore_index": ignored})}
        check(LOSS, *arrays(rows, depth, classes, trans=trans, ignored=ignored), **how)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("trans", [0, 1])
def test_rounded_to_bfloat16(trans, dtype):
    given = arrays((20,), 33, 70, dtype=dtype, trans=trans)
    found = check(LOSS, *given, transW=trans, precision="bfloat16")
    if dtype == np.float16:  # which a GPU leaves as it is
        return
    expected = LOSS.definition(*given, transW=trans, precision="bfloat16")
    for f, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(f, e, rtol=1e-3, atol=1e-3 * np.abs(e).max())


@pytest.mark.parametrize("shape", [((0,), 3, 4), ((2, 0), 3, 4), ((3,), 0, 4)], ids=str)
def test_nothing(shape):
    _, dX, dW, _ = check(LOSS, *arrays(*shape, biased=False), transW=1)
    assert not dX.any()
    assert not dW.any()


def test_without_classes():
    X, W, _, _, _, _ = arrays(classes=0)
    loss, dX, dW, dB = call(LOSS, X, W, np.full(6, -1), transW=1)
    assert (loss, dW.shape, dB.shape) == (0, (0, 8), (0,))
    assert not dX.any()


@pytest.mark.parametrize("layout", layouts(np.zeros((2, 2), np.float32)))
def test_layouts(layout):
    X, W, labels, bias, weights, _ = arrays()
    check(
        LOSS, layouts(X)[layout], layouts(W)[layout], layouts(labels)[layout], layouts(bias)[layout], weights, transW=1
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_where_nothing_counts_everything_is_zero(reduction):
    X, W, labels, bias, weights, _ = arrays()
    for others in ((np.full_like(labels, -1), bias, weights), (labels, bias, np.zeros_like(weights))):
        assert not any(f.any() for f in call(LOSS, X, W, *others, transW=1, reduction=reduction))


def test_rows_that_do_not_count_may_be_no_numbers():
    X, W, labels, bias, _, _ = arrays(ignored=-1)
    loss, dX, _, dB = call(LOSS, np.where(labels[:, None] < 0, np.nan, X), W, labels, bias, transW=1)
    assert np.isfinite(loss)
    assert np.isfinite(dB).all()
    assert not dX[labels < 0].any()


def test_large_logits():
    X, W, labels, bias, weights, _ = arrays()
    check(LOSS, X * np.float32(100), W, labels, bias, weights, transW=1)


def test_working_memory_for_gpt_2():
    """8 · 512 tokens of 50,257 classes, whose logits take 824 MB; nothing is computed."""
    shapes = [(4096, 768), (50257, 768), (4096,), None, None, None, (), (4096, 768), (50257, 768), None]
    types = [np.dtype(np.int64 if k == 2 else np.float32) for k in range(len(shapes))]
    arrays = [None if s is None else without_memory(k, s, types[k]) for k, s in enumerate(shapes)]
    with record() as recording:
        LOSS.kernel("cpu")(*arrays, transW=1, reduction="mean", ignore_index=-1, precision="float32")
    assert sum(recording.workspaces) < 80e6


def test_classes_that_are_masked():
    """Their logits are -inf, all of those that a program on a GPU takes at first."""
    X, W, labels, bias, _, _ = arrays((3, 4), 2, 5000)
    bias[:4500], labels[:] = -np.inf, labels % 500 + 4500
    x, w, b = (torch.tensor(a, requires_grad=True) for a in (X, W, bias))
    logits = torch.nn.functional.linear(x, w, b).view(-1, len(W))
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels).view(-1))
    loss.backward()
    found = call(LOSS, X, W, labels, bias, transW=1)
    for f, e in zip(found, (loss.detach(), x.grad, w.grad, b.grad), strict=True):
        np.testing.assert_allclose(f, e.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("ignored", [-100, 1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_as_in_torch(reduction, ignored):
    X, W, labels, bias, weights, _ = arrays((3, 4), dtype=np.float64, ignored=ignored)
    x, w, b = (torch.tensor(a, requires_grad=True) for a in (X, W, bias))
    logits = torch.nn.functional.linear(x, w, b).view(-1, len(W))
    how = {"reduction": reduction, "ignore_index": ignored}
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels).view(-1), torch.tensor(weights), **how)
    loss.backward()
    found = call(LOSS, X, W, labels, bias, weights, transW=1, **how)
    for f, e in zip(found, (loss.detach(), x.grad, w.grad, b.grad), strict=True):
        np.testing.assert_allclose(f, e.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("trans", [0, 1])
def test_as_a_function(trans, dtype):
    calls = [
        (arrays((2, 3), dtype=dtype, trans=trans), {"transW": trans}),
        (arrays((5,), dtype=dtype, trans=trans, biased=False, weighted=False, ignored=-1), {"transW": trans}),
        (arrays((5,), dtype=dtype, trans=trans, biased=False, scaled=True, index=np.int32), {"transW": trans}),
    ]
    for some in (calls[:1], calls[1:2], calls):
        check_functions(LOSS, *[(tuple(a), kw) for a, kw in some])


def test_labels_out_of_range():
    X, W, labels, bias, weights, _ = arrays((2, 3))
    out = tuple(np.full_like(a, 7) for a in (np.float32(0), X, W, bias))
    for value in (40, -2, 2**40):
        wrong = labels.copy()
        wrong[1, 0] = value
        text = f"label[1, 0] is {value}, expected 0 to 39 or ignore_index -1"
        check_refused(LOSS, IndexError, text, X, W, wrong, bias, weights, out=out, transW=1)
    check(LOSS, X, W, wrong, bias, weights, transW=1, ignore_index=2**40)


def test_refused():
    X, W, labels, bias, weights, scale = arrays(scaled=True)
    out = tuple(np.full_like(a, 7) for a in (np.float32(0), X, W, bias))
    refused = [
        ("reduction is 'none', expected 'mean' or 'sum'", (), {"reduction": "none"}),
        ("precision is 'float16', expected 'float32' or 'bfloat16'", (), {"precision": "float16"}),
        ("W has shape [40], expected two dimensions", (X, W[:, 0]), {}),
        ("X has shape [8], expected at least two dimensions", (X[0],), {}),
        ("X has 7 columns, expected 8 for W of shape [40, 8]", (X[:, 1:],), {}),
        ("labels has 5 elements, expected 6, one for each row of X", (X, W, labels[1:]), {}),
        ("bias has shape [39], expected [40], one per class", (X, W, labels, bias[1:]), {}),
        ("weights has shape [39], expected [40], one per class", (X, W, labels, bias, weights[1:]), {}),
        ("scale has shape [2], expected a single number", (X, W, labels, bias, weights, np.ones(2, np.float32)), {}),
    ]
    for text, changed, attributes in refused:
        arguments = [*changed, *(X, W, labels, bias, weights, scale)[len(changed) :]]
        check_refused(LOSS, ValueError, text, *arguments, out=out, **{"transW": 1, **attributes})


def test_a_bad_label_of_more_dimensions_than_numpy_iterates():
    X, W, *_ = arrays((2,), biased=False, trans=1)
    labels = np.zeros((1,) * 40 + (2,), np.int64)
    labels[..., 1] = len(W)
    with pytest.raises(
        IndexError, match=rf"^LinearCrossEntropy: label\[.*, 1\] is {len(W)}, expected 0 to {len(W) - 1}"
    ):
        LOSS(X, W, labels, transW=1)


def expected(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """Products of rounded numbers, whose errors go through exponentials into products again."""
    dtypes = result_dtypes(op, args, kwargs)
    of_x = np.asarray(args[0]).dtype.newbyteorder("=")
    precision = PRECISION[of_x]
    bound = inspect.signature(op.body).bind(*(in_float64(a) for a in args), **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    wide = {name: given[name] for name in ("X", "W", "labels", "bias", "weights", "scale")}
    how = {name: given[name] for name in ("transW", "reduction", "ignore_index")}
    exact = op.definition(**wide, **how, outputs=given["outputs"])
    # Logits, W and gradients may be rounded to the type of X, and to bfloat16.
    narrow = PRECISION[BFLOAT16 if given["precision"] == "bfloat16" and of_x != np.float64 else of_x].stored
    unit = max(PRECISION[d].unit for d in (of_x, *dtypes))  # weights and results may have another type than X
    few, smallest = VALUE_ROUNDINGS * unit, precision.smallest
    vanishing = 2**8 * float(np.finfo(precision.sums).tiny)  # exponentials below that are as good as 0
    w = given["W"] if given["transW"] else given["W"].T
    classes, depth = w.shape
    x = given["X"].reshape(given["labels"].size, depth)
    if not len(x) or not classes:
        return exact, tuple(None if e is None else np.zeros_like(e) for e in exact)
    with np.errstate(all="ignore"):
        size = np.abs(x) @ np.abs(w).T + (0 if given["bias"] is None else np.abs(given["bias"]))
        logits = x @ w.T + (0 if given["bias"] is None else given["bias"])
        off = np.max(size * ((depth + 8) * unit + 4 * narrow), 1)  # of any logit of a row
        ignored = (given["labels"] == given["ignore_index"]).reshape(-1)
        chosen = np.where(ignored, 0, given["labels"].reshape(-1))
        counts = np.where(ignored, 0.0, 1.0 if given["weights"] is None else given["weights"][chosen])
        total = (np.sum(counts) or 1.0) if given["reduction"] == "mean" else 1.0
        each = np.abs(counts / total) * (1.0 if given["scale"] is None else float(np.abs(given["scale"]).item()))
        probability = np.exp(logits - np.max(logits, 1, keepdims=True))
        probability /= np.sum(probability, 1, keepdims=True)
        apart = np.max(np.abs(logits - np.max(logits, 1, keepdims=True)), 1)
        grows = np.expm1(2 * off) + (classes + apart + VALUE_ROUNDINGS) * unit
        right = np.arange(classes) == chosen[:, None]
        size_of_gradient = (probability + right) * each[:, None]
        of_gradient = size_of_gradient * (few + 2 * narrow) + probability * (each * grows)[:, None]
        of_gradient += smallest + vanishing * each[:, None]
        of_loss = np.sum(np.abs(counts) * (2 * off + grows + few * (1 + apart + np.log(classes)))) / abs(total)
        of_x_gradient = of_gradient @ np.abs(w) + size_of_gradient @ np.abs(w) * 2 * narrow
        of_w_gradient = of_gradient.T @ np.abs(x) + size_of_gradient.T @ np.abs(x) * narrow
        of_x_gradient += bound_of_sum(precision, classes + 2, size_of_gradient @ np.abs(w))
        of_w_gradient += bound_of_sum(precision, len(x) + 2, size_of_gradient.T @ np.abs(x))
        of_b_gradient = np.sum(of_gradient, 0) + bound_of_sum(precision, len(x) + 2, np.sum(size_of_gradient, 0))
    of_w_gradient = of_w_gradient if given["transW"] else of_w_gradient.T
    bounds = of_loss, of_x_gradient.reshape(given["X"].shape), of_w_gradient, of_b_gradient
    return exact, tuple(
        None if e is None else with_storage(PRECISION[d], e, b) for e, b, d in zip(exact, bounds, dtypes, strict=True)
    )


def node_cases() -> Iterator[NodeCase]:
    """Small calls for every runtime to run."""
    for dtype, index, trans, full in itertools.product(FLOATS, INDICES, (0, 1), (False, True)):
        wide = np.dtype(np.float32) if dtype.itemsize == 2 and trans else dtype

        def make(dtype=dtype, wide=wide, index=index, trans=trans, full=full):
            return arrays(
                (2, 3), 4, 5, dtype, wide, trans, biased=full, weighted=full, ignored=-1, scaled=full, index=index
            )

        parameters = {"type": str(dtype), "wide": f"{wide}_W", "index": f"{index}_labels", "trans": f"trans{trans}"}
        parameters["absent"] = without([] if full else ["bias", "weights", "scale"])
        yield NodeCase(LOSS, parameters, make, {"transW": trans})
        if dtype == np.float32 and full:
            yield NodeCase(LOSS, {**parameters, "outputs": only(["loss"])}, make, {"transW": trans}, outputs=["loss"])
