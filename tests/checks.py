"""The one harness: a kernel against its definition in float64, with the only table of tolerances."""

import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any, NamedTuple
from unittest import mock

import ml_dtypes
import numpy as np
from tests.left_out import leave_out

import onnxgrad
from onnxgrad.cpu.core import memory, threads

# Where the kernels under test run: "cpu", or "cuda" and "interpreter", where tensors of torch go in and come out.
DEVICE = os.environ.get("ONNXGRAD_TEST_DEVICE", "cpu")

FEW_EXAMPLES = 8

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype(t) for t in (np.float16, np.float32, np.float64)] + [BFLOAT16]
INDICES = [np.dtype(np.int32), np.dtype(np.int64)]


class Precision(NamedTuple):
    """How a type computes: sums are kept in `sums`, which rounds by at most `unit` (half an ulp, relative)."""

    sums: np.dtype[Any]
    unit: float
    stored: float  # the same for the type the result is stored in; 0 where that is the type of the sums
    smallest: float  # half the smallest number it can store: all that rounding can do near zero


def _precision(stored: np.dtype[Any], sums: np.dtype[Any]) -> Precision:
    narrow, wide = ml_dtypes.finfo(stored), ml_dtypes.finfo(sums)
    rounds = stored != sums
    unit, smallest = float(wide.eps) / 2, float(narrow.smallest_subnormal) / 2
    return Precision(sums, unit, float(narrow.eps) / 2 * rounds, smallest * rounds)


# THE TABLE. Nothing in it is chosen by hand: a type's own spacing, and the contract's "halves add up in float32".
PRECISION = {t: _precision(t, np.dtype(np.float32) if t.itemsize == 2 else t) for t in FLOATS}
REFERENCE = PRECISION[np.dtype(np.float64)]  # what the definition computes in

# A sum of n terms, in whatever order or tree, rounds each term at most n - 1 times, so it is off by at most
# (n-1)u / (1 - (n-1)u) of the sum of absolute values (Higham, Accuracy and Stability, 4.2). n = 1 must be exact.
#
# A chain of matrix products has no such bound worth having: worst cases multiply at every step. But each computed
# product is the exact one of factors nudged by about sqrt(n)·u (Higham & Mary 2019: roundings are as good as
# independent). So what nudging all inputs that much does to the definition's result is the deviation to expect of a
# right kernel, and NUDGES such draws measure it; DEVIATIONS of them is what is allowed. An activation saturates,
# so that its argument no longer matters, yet its value still rounds: VALUE_ROUNDINGS of the result itself are added.
NUDGES = 4
DEVIATIONS = 4
VALUE_ROUNDINGS = 8


def bound_of_sum(precision: Precision, terms: np.ndarray, absolute: np.ndarray) -> np.ndarray:
    """How far a sum of `terms` terms may be off, given the sum of their absolute values."""
    worst = np.maximum(terms - 1, 0) * precision.unit
    return worst / (1 - worst) * absolute


