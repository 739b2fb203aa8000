"""Runs the operators' tests where there is no pytest: `python -m tests.plain [words in the names]`.

Stands in for the little that these tests use of pytest. Without hypothesis its tests are counted as not run.
"""

import contextlib
import importlib
import importlib.util
import inspect
import itertools
import re
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

MODULES = ("gather", "gather_elements", "slice", "gru", "gru_errors", "gru_gradients")


def _parametrize(names: Any, values: Any, ids: Any = None) -> Callable[..., Any]:
    keys = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)

    def mark(test: Any) -> Any:
        rows = [dict(zip(keys, v if len(keys) > 1 else (v,), strict=True)) for v in values]
        test.parameters = [*getattr(test, "parameters", []), rows]
        return test

    return mark


@contextlib.contextmanager
def _raises(kind: Any, match: str = "", check: Callable[[Any], bool] = lambda error: True) -> Iterator[None]:
    try:
        yield
    except kind as error:
        assert re.search(match, str(error)), f"{error} does not match {match}"
        assert check(error), f"{error!r} is not quite what was expected"
    else:
        raise AssertionError(f"{kind} was not raised")


def _stand_in() -> None:
    if importlib.util.find_spec("pytest") is None:
        pytest = types.ModuleType("pytest")
        pytest.mark = types.SimpleNamespace(parametrize=_parametrize)  # type: ignore[attr-defined]
        pytest.raises = _raises  # type: ignore[attr-defined]
        sys.modules["pytest"] = pytest
    if importlib.util.find_spec("hypothesis") is None:

        class Nothing(types.ModuleType):
            def __getattr__(self, name: str) -> Any:
                return lambda *args, **kwargs: lambda test: setattr(test, "needs_hypothesis", True) or test

        for name in ("hypothesis", "hypothesis.strategies", "hypothesis.extra", "hypothesis.extra.numpy"):
            sys.modules[name] = Nothing(name)


def _cases(test: Any) -> list[tuple[str, dict[str, Any]]]:
    rows = list(getattr(test, "parameters", []))
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            _parametrize(*mark.args)(holder := types.SimpleNamespace())
            rows += holder.parameters
    found = []
    for combination in itertools.product(*rows):
        arguments = {k: v for row in combination for k, v in row.items()}
        found.append((", ".join(f"{k}={v!r:.40}" for k, v in arguments.items()), arguments))
    return found


def main() -> int:
    """Every test of MODULES whose name has one of the words; the number of failures is the exit code."""
    _stand_in()
    words, passed, failed, not_run = sys.argv[1:], 0, 0, []
    for name in MODULES:
        module = importlib.import_module(f"tests.ops.test_{name}")
        start, before = time.perf_counter(), passed
        for test_name, test in inspect.getmembers(module, inspect.isfunction):
            label = f"{name}::{test_name}"
            if not test_name.startswith("test_") or (words and not any(w in label for w in words)):
                continue
            if getattr(test, "needs_hypothesis", False):
                not_run.append(label)
                continue
            for case, arguments in _cases(test):
                try:
                    test(**arguments)
                    passed += 1
                except Exception:
                    failed += 1
                    if failed <= 10:
                        last = traceback.format_exc().strip().splitlines()
                        print(f"FAILED {label}[{case}]", *last[-6:], sep="\n  ", flush=True)
        print(f"{name}: {passed - before} passed in {time.perf_counter() - start:.0f} s", flush=True)
    print(f"{passed} passed, {failed} failed")
    for label in not_run:
        print(f"not run, for want of hypothesis: {label}")
    if "tests.gpu" in sys.modules:
        for reason, count in sorted(sys.modules["tests.gpu"].LEFT_OUT.items()):
            print(f"left out {count}: {reason}")
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
