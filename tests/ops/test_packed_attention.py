"""PackedAttention and PackedAttentionGrad against their definitions and as functions; the CPU has no kernel."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.checks import DEVICE, PRECISION, Expected, check, raises, result_dtypes
from tests.expected import by_nudges
from tests.functions.models import check_functions
from tests.node_cases import NodeCase, without
from tests.ops.test_attention import TYPES, masks

from onnxgrad.ops.attention import flash_attention, flash_attention_grad
from onnxgrad.ops.packed_attention import packed_attention, packed_attention_grad

LAYOUTS = ["NS3HD", "SN3HD", "NSH3D", "3HNSD"]
PACKED_SIZES = {"few": (2, 5, 4, 8), "beyond tiles": (1, 131, 2, 20), "whole tiles": (1, 128, 1, 16)}


def packed(sizes, layout, dtype=np.float32, seed=0):
    """QKV and dY."""
    rng, given = np.random.default_rng(seed), dict(zip("NSHD", sizes, strict=True)) | {"3": 3}
    dims = [given[letter] for letter in layout]
    return [rng.standard_normal(d).astype(dtype) for d in (dims, [n for n, a in zip(dims, layout) if a != "3"])]  # noqa: B905


def check_packed(QKV, dY, mask, **attributes):
    if DEVICE != "cpu":
        check(packed_attention, QKV, mask, **attributes)
        saved = packed_attention.definition(QKV, mask, **attributes)
        check(packed_attention_grad, dY, QKV, mask, *saved, **attributes)


@pytest.mark.parametrize("is_causal", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", PACKED_SIZES)
def test_packed(case, layout, is_causal):
    sizes = PACKED_SIZES[case]
    check_packed(*packed(sizes, layout), None, layout=layout, is_causal=is_causal, scale=0.3)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("mask", ["padding", "truth values", "blind"])
def test_packed_masks_and_types(mask, dtype):
    N, S, H, _ = sizes = PACKED_SIZES["few"]
    check_packed(*packed(sizes, "SN3HD", dtype), masks(N, S, H, S)[mask], layout="SN3HD")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_is_attention_to_the_parts(layout):
    QKV, dY = packed((2, 5, 4, 8), layout)
    parts = QKV.transpose([layout.index(letter) for letter in "3NSHD"])
    order = layout.replace("3", "")
    to = ["NSHD".index(letter) for letter in order]
    Y, statistics = flash_attention.definition(*parts, scale=0.3)
    found, told = packed_attention.definition(QKV, scale=0.3, layout=layout)
    np.testing.assert_array_equal(found, Y.transpose(to))
    np.testing.assert_array_equal(told, statistics)
    wanted = flash_attention_grad.definition(
        dY.transpose([order.index(letter) for letter in "NSHD"]), *parts, None, Y, statistics, scale=0.3
    )
    dQKV = packed_attention_grad.definition(dY, QKV, None, found, statistics, scale=0.3, layout=layout)
    for mine, theirs in zip(dQKV.transpose([layout.index(a) for a in "3NSHD"]), wanted, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("mask", ["", "padding"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_function(layout, mask, dtype):
    (QKV, dY), given = packed((2, 5, 4, 8), layout, dtype), masks(2, 5, 4, 5)[mask]
    attributes = {"scale": 0.3, "layout": layout}
    saved = packed_attention.definition(QKV, given, **attributes)
    check_functions(packed_attention, ((QKV, given), attributes))
    check_functions(packed_attention_grad, ((dY, QKV, given, *saved), attributes))


def test_packed_refused():
    QKV, dY = packed((2, 5, 4, 8), "NS3HD")
    for sentence, wrong, layout in (
        ("layout is 'NSH3', expected an order of the letters N, S, 3 and H, then D", (QKV,), "NSH3"),
        ("QKV has shape [2, 5, 96], expected five dimensions, N S 3 H D", (QKV.reshape(2, 5, 96),), "NS3HD"),
        ("QKV has shape [2, 5, 3, 4, 8], expected 3 at axis 3", (QKV,), "NSH3D"),
        ("mask has shape [3, 7], which does not broadcast to [2, 4, 5, 5]", (QKV, np.zeros((3, 7), np.float32)),
         "NS3HD"),
    ):  # fmt: skip
        with raises(ValueError, f"PackedAttention: {sentence}"):
            packed_attention.definition(*wrong, layout=layout)
    Y, statistics = packed_attention.definition(QKV)
    with raises(ValueError, "PackedAttentionGrad: dY has shape [2, 4, 4, 8], expected [2, 5, 4, 8]"):
        packed_attention_grad.definition(dY[:, :4], QKV, None, Y, statistics)


def expected(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """As those of the operators on parts."""
    precisions = [PRECISION[t] for t in result_dtypes(op, args, kwargs)]
    is_grad = op is packed_attention_grad
    numbers, fixed = ((*args[:2], args[3]), (args[2], args[4])) if is_grad else (args[:1], args[1:])
    nudge = max(precisions[0].unit * np.sqrt(max(args[is_grad].shape)), precisions[0].stored)

    def definition(*nudged, **how):
        return op.body(*((*nudged[:2], fixed[0], nudged[2], fixed[1]) if is_grad else (*nudged, *fixed)), **how)

    with np.errstate(invalid="ignore"):
        return by_nudges(definition, numbers, kwargs, precisions, nudge)


def node_cases() -> Iterator[NodeCase]:
    """Small calls for every runtime to run."""
    for dtype, mask, op in itertools.product(TYPES, ("", "padding"), (packed_attention, packed_attention_grad)):

        def make(dtype=dtype, mask=mask, op=op):
            (QKV, dY), given = packed((2, 5, 4, 8), "SN3HD", dtype), masks(2, 5, 4, 5)[mask]
            if op is packed_attention:
                return QKV, given
            return dY, QKV, given, *packed_attention.definition(QKV, given, layout="SN3HD")

        parameters = {"type": str(dtype), "mask": mask, "absent": "" if mask else without(["mask"])}
        yield NodeCase(op, parameters, make, {"layout": "SN3HD"})
