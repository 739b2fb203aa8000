"""PermutedMatMul against its definition, its ONNX function, float32's own accuracy, and its error sentences."""

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checks import (
    DEVICE,
    FLOATS,
    PRECISION,
    Expected,
    bound_of_sum,
    call,
    check,
    check_refused,
    examples,
    in_float64,
    layouts,
    on_threads,
    result_dtype,
    same_bits,
    with_storage,
)
from tests.functions.models import check_functions
from tests.node_cases import NodeCase, without

from onnxgrad.ops.matrix import permuted_mat_mul

HEADS = {"permA": [0, 2, 1, 3], "permB": [0, 2, 3, 1]}
# {name: (shape of A, shape of B, attributes)}; sizes reach past tiles, panels and blocks along k
CASES = {
    "one number": ((1, 1), (1, 1), {}),
    "a row": ((1, 40), (40, 33), {}),
    "a column": ((33, 300), (300, 1), {}),
    "whole panels": ((64, 64), (64, 96), {}),
    "beyond panels": ((45, 70), (70, 51), {}),
    "deep": ((40, 600), (600, 35), {"alpha": 0.5}),
    "wide": ((33, 30), (30, 1100), {}),
    "tall": ((700, 30), (30, 33), {}),
    "A transposed": ((70, 45), (70, 51), {"permA": [1, 0]}),
    "B transposed": ((45, 70), (51, 70), {"permB": [1, 0], "alpha": -2.0}),
    "all transposed": ((70, 45), (51, 70), {"permA": [1, 0], "permB": [1, 0], "permY": [1, 0]}),
    "result transposed": ((45, 70), (70, 51), {"permY": [1, 0]}),
    "many rows of one matrix": ((2, 3, 17, 33), (33, 40), {}),
    "a matrix for all": ((17, 33), (4, 33, 40), {}),
    "broadcast": ((3, 1, 17, 33), (4, 33, 20), {}),
    "heads": ((2, 20, 3, 33), (2, 35, 3, 33), HEADS),
    "heads back": ((2, 20, 3, 33), (2, 35, 3, 33), {**HEADS, "permY": [0, 2, 1, 3]}),
    "heads transposed": ((2, 20, 3, 33), (2, 35, 3, 33), {**HEADS, "permY": [0, 3, 1, 2]}),
    "nothing side by side": ((33, 20, 2), (35, 33, 2), {"permA": [2, 1, 0], "permB": [2, 1, 0], "permY": [1, 2, 0]}),
}


def arrays(A, B, attributes, dtype=np.float32, has_bias=True, seed=0):
    rng = np.random.default_rng(seed)
    columns = B[attributes["permB"][-1] if "permB" in attributes else -1]
    bias = [rng.standard_normal(columns).astype(dtype)] if has_bias else [None]
    return [rng.standard_normal(A).astype(dtype), rng.standard_normal(B).astype(dtype), *bias]


def ways():
    """What float32 numbers are multiplied by: on a CPU there may be two kinds of units, a GPU sees to it itself."""
    if DEVICE != "cpu":
        return ["device"]
    from onnxgrad.cpu.core.matmul.amx import has_amx

    return ["vectors", "amx"] if has_amx() else ["vectors"]


any_way = pytest.mark.parametrize("way", ways())


def by(way):
    """Makes products go that way."""
    if way == "device":
        return contextlib.nullcontext()
    from onnxgrad.cpu.core.matmul import launch_matmul

    return mock.patch.object(launch_matmul, "has_amx", lambda: way == "amx")


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("case", CASES)
@any_way
def test_cases(way, case, has_bias):
    with by(way):
        check(permuted_mat_mul, *arrays(*CASES[case], has_bias=has_bias), **CASES[case][2])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", ["beyond panels", "heads transposed", "deep"])
def test_types(case, dtype):
    check(permuted_mat_mul, *arrays(*CASES[case], dtype=dtype), **CASES[case][2])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_numbers_rounded_to_bfloat16(case, dtype):
    check(permuted_mat_mul, *arrays(*CASES[case], dtype=dtype), **CASES[case][2], precision="bfloat16")


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_any_product(data):
    rank = data.draw(st.integers(2, 4))
    batches = [data.draw(st.integers(1, 3)) for _ in range(rank - 2)]
    rows, depth, columns = (data.draw(st.integers(1, 80)) for _ in range(3))

    def stored(shape):
        """A permutation, and the shape that it makes `shape` of."""
        perm = data.draw(st.permutations(range(rank)))
        return [shape[list(perm).index(k)] for k in range(rank)], list(perm)

    A, permA = stored([*batches, rows, depth])
    B, permB = stored([1 if data.draw(st.booleans()) else n for n in batches] + [depth, columns])
    attributes = {"permA": permA, "permB": permB, "permY": list(data.draw(st.permutations(range(rank))))}
    attributes["alpha"] = data.draw(st.sampled_from([1.0, 0.3]))
    attributes["precision"] = data.draw(st.sampled_from(["float32", "bfloat16"]))
    check(permuted_mat_mul, *arrays(A, B, attributes, has_bias=data.draw(st.booleans())), **attributes)


