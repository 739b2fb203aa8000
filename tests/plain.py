"""Runs the operators' tests where there is no pytest: `python -m tests.plain [words in the names]`.

Nearly all the time goes into compiling kernels, so the cases are dealt out to one process per core. Stands in for the
little that these tests use of pytest and, so that they can be imported, of hypothesis. What cannot run without the
real ones is listed at the end, and so is what says nothing about the device under test.
"""

import contextlib
import importlib
import importlib.util
import inspect
import itertools
import multiprocessing
import os
import re
import sys
import time
import traceback
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

MODULES = (
    "tests.ops.test_gather",
    "tests.ops.test_gather_elements",
    "tests.ops.test_slice",
    "tests.ops.test_softmax",
    "tests.ops.test_layer_normalization",
    "tests.ops.test_dropout",
    "tests.ops.test_activation",
    "tests.ops.test_gelu",
    "tests.ops.test_conv",
    "tests.ops.test_matrix",
    "tests.ops.test_max_pool",
    "tests.ops.test_average_pool",
    "tests.ops.test_softmax_cross_entropy_loss",
    "tests.ops.test_gru",
    "tests.ops.test_gru_errors",
    "tests.test_golden",
    "tests.cuda.test_calls",
    "tests.cuda.test_optimizers",
    "tests.test_torch",
)
# These look at what the whole machine does, so they run alone.
ALONE = ("tests.runtime.test_sessions", "tests.train.test_trainer_cuda")
MOST_TRACEBACKS = 10
MOST_PROCESSES = 16