def with_storage(precision: Precision, expected: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """The bound once the result is rounded to the type it is stored in."""
    finite = np.where(np.isfinite(expected), np.abs(expected), 0)
    return bound + precision.stored * (finite + bound) + precision.smallest


def assert_close(actual: np.ndarray, expected: np.ndarray, bound: np.ndarray | float, what: str = "result") -> None:
    """|actual - expected| ≤ bound everywhere; NaN and infinities in the same places."""
    assert actual.shape == expected.shape, f"{what} has shape {actual.shape}, expected {expected.shape}"
    actual = actual.astype(np.float64)
    bound = np.broadcast_to(bound, expected.shape)
    with np.errstate(invalid="ignore"):
        near = np.isfinite(expected) & (np.abs(actual - expected) <= bound)
    fine = near | (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    if not fine.all():
        worst = np.unravel_index(np.argmin(fine), fine.shape)
        raise AssertionError(
            f"{what}{list(map(int, worst))} is {actual[worst]!r}, expected {expected[worst]!r} ± {bound[worst]:.3g}; "
            f"{(~fine).sum()} of {fine.size} are off"
        )


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays agree to the last bit."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def in_float64(value: Any) -> Any:
    """A float array of any type as float64; anything else as it is."""
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.newbyteorder("=") in FLOATS:
        return np.asarray(value).astype(np.float64)
    return value


def as_tuple(result: Any) -> tuple[Any, ...]:
    """The results of an operator with one or several of them."""
    return result if isinstance(result, tuple) else (result,)


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Runs every call on `count` threads, however small it is."""
    before = onnxgrad.get_num_threads()
    onnxgrad.set_num_threads(count)
    try:
        with mock.patch.object(threads, "WORTH_SHARING", 0):
            yield
    finally:
        onnxgrad.set_num_threads(before)


def poisoned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An array of 0xFF bytes: NaN in every float type but float8's "fnuz" kinds and float4, and never a zero."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8).fill(0xFF)
    return array


def examples(count: int) -> int:
    """How many examples a test of any input draws; Triton's interpreter takes its time for each of them."""
    if DEVICE != "interpreter" or count <= FEW_EXAMPLES:
        return count
    leave_out("examples drawn by hypothesis, more than the interpreter has time for", count - FEW_EXAMPLES)
    return FEW_EXAMPLES


def readable(array: np.ndarray) -> np.ndarray:
    """The array, but zeros for bfloat16's subnormal numbers where Triton's interpreter would misread them."""
    if DEVICE != "interpreter" or array.dtype != BFLOAT16:
        return array
    leave_out("the interpreter misreads subnormal numbers of bfloat16")
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(array) < ml_dtypes.finfo(BFLOAT16).smallest_normal, BFLOAT16.type(0), array)


def runs_on_gpus(op: Any) -> bool:
    """Whether it has a kernel there; what only reads shapes needs none, and some operators are the CPU's alone."""
    return not op.on_host_only and op.has_kernel("cuda")


def call(op: Any, *args: Any, **kwargs: Any) -> Any:
    """A plain call on the device under test, NumPy's arrays in and out, for tests with an expectation of their own."""
    if DEVICE == "cpu" or not runs_on_gpus(op):
        return op(*args, **kwargs)
    from tests.gpu import call_on_gpu

    return call_on_gpu(op, args, kwargs)


def reaches_device(test: Any) -> bool:
    """Whether a test goes through this harness; one that does not runs the CPU's kernels, whatever the device."""
    test = test.hypothesis.inner_test if hasattr(test, "hypothesis") else test
    pending, names = [test.__code__], set()
    while pending:
        code = pending.pop()
        names.update(code.co_names)
        pending += [inside for inside in code.co_consts if isinstance(inside, CodeType)]
    used = [f for f in map(test.__globals__.get, names) if inspect.isfunction(f) and f is not test]
    helpers = [f for f in used if f.__module__ == test.__module__]
    return any(f in (call, check, check_refused) for f in used) or any(map(reaches_device, helpers))


def check(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the kernel in every way there is and compares with the definition; gives the plain call's result."""
    if DEVICE != "cpu" and runs_on_gpus(op):
        from tests.gpu import check_on_gpu

        return check_on_gpu(op, args, kwargs)
    inputs = [a for a in (*args, *kwargs.values()) if isinstance(a, np.ndarray)]
    before = [a.tobytes() for a in inputs]
    expected, bounds = expect(op, *args, **kwargs)
    dtypes = result_dtypes(op, args, kwargs)
    with mock.patch.object(threads, "WORTH_SHARING", 0):
        result = op(*args, **kwargs)
    results = as_tuple(result)
    assert_as_expected(op, results, expected, bounds, dtypes)
    for count in (1, 2):
        out = [None if e is None else poisoned(e.shape, d) for e, d in zip(expected, dtypes, strict=True)]
        with on_threads(count):
            given = as_tuple(op.into(out, *args, **kwargs))
        for output, mine, theirs, wanted in zip(op.outputs, out, given, results, strict=True):
            assert mine is theirs, f"{output.name} is not the array passed in"
            assert wanted is None or same_bits(mine, wanted), f"{output.name} differs on {count} threads"
    _check_own_pages(op, args, kwargs, results)
    for array, content in zip(inputs, before, strict=True):
        assert array.tobytes() == content, f"{op.name} changed an input"
    return result


def assert_as_expected(
    op: Any,
    results: tuple[Any, ...],
    expected: tuple[Any, ...],
    bounds: tuple[Any, ...],
    dtypes: Sequence[np.dtype[Any]],
) -> None:
    """Every result is there, of the right type and shape, and near enough."""
    assert len(results) == len(expected), f"{op.name} gave {len(results)} results, expected {len(expected)}"
    for output, actual, wanted, bound, dtype in zip(op.outputs, results, expected, bounds, dtypes, strict=True):
        if wanted is None:
            assert actual is None, f"{output.name} came though it was not asked for"
            continue
        assert type(actual) is np.ndarray, f"{output.name} is a {type(actual).__name__}"
        assert actual.dtype == dtype, f"{output.name} is {actual.dtype}, expected {dtype}"
        assert actual.flags.c_contiguous and actual.flags.writeable, f"{output.name} has {actual.flags}"
        if bound is None:
            assert same_bits(actual, wanted), f"{output.name} is {actual!r}, expected {wanted!r}"
        else:
            assert_close(actual, wanted, bound, f"{op.name} {output.name}")


def _check_own_pages(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], expected: tuple[Any, ...]) -> None:
    """The same bits in pages of our own, as large results have them: first new ones, all zeros, then used ones."""
    with (
        mock.patch.object(memory, "LARGE", 1),
        mock.patch.object(memory, "_pages", memory._Pages()),
        mock.patch.object(threads, "WORTH_SHARING", 0),
    ):
        for pages in ("new", "used"):
            results = as_tuple(op(*args, **kwargs))
            for output, actual, wanted in zip(op.outputs, results, expected, strict=True):
                assert wanted is None or same_bits(actual, wanted), f"{output.name} differs in {pages} pages"
                if actual is not None:
                    actual.reshape(-1).view(np.uint8).fill(0xFF)
            del results, actual


def result_dtypes(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[np.dtype[Any]]:
    """The types of an operator's results, each of which is that of an input."""
    bound = inspect.signature(op.body).bind(*args, **kwargs).arguments
    given = [bound.get(i.name) for i in op.inputs]
    dtypes = [None if a is None else np.asarray(a).dtype.newbyteorder("=") for a in given]
    kinds = [np.dtype(np.int64) if i.constraint.name == "I" else d for i, d in zip(op.inputs, dtypes, strict=True)]
    return op.output_dtypes(kinds)


def result_dtype(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> np.dtype[Any]:
    """The type of the first result."""
    return result_dtypes(op, args, kwargs)[0]


Expected = tuple[tuple[Any, ...], tuple[Any, ...]]


def raises(error: type[Exception], text: str) -> Any:
    """Expects this very type and this very text."""
    import pytest

    return pytest.raises(error, match=f"^{re.escape(text)}$", check=lambda raised: type(raised) is error)


def expect(op: Any, *args: Any, **kwargs: Any) -> Expected:
    """What the definition gives in float64, and how far a right kernel may be from it: as the operator's tests say."""
    tests = importlib.import_module(f"tests.ops.test_{op.module}")
    return tests.expected(op, args, kwargs)


def check_refused(
    op: Any, error: type[Exception], text: str, *args: Any, out: Any = None, kernel: bool = True, **kwargs: Any
) -> None:
    """The definition, the call and `into` all raise exactly this sentence, and `into` writes nothing."""
    if DEVICE != "cpu" and kernel and not op.on_host_only:
        from tests.gpu import check_refused_on_gpu

        check_refused_on_gpu(op, error, text, args, kwargs, out)
        return
    outs = as_tuple(poisoned((1,), np.dtype(np.float32)) if out is None else out)
    before = [None if o is None else o.tobytes() for o in outs]
    calls: list[Callable[[], Any]] = [lambda: op.definition(*args, **kwargs)]
    if kernel:
        calls += [lambda: op(*args, **kwargs), lambda: op.into(outs, *args, **kwargs)]
    for call in calls:
        with raises(error, f"{op.name}: {text}"):
            call()
    for array, content in zip(outs, before, strict=True):
        assert array is None or array.tobytes() == content, f"{op.name} wrote though it refused the call"


def layouts(array: np.ndarray) -> dict[str, np.ndarray]:
    """The same values in every memory layout NumPy allows."""
    wider = np.repeat(array, 2, axis=array.ndim - 1) if array.ndim else array
    unaligned = np.frombuffer(bytearray(b"\0" + array.tobytes()), np.uint8)[1:]
    frozen = array.copy()
    frozen.setflags(write=False)
    found = {
        "contiguous": np.ascontiguousarray(array).reshape(array.shape),
        "transposed": array.T.copy().T,
        "strided": wider[..., ::2] if array.ndim else array,
        "reversed": np.flip(np.flip(array).copy()),
        "unaligned": np.ndarray(array.shape, array.dtype, unaligned.data),
        "read-only": frozen,
    }
    if array.dtype.isbuiltin == 1:  # ml_dtypes know one byte order only
        found["big-endian"] = array.astype(array.dtype.newbyteorder(">"))
    return found