@pytest.mark.parametrize(("A", "B"), [((0, 3), (3, 4)), ((2, 0), (0, 4)), ((2, 3), (3, 0)), ((0, 2, 3), (3, 4))])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@any_way
def test_nothing(way, A, B, has_bias):
    with by(way):
        check(permuted_mat_mul, *arrays(A, B, {}, has_bias=has_bias))


@pytest.mark.parametrize("layout", layouts(np.zeros((2, 2), np.float32)))
def test_layouts(layout):
    A, B, bias = arrays((6, 8), (8, 5), {})
    check(permuted_mat_mul, layouts(A)[layout], B, bias)
    check(permuted_mat_mul, A, layouts(B)[layout], bias, permA=[])


@pytest.mark.skipif(DEVICE != "cpu", reason="threads of the CPU")
@pytest.mark.parametrize(("rows", "depth"), [(300, 100), (300, 700), (160, 200), (90, 1100)])
@any_way
def test_threads_do_not_change_a_bit(way, rows, depth):
    with by(way):
        A, B, bias = arrays((rows, depth), (depth, 1100), {})
        results = []
        for count in (1, 2, 5):
            with on_threads(count):
                results.append(permuted_mat_mul(A, B, bias))
        assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


@pytest.mark.skipif(DEVICE != "cpu", reason="memory of the CPU")
@pytest.mark.parametrize("skipped", [0, 1, 4])
@pytest.mark.parametrize("columns", [256, 1000, 1024])
@any_way
def test_wherever_a_result_lies(way, columns, skipped):
    """On cache lines or across them; rows of a power of two apart, or not."""
    with by(way):
        A, B, _ = arrays((140, 130), (130, columns), {})
        room = np.zeros(140 * columns + 32, np.float32)
        start = (-room.ctypes.data % 64) // 4 + skipped
        Y = room[start : start + 140 * columns].reshape(140, columns)
        permuted_mat_mul.into(Y, A, B)
        assert same_bits(Y, permuted_mat_mul(A, B))
        assert not room[:start].any() and not room[start + Y.size :].any()


@pytest.mark.parametrize("depth", [16, 256, 2048])
@any_way
def test_as_exact_as_products_of_float32(way, depth):
    """Mean square errors: a chain of fused multiply-adds along k is what plain float32 arithmetic gives."""
    with by(way):
        A, B, _ = arrays((64, depth), (depth, 64), {})
        exact = A.astype(np.float64) @ B.astype(np.float64)
        chain = np.zeros((64, 64), np.float32)
        for k in range(depth):
            chain = (chain.astype(np.float64) + np.outer(A[:, k].astype(np.float64), B[k])).astype(np.float32)

        def error(result):
            return np.sqrt(np.mean((result.astype(np.float64) - exact) ** 2))

        assert error(call(permuted_mat_mul, A, B)) <= 1.01 * error(chain)


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan, np.finfo(np.float32).max, 3.395e38])
@any_way
def test_numbers_that_bfloat16_has_not(way, number):
    with by(way):
        A, B, bias = arrays((40, 50), (50, 60), {})
        B /= 10  # so that no product overflows
        A[3, 4] = number
        with np.errstate(over="ignore", invalid="ignore"):
            check(permuted_mat_mul, A, B, bias)
            check(permuted_mat_mul, B, A, None, permA=[1, 0], permB=[1, 0])


@pytest.mark.parametrize("at", [(0, 0), (150, 3), (40, 800), (199, 899)])
@any_way
def test_such_numbers_are_found_anywhere(way, at):
    """In any panel, and any stretch along k: whatever they spoil is computed anew."""
    with by(way), np.errstate(over="ignore", invalid="ignore"):
        A, B, bias = arrays((200, 900), (900, 170), {})
        B /= 100
        A[at] = np.finfo(np.float32).max
        check(permuted_mat_mul, A, B, bias)
        check(permuted_mat_mul, B, A, None, permA=[1, 0], permB=[1, 0])


@any_way
def test_tiny_numbers(way):
    """Of a number the digits below 2⁻¹²⁶ may be lost, and as much of each of six products."""
    with by(way):
        A, B, _ = arrays((40, 50), (50, 60), {})
        A *= np.float32(1e-37)
        exact = A.astype(np.float64) @ B.astype(np.float64)
        found = call(permuted_mat_mul, A, B)
        assert np.abs(found - exact).max() < 50 * (np.abs(B).max() + 6) * 2.0**-126


