"""FlashAttention and FlashAttentionGrad against their definitions, their ONNX functions and PyTorch."""

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
    PRECISION,
    Expected,
    call,
    check,
    check_refused,
    examples,
    in_float64,
    layouts,
    result_dtypes,
)
from tests.expected import by_nudges
from tests.functions.models import check_functions
from tests.node_cases import NodeCase, without
from torch.nn import functional

from onnxgrad.ops.attention import flash_attention, flash_attention_grad

LOWEST = np.finfo(np.float32).min
SWALLOWING = 1e8  # what scores vanish in as float32
TYPES = [np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16)]
# (batches, queries, heads, keys, heads of the keys, numbers); sizes reach past tiles and strips
SIZES = {
    "one number": (1, 1, 1, 1, 1, 1),
    "few": (2, 5, 4, 7, 4, 8),
    "shared heads": (2, 5, 6, 7, 2, 8),
    "whole tiles": (1, 128, 1, 64, 1, 16),
    "beyond tiles": (1, 131, 2, 67, 2, 20),
    "many keys": (1, 3, 1, 600, 1, 5),
    "long heads": (1, 4, 2, 9, 1, 200),
    "longest heads": (1, 4, 1, 9, 1, 256),
}


def masks(N, S, H, T, seed=0):
    """Of every kind and shape; in the last ones some queries see nothing."""
    rng = np.random.default_rng(seed)
    blind = rng.random((N, H, S, T)) < 0.6
    blind[:, :, S // 2] = False
    return {
        "": None,
        "by key": np.where(rng.random(T) < 0.3, -10000, 0).astype(np.float32),
        "padding": np.where(rng.random((N, 1, 1, T)) < 0.3, LOWEST, 0).astype(np.float32),
        "numbers": rng.standard_normal((H, S, T)).astype(np.float32),
        "by query": rng.standard_normal((S, 1)).astype(np.float32),
        "truth values": rng.random((S, T)) < 0.7,
        "all low": np.full((N, 1, S, T), LOWEST, np.float32),
        "infinite": np.where(blind, 0, -np.inf).astype(np.float32),
        "blind": blind,
    }


MASKS = list(masks(1, 1, 1, 1))


def arrays(sizes, dtype=np.float32, seed=0):
    """Q, K, V and dY."""
    rng = np.random.default_rng(seed)
    N, S, H, T, G, D = sizes
    return [rng.standard_normal(s).astype(dtype) for s in ((N, S, H, D), (N, T, G, D), (N, T, G, D), (N, S, H, D))]


def check_both(Q, K, V, dY, mask, **attributes):
    check(flash_attention, Q, K, V, mask, **attributes)
    saved = flash_attention.definition(Q, K, V, mask, **attributes)
    check(flash_attention_grad, dY, Q, K, V, mask, *saved, **attributes)


@pytest.mark.parametrize("is_causal", [0, 1])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("case", ["few", "shared heads", "beyond tiles"])
def test_masks(case, mask, is_causal):
    N, S, H, T, _, D = SIZES[case]
    check_both(*arrays(SIZES[case]), masks(N, S, H, T)[mask], scale=D**-0.5, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [0, 1])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("case", SIZES)
def test_sizes_and_types(case, dtype, is_causal):
    check_both(*arrays(SIZES[case], dtype), None, scale=SIZES[case][-1] ** -0.5, is_causal=is_causal)


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_any_sizes(data):
    N, S, T = (data.draw(st.integers(1, n)) for n in (3, 80, 80))
    G, share, D = (data.draw(st.integers(1, n)) for n in (3, 3, 40))
    mask = masks(N, S, G * share, T)[data.draw(st.sampled_from(MASKS))]
    attributes = {"scale": data.draw(st.sampled_from([1.0, 0.2])), "is_causal": data.draw(st.sampled_from([0, 1]))}
    check_both(*arrays((N, S, G * share, T, G, D)), mask, **attributes)


@pytest.mark.parametrize("sizes", [(0, 3, 2, 3, 2, 4), (2, 0, 2, 3, 2, 4)])
def test_nothing(sizes):
    Q, K, V, dY = arrays(sizes)
    Y, statistics = call(flash_attention, Q, K, V)
    assert Y.shape == Q.shape and statistics.shape == (2, sizes[0], 2, sizes[1])
    dQ, dK, dV = call(flash_attention_grad, dY, Q, K, V, None, Y, statistics)
    assert dQ.shape == Q.shape and not dK.any() and not dV.any()


@pytest.mark.parametrize("kind", ["plain", "causal", "numbers", "truth values"])
def test_as_in_torch(kind):
    N, S, H, T, G, D = 2, 7, 6, 9, 3, 8
    Q, K, V, dY = arrays((N, S, H, T, G, D))
    mask = masks(N, S, H, T).get(kind)
    tensors = [torch.tensor(x.astype(np.float64), requires_grad=True) for x in (Q, K, V)]
    given = None if mask is None else torch.tensor(mask if mask.dtype == bool else mask.astype(np.float64))
    y = functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in tensors), attn_mask=given, is_causal=kind == "causal", scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    wanted = y, *torch.autograd.grad(y, tensors, torch.tensor(dY.astype(np.float64)))
    attributes = {"scale": 0.3, "is_causal": int(kind == "causal")}
    Y, statistics = call(flash_attention, Q, K, V, mask, **attributes)
    found = Y, *call(flash_attention_grad, dY, Q, K, V, mask, Y, statistics, **attributes)
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask", ["infinite", "blind"])
def test_a_query_that_sees_nothing_gets_zeros_and_passes_none_on(mask):
    Q, K, V, dY = arrays((2, 6, 2, 5, 2, 8))
    given = masks(2, 6, 2, 5)[mask]
    Y, statistics = call(flash_attention, Q, K, V, given)
    dQ, dK, dV = call(flash_attention_grad, dY, Q, K, V, given, Y, statistics)
    assert not Y[:, 3].any() and not dQ[:, 3].any() and not statistics[:, :, :, 3].any()
    assert all(np.isfinite(a).all() for a in (Y, dQ, dK, dV))