class Mark(NamedTuple):
    """A mark on a test, or on a whole module, as pytest has them."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, test: Any) -> Any:
        test.pytestmark = [*getattr(test, "pytestmark", []), self]
        return test


class _Marks:
    def __getattr__(self, name: str) -> Callable[..., Mark]:
        return lambda *args, **kwargs: Mark(name, args, kwargs)


class Raised:
    """What `raises` gives; it has a type once the block has raised."""

    type: Any = None


@contextlib.contextmanager
def _raises(kind: Any, match: str = "", check: Callable[[Any], bool] = lambda error: True) -> Iterator[Raised]:
    raised = Raised()
    try:
        yield raised
    except kind as error:
        raised.type = type(error)
        assert re.search(match, str(error)), f"{error} does not match {match}"
        assert check(error), f"{error!r} is not quite what was expected"
    else:
        raise AssertionError(f"{kind} was not raised")


def _param(*values: Any, id: str = "") -> Any:
    return types.SimpleNamespace(values=values, marks=())


class SkippedError(Exception):
    """What a test needs is not here."""


def _importorskip(name: str) -> Any:
    if importlib.util.find_spec(name) is None:
        raise SkippedError(f"needs {name}")
    return importlib.import_module(name)


class _Strategies(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python itself asks modules for their __file__
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def _given(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return Mark("needs_hypothesis", (), {})


def _stand_in() -> None:
    if importlib.util.find_spec("pytest") is None:
        pytest: Any = types.ModuleType("pytest")
        pytest.mark, pytest.raises, pytest.param = _Marks(), _raises, _param
        pytest.importorskip = _importorskip
        sys.modules["pytest"] = pytest
    if importlib.util.find_spec("hypothesis") is None:
        hypothesis: Any = types.ModuleType("hypothesis")
        hypothesis.given, hypothesis.settings = _given, lambda **kwargs: lambda test: test
        hypothesis.strategies = sys.modules["hypothesis.strategies"] = _Strategies("hypothesis.strategies")
        sys.modules["hypothesis"] = hypothesis


def _marks(owner: Any, name: str) -> list[Any]:
    marks = getattr(owner, "pytestmark", [])
    return [m for m in (marks if isinstance(marks, list) else [marks]) if m.name == name]


def _cases(test: Any) -> list[tuple[str, dict[str, Any]]]:
    rows = []
    for mark in _marks(test, "parametrize"):
        names, values = mark.args[:2]
        keys = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
        values = [v.values if hasattr(v, "marks") else v if len(keys) > 1 else (v,) for v in values]
        rows.append([dict(zip(keys, v, strict=True)) for v in values])
    found = []
    for combination in itertools.product(*rows):
        arguments = {k: v for row in combination for k, v in row.items()}
        found.append((", ".join(f"{k}={v!r:.40}" for k, v in arguments.items()), arguments))
    return found


def _why_not_at_all(name: str) -> str:
    """The reason a module does not run; nothing if it does."""
    from tests.checks import DEVICE

    if name not in ALONE:
        return ""
    for library in ("onnxruntime", "onnx_ir"):
        if importlib.util.find_spec(library) is None:
            return f"needs {library}"
    providers = importlib.import_module("onnxruntime").get_available_providers()
    if DEVICE == "cuda" and "CUDAExecutionProvider" not in providers:
        return "needs onnxruntime-gpu"
    return ""


def _why_not(module: Any, test: Any, arguments: dict[str, Any]) -> str:
    """The reason a test does not run; nothing if it does."""
    from tests.checks import DEVICE, reaches_device

    for mark in (*_marks(module, "skipif"), *_marks(test, "skipif")):
        if mark.args[0]:
            return str(mark.kwargs["reason"])
    if _marks(test, "needs_hypothesis"):
        return "needs hypothesis"
    if DEVICE != "cpu" and module.__name__.startswith("tests.ops.") and not reaches_device(test):
        return "speaks of the CPU alone"
    # hypothesis, where it is installed, hands its test the drawn data itself.
    missing = set() if hasattr(test, "hypothesis") else inspect.signature(test).parameters.keys() - arguments.keys()
    return f"needs pytest for {', '.join(sorted(missing))}" if missing else ""


class Outcome(NamedTuple):
    """What came of a share of the cases."""

    passed: Counter[str]  # by module
    failed: Counter[str]
    not_run: dict[str, set[str]]  # tests, by the reason
    left_out: Counter[str]  # what the device under test cannot show


def _run_share(share: int, shares: int, modules: tuple[str, ...], words: list[str]) -> Outcome:
    """Every `shares`-th case of the tests whose names have one of the words."""
    _stand_in()
    outcome = Outcome(Counter(), Counter(), defaultdict(set), Counter())
    turn = itertools.count()
    for name in modules:
        if reason := _why_not_at_all(name):
            outcome.not_run[reason].add(name)
            continue
        module = importlib.import_module(name)
        for test_name, test in inspect.getmembers(module, inspect.isfunction):
            label = f"{name.rsplit('.', 1)[1].removeprefix('test_')}::{test_name}"
            if not test_name.startswith("test_") or (words and not any(w in label for w in words)):
                continue
            cases = _cases(test)
            if reason := _why_not(module, test, cases[0][1] if cases else {}):
                outcome.not_run[reason].add(label)
                continue
            for case, arguments in cases:
                if next(turn) % shares == share:
                    _run_case(name, label, case, test, arguments, outcome)
    if "tests.gpu" in sys.modules:
        outcome.left_out.update(sys.modules["tests.gpu"].LEFT_OUT)
    return outcome


def _run_case(name: str, label: str, case: str, test: Any, arguments: dict[str, Any], outcome: Outcome) -> None:
    try:
        test(**arguments)
        outcome.passed[name] += 1
    except SkippedError as skipped:
        outcome.not_run[str(skipped)].add(label)
    except Exception:
        outcome.failed[name] += 1
        if outcome.failed.total() <= MOST_TRACEBACKS:
            last = traceback.format_exc().strip().splitlines()
            print(f"FAILED {label}[{case}]", *last[-6:], sep="\n  ", flush=True)


def _run_all(words: list[str]) -> list[Outcome]:
    count = min(MOST_PROCESSES, os.cpu_count() or 1)
    spawn = multiprocessing.get_context("spawn")  # CUDA does not outlive a fork
    with ProcessPoolExecutor(count, spawn) as pool:
        shares = [pool.submit(_run_share, k, count, MODULES, words) for k in range(count)]
        outcomes = [share.result() for share in shares]
    return [*outcomes, _run_share(0, 1, ALONE, words)]


def main() -> int:
    """Every test whose name has one of the words; the exit code says whether any failed."""
    start = time.perf_counter()
    outcomes = _run_all(sys.argv[1:])
    passed, failed = (sum((o[k] for o in outcomes), Counter()) for k in (0, 1))
    for name in (*MODULES, *ALONE):
        if passed[name] or failed[name]:
            print(f"{name}: {passed[name]} passed, {failed[name]} failed")
    print(f"{passed.total()} passed, {failed.total()} failed in {time.perf_counter() - start:.0f} s")
    for what, count in sorted(sum((o.left_out for o in outcomes), Counter()).items()):
        print(f"left out {count} × {what}")
    not_run = defaultdict(set)
    for outcome in outcomes:
        for reason, labels in outcome.not_run.items():
            not_run[reason] |= labels
    for reason, labels in not_run.items():
        print(f"not run: {reason}:", *sorted(labels), sep="\n    ")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
