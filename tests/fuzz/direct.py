"""Direct calls: their results lie against guard pages, too, and what they raise is one sentence of ours."""

import contextlib
import linecache
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
from tests.checks import as_tuple, assert_as_expected, expect, on_threads, result_dtypes, same_bits
from tests.fuzz import guarded
from tests.fuzz.calls import Call
from tests.fuzz.draw import Draw

import onnxgrad
from onnxgrad.cpu.core import call as cpu_call
from onnxgrad.cpu.core import memory

SOURCES = str(Path(onnxgrad.__file__).parent)
DOCUMENTED = (ValueError, TypeError, IndexError, MemoryError)
SMALL = 3000  # elements of all inputs together, for which the definition takes no time
LARGE = 1 << 26  # bytes of a result; larger ones go to the allocator itself, which refuses what is too large


class FindingError(AssertionError):
    """A call that ended in a way it must not."""


@contextlib.contextmanager
def guarded_results(d: Draw) -> Iterator[None]:
    """Results and working memory lie against guard pages, filled with zeros or with what is no number."""
    allocate = memory.allocate

    def allocate_guarded(shape: Any, dtype: Any) -> tuple[np.ndarray, int]:
        dtype = np.dtype(dtype)
        size = int(np.prod(shape, dtype=object)) * dtype.itemsize
        if size > LARGE:
            return allocate(shape, dtype)
        zeros = d.chance(0.3)
        array = guarded.empty(tuple(shape), dtype, d.chance(0.7), 0 if zeros else 0xFF)
        return array, memory.ZEROS if zeros else memory.FRESH

    with mock.patch.object(memory, "allocate", allocate_guarded), mock.patch.object(
        cpu_call, "allocate", allocate_guarded
    ):  # fmt: skip
        yield


def try_call(call: Call, seed: int) -> tuple[Any, ...] | Exception:
    """The results, or what was raised, which is checked to be a sentence."""
    d = Draw(seed, 2)
    outcome = _outcome(call, d, call.op)
    if isinstance(outcome, Exception):
        check_sentence(call, outcome)
    elif d.chance(0.3):
        _check_same(call, outcome, d)
    if d.chance(0.4) and sum(a.size for a in call.inputs if isinstance(a, np.ndarray)) < SMALL:
        _check_definition(call, outcome)
    return outcome


def _outcome(call: Call, d: Draw, function: Any) -> tuple[Any, ...] | Exception:
    try:
        with guarded_results(d), on_threads(d.one((1, 2, 3))):
            return as_tuple(function(*call.inputs, **call.settings))
    except Exception as error:
        return error


def check_sentence(call: Call, error: Exception) -> None:
    """One of the documented errors, raised by a line of ours, in one line that opens with the operator's name."""
    text, frames = str(error), traceback.extract_tb(error.__traceback__)
    where = frames[-1]
    line = linecache.getline(where.filename, where.lineno or 0).strip()
    written = where.filename.startswith(SOURCES) and line.startswith("raise")
    fine = type(error) in DOCUMENTED and re.fullmatch(rf"{re.escape(call.op.name)}: [^\n]{{5,600}}", text)
    if not fine or not written:
        raise FindingError(f"{type(error).__name__}: {text!r} of {where.filename}:{where.lineno}: {line}") from error


def _check_same(call: Call, results: tuple[Any, ...], d: Draw) -> None:
    """The same bits on other threads, in other memory."""
    again = _outcome(call, d, call.op)
    if isinstance(again, Exception):
        raise FindingError(f"raised {again!r} when called again")
    for output, one, other in zip(call.op.outputs, results, again, strict=True):
        if one is not None and one.nbytes > LARGE:  # more than a comparison has memory for
            continue
        if (one is None) != (other is None) or (one is not None and not same_bits(one, other)):
            raise FindingError(f"{output.name} is another when called again")


def _check_definition(call: Call, outcome: tuple[Any, ...] | Exception) -> None:
    """The definition raises where the kernel does; otherwise results are as near to it as the tests ask."""
    if call.settings.get("group") and call.op.name == "AllReduceSum":  # its definition is that of a process alone
        return
    try:
        with np.errstate(all="ignore"):
            wanted = as_tuple(call.op.definition(*call.inputs, **call.settings))
    except MemoryError:  # it needs more than kernels do
        return
    except Exception as error:
        if not isinstance(outcome, Exception):
            raise FindingError(f"only the definition raised {type(error).__name__}: {error}") from error
        if str(error) != str(outcome) or type(error) is not type(outcome):
            raise FindingError(f"the definition raised {error!r}, the kernel {outcome!r}") from error
        return
    if isinstance(outcome, Exception):
        raise FindingError(f"only the kernel raised {outcome!r}")
    for output, actual, expected in zip(call.op.outputs, outcome, wanted, strict=True):
        if (actual is None) != (expected is None) or (actual is not None and actual.shape != np.shape(expected)):
            raise FindingError(f"{output.name} is {np.shape(actual)}, that of the definition {np.shape(expected)}")
    if not call.wrong:
        _check_numbers(call, outcome)


def _check_numbers(call: Call, results: tuple[Any, ...]) -> None:
    try:
        with np.errstate(all="ignore"):
            expected, bounds = expect(call.op, *call.inputs, **call.settings)
        # Activations without a limit may let what nudges the inputs grow past all numbers.
        bounds = tuple(None if b is None else np.where(np.isnan(b), np.inf, b) for b in bounds)
        dtypes = result_dtypes(call.op, tuple(call.inputs), call.settings)
        expected = tuple(map(_within_reach, results, expected, bounds))
        assert_as_expected(call.op, results, expected, bounds, dtypes)
    except MemoryError:  # to compare takes more than there is room for
        return
    except AssertionError as error:
        raise FindingError(str(error)) from None


def _within_reach(result: Any, expected: Any, bound: Any) -> Any:
    """What a call can be held to: anything where the bound is past all numbers, infinity where the type ends before."""
    if result is None or bound is None or np.shape(result) != np.shape(expected):
        return expected
    wide, largest = np.asarray(result).astype(np.float64), float(ml_dtypes.finfo(result.dtype).max)
    beyond = np.isinf(wide) & (np.sign(wide) == np.sign(expected)) & (np.abs(expected) + bound > largest)
    return np.where(beyond | (bound > largest), wide, expected)