@pytest.mark.skipif(DEVICE != "cpu", reason="a matter of the CPU")
def test_amx_can_be_turned_off():
    """In a process of its own: whether there is AMX is asked once."""
    script = "from onnxgrad.cpu.core.matmul.amx import has_amx; print(has_amx())"
    environment = {**os.environ, "ONNXGRAD_AMX": "0"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_function():
    layouts_, dtypes = ["a row", "beyond panels", "broadcast", "heads back"], [np.float16, np.float32, np.float64]
    for dtype, has_bias in itertools.product(dtypes, (False, True)):
        for name in layouts_:
            A, B, attributes = CASES[name]
            given = tuple(arrays(A, B, attributes, dtype, has_bias))
            check_functions(permuted_mat_mul, (given, attributes))


def test_refused():
    A, B = np.zeros((2, 3), np.float32), np.zeros((4, 5), np.float32)
    refused = [
        ("precision is 'fp8', expected 'float32' or 'bfloat16'", (A, B[:3]), {"precision": "fp8"}),
        ("permuted, A has 3 columns and B has 4 rows, expected the same number", (A, B), {}),
        ("A has shape [3], expected at least two dimensions", (A[0], B), {}),
        ("permB is [0, 0], expected the numbers 0 to 1, each of them once", (A, A), {"permB": [0, 0]}),
        ("permY is [0], expected the numbers 0 to 1, each of them once", (A, B[:3]), {"permY": [0]}),
        ("bias has shape [4], expected [5], a number for each column of B", (A, B[:3], B[:, 0]), {}),
        (
            "A has [2] matrices and B has [3], which do not broadcast",
            (np.zeros((2, 2, 3), np.float32), np.zeros((3, 3, 2), np.float32)),
            {},
        ),
    ]
    for sentence, args, attributes in refused:
        check_refused(permuted_mat_mul, ValueError, sentence, *args, **attributes)


def expected(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """Every element is one sum of products, times a number, of parts whose roundings are at most one more."""
    precision = PRECISION[result_dtype(op, args, kwargs)]
    if kwargs.get("precision") == "bfloat16" and args[0].dtype != np.float64:
        scaled = args[0].astype(np.float32) * np.float32(kwargs.get("alpha", 1.0))
        args = scaled.astype(ml_dtypes.bfloat16), args[1].astype(ml_dtypes.bfloat16), *args[2:]
        kwargs = {**kwargs, "alpha": 1.0}
    wide = [in_float64(a) for a in args]
    expected = op.definition(*wide, **kwargs)
    sizes = (None if a is None else np.where(np.isfinite(a), np.abs(a), 0) for a in wide)
    absolute = op.definition(*sizes, **{**kwargs, "alpha": abs(kwargs.get("alpha", 1.0))})
    depth = args[0].shape[kwargs["permA"][-1] if kwargs.get("permA") else -1]
    bound = bound_of_sum(precision, np.full_like(absolute, depth + 4), np.abs(absolute))
    if DEVICE != "cpu" and len(wide) > 2 and wide[2] is not None:  # cuBLAS may round twice
        bound += precision.stored * np.abs(op.definition(*wide[:2], **kwargs))
    return (expected,), (with_storage(precision, expected, bound),)


def node_cases() -> Iterator[NodeCase]:
    """Small calls for every runtime to run."""
    heads = {"permA": [0, 2, 1, 3], "permB": [0, 2, 3, 1], "permY": [0, 2, 1, 3], "alpha": 0.125}
    layouts: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "rows": ((2, 3, 33), (33, 40), {}),
        "columns": ((70, 35), (70, 20), {"permA": [1, 0]}),
        "heads": ((2, 9, 3, 16), (2, 7, 3, 16), heads),
        "rounded": ((5, 33), (40, 33), {"permB": [1, 0], "alpha": 0.375, "precision": "bfloat16"}),
        "turned": ((2, 9, 3, 16), (2, 7, 3, 16), {**heads, "permY": [0, 3, 1, 2]}),
    }
    for (name, (A, B, attributes)), dtype, has_bias in itertools.product(layouts.items(), FLOATS, (False, True)):

        def make(A=A, B=B, attributes=attributes, dtype=dtype, has_bias=has_bias):
            rng = np.random.default_rng(0)
            columns = B[attributes["permB"][-1] if "permB" in attributes else -1]
            bias = rng.standard_normal(columns).astype(dtype) if has_bias else None
            return rng.standard_normal(A).astype(dtype), rng.standard_normal(B).astype(dtype), bias

        parameters = {"type": str(dtype), "layout": name, "absent": without([] if has_bias else ["bias"])}
        yield NodeCase(permuted_mat_mul, parameters, make, attributes)