def test_a_query_with_nan_is_nan_and_others_are_not():
    Q, K, V, _ = arrays((1, 6, 2, 5, 2, 8))
    Q[0, 2, 1, 3] = np.nan
    found = np.isnan(call(flash_attention, Q, K, V)[0])
    assert found[0, 2, 1].all() and found.sum() == found[0, 2, 1].size


@pytest.mark.parametrize("layout", layouts(np.zeros((2, 2), np.float32)))
def test_layouts(layout):
    given = [layouts(x)[layout] for x in arrays((2, 5, 2, 6, 2, 8))]
    check_both(*given, layouts(masks(2, 5, 2, 6)["numbers"])[layout])


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("mask", ["", "padding", "truth values", "blind"])
def test_function(mask, dtype):
    Q, K, V, dY = arrays((2, 5, 6, 7, 2, 8), dtype)
    given, attributes = masks(2, 5, 6, 7)[mask], {"scale": 0.3, "is_causal": int(mask == "")}
    saved = flash_attention.definition(Q, K, V, given, **attributes)
    check_functions(flash_attention, ((Q, K, V, given), attributes))
    check_functions(flash_attention_grad, ((dY, Q, K, V, given, *saved), attributes))


def test_refused():
    Q, K, V, dY = arrays((2, 5, 4, 7, 2, 8))
    mask = np.zeros((3, 7), np.float32)
    for sentence, wrong in (
        ("Q has shape [2, 5, 32], expected [batch, length, heads, numbers]", (Q.reshape(2, 5, 32), K, V)),
        ("V has shape [2, 6, 2, 8], expected [2, 7, 2, 8] as K has", (Q, K, V[:, :6])),
        ("K has shape [1, 7, 2, 8], expected [2, length, heads, 8] for Q of shape [2, 5, 4, 8]", (Q, K[:1], V[:1])),
        ("Q has 3 heads and K has 2, expected a multiple", (Q[:, :, :3], K, V)),
        ("mask has shape [3, 7], which does not broadcast to [2, 4, 5, 7]", (Q, K, V, mask)),
    ):
        check_refused(flash_attention, ValueError, sentence, *wrong)
    Y, statistics = flash_attention.definition(Q, K, V)
    check_refused(flash_attention_grad, ValueError, "dY has shape [2, 4, 4, 8], expected [2, 5, 4, 8] as Q has",
                  dY[:, :4], Q, K, V, None, Y, statistics)  # fmt: skip
    check_refused(flash_attention_grad, ValueError, "statistics has shape [1, 2, 4, 5], expected [2, 2, 4, 5]",
                  dY, Q, K, V, None, Y, statistics[:1])  # fmt: skip


def expected(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """Chains of two products; of half types, what the second multiplies may be rounded to the type as well."""
    precisions = [PRECISION[t] for t in result_dtypes(op, args, kwargs)]
    is_grad = op is flash_attention_grad
    place = 4 if is_grad else 3
    Q, K = args[is_grad : is_grad + 2]
    longest = max(Q.shape[1] * Q.shape[2] // max(1, K.shape[2]), K.shape[1], Q.shape[3])
    nudge = max(precisions[0].unit * np.sqrt(longest), precisions[0].stored)

    def definition(*nudged, **how):
        given = list(nudged)
        if is_grad:
            given[6] = in_float64(args[6])  # statistics are exact
        mask = args[place]
        if mask is not None and mask.dtype != bool:  # a score is rounded once the mask is added; the lowest swallow it
            given[place] = np.where(np.abs(mask) < SWALLOWING, given[place], in_float64(mask))
        return op.body(*given, **how)

    with np.errstate(invalid="ignore"):
        return by_nudges(definition, args, kwargs, precisions, nudge)


def node_cases() -> Iterator[NodeCase]:
    """Small calls for every runtime to run."""
    for dtype, mask, op in itertools.product(TYPES, ("", "padding", "blind"), (flash_attention, flash_attention_grad)):

        def make(dtype=dtype, mask=mask, op=op):
            Q, K, V, dY = arrays((2, 5, 4, 7, 2, 8), dtype)
            given = masks(2, 5, 4, 7)[mask]
            if op is flash_attention:
                return Q, K, V, given
            return dY, Q, K, V, given, *flash_attention.definition(Q, K, V, given, scale=0.3)

        parameters = {"type": str(dtype), "mask": mask, "absent": "" if mask else without(["mask"])}
        yield NodeCase(op, parameters, make, {"scale": 0.3})
        if op is flash_attention and not mask:
            yield NodeCase(op, {**parameters, "causal": "causal"}, make, {"scale": 0.3, "is_causal": 1}, outputs=["Y"])
