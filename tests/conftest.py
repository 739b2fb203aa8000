"""Which tests run: the daily ones, the rest, those that concern a GPU; and a list of all that is left out.

A test with many cases has, daily, some of them, chosen such that every type, axis, layout … still occurs. So has it in
Triton's interpreter, which takes about a second for what a GPU does in microseconds.
"""

import gc
import random
import re
import signal
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from tests.checks import DEVICE, reaches_device, runs_on_gpus
from tests.left_out import LEFT_OUT, MOST_LEFT_OUT

from onnxgrad.op import OPERATORS, Op
from onnxgrad.rules import RULES

MOST_CASES = 3
# Types whose kernels would more than double the time to compile: `make test-all` has them.
NOT_DAILY = re.compile(r"float(16|64)|complex|(?<!u)int32")
# Tests that call an operator hundreds of times in every case.
MANY_CALLS = {
    "test_every_slice_of_a_small_axis",
    "test_numpy_reads_the_same_wherever_it_has_a_say",
    "test_only_the_outputs_asked_for",
}
CPU_ALONE = "speaks of the CPU alone"
NOT_RUN: dict[str, list[str]] = defaultdict(list)  # tests, by the reason


@pytest.fixture
def forget_rules() -> Iterator[None]:
    """Rules that a test adds are gone after it."""
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


def pytest_configure() -> None:
    """Lets Ctrl-C interrupt: a shell that runs the tests in its background has them ignore it, and some send it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)  # of what -k has left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what says nothing about the device, and what its interpreter has no time for."""
    if DEVICE == "cpu":
        items.sort(key=lambda item: item.path.parent.name != "ops")  # they compile kernels, for all others to find
        if config.getoption("part"):
            _keep_part(config, items, config.getoption("part"))
        return
    kept = []
    for (path, name), every_case in _by_function(items).items():
        label = f"{path.stem.removeprefix('test_')}::{name}"
        cases = [case for case in every_case if _says_something_of_gpus(**_parameters(case))]
        if not cases or (path.parent.name == "ops" and not _runs_on_device(cases[0])):
            NOT_RUN[CPU_ALONE].append(label)
            continue
        if left := len(every_case) - len(cases):
            NOT_RUN[CPU_ALONE].append(f"{label} {left} of {len(every_case)}")
        if DEVICE == "interpreter" and name in MANY_CALLS:
            NOT_RUN["hundreds of calls in every case, too slow for the interpreter"].append(label)
        else:
            some = _some_of(cases) if DEVICE == "interpreter" else cases
            kept += some
            if left := len(cases) - len(some):
                NOT_RUN["more cases than the interpreter has time for"].append(f"{label} {left} of {len(cases)}")
    _keep(config, items, kept)


def _keep_part(config: pytest.Config, items: list[pytest.Item], part: str) -> None:
    functions = _by_function(items).values()
    if part == "halves":
        _keep(config, items, [case for cases in functions for case in _some_of(_of_half_types(cases))])
        return
    daily = {case for cases in functions for case in _daily(cases)}
    _keep(config, items, [item for item in items if (item in daily) == (part == "daily")])


def _keep(config: pytest.Config, items: list[pytest.Item], kept: list[pytest.Item]) -> None:
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `make test`, `make test-all` and `make avx2` ask for."""
    text = (
        "daily: no slow tests, and of all others enough cases for every value to occur; rest: all that is not daily; "
    )
    text += "halves: of the cases of half types enough for every value to occur"
    parser.addoption("--part", choices=["daily", "rest", "halves"], help=text)


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Before the first test of every file, takes what is there by now out of the sight of the garbage collector.

    Tests and modules are hundreds of thousands of objects that stay. A trainer has the garbage collected when it is
    made, and going through all of them takes longer than the rest of many a test.
    """
    global _file
    if item.path != _file:
        _file = item.path
        gc.collect()
        gc.freeze()


_file: Any = None


def pytest_unconfigure() -> None:
    """At the end all is garbage; libraries whose functions are still there then say that they leak."""
    gc.unfreeze()


def _by_function(items: list[pytest.Item]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = defaultdict(list)
    for item in items:
        found[item.path, getattr(item, "originalname", item.name)].append(item)
    return found


def _parameters(case: Any) -> dict[str, Any]:
    return case.callspec.params if hasattr(case, "callspec") else {}


def _says_something_of_gpus(how: str = "kernel", operator: str | None = None, **others: Any) -> bool:
    """Of stored results not those for the definition, nor of operators that run on the CPU wherever they are called."""
    return how != "definition" and (operator is None or runs_on_gpus(OPERATORS[operator]))


def _daily(cases: list[Any]) -> list[Any]:
    """Some of those that are not slow; none of a type that would double the time to compile kernels."""
    quick = [case for case in cases if not case.get_closest_marker("slow")]
    return _some_of([case for case in quick if not any(map(NOT_DAILY.search, _texts(case)))] or quick)


def _of_half_types(cases: list[Any]) -> list[Any]:
    return [case for case in cases if any("float16" in text for text in _texts(case))]


def _some_of(cases: list[Any]) -> list[Any]:
    """MOST_CASES of them, the same ones every time, and any more that show a value of a parameter not yet seen."""
    kept, seen = [], set()
    for case in random.Random(0).sample(cases, len(cases)):
        values = set(_texts(case))
        if len(kept) < MOST_CASES or values - seen:
            kept.append(case)
            seen |= values
    return sorted(kept, key=cases.index)


def _texts(case: Any) -> list[str]:
    """What its parameters say."""
    return [text for name, value in _parameters(case).items() for text in _values(name, value)]


def _values(name: str, value: Any) -> list[str]:
    """What a parameter says; of a node with its inputs, each of its type, attributes, absent inputs … by itself."""
    if hasattr(value, "parameters"):  # a NodeCase
        return [f"{value.op.name} {parameter}={text}" for parameter, text in value.parameters.items()]
    return [f"{name}={value!r}"]


def _runs_on_device(test: Any) -> bool:
    """Whether an operator's test goes through the harness with an operator that has a kernel for GPUs."""
    operators = [value for value in vars(test.module).values() if isinstance(value, Op)]
    return reaches_device(test.obj) and any(map(runs_on_gpus, operators))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """One of several processes tells the first what it has left out; more than there was fails the whole run."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(LEFT_OUT), dict(NOT_RUN)
    elif DEVICE == "cpu" and LEFT_OUT.total() > MOST_LEFT_OUT:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """The first adds up what was left out of checks; of tests, all processes leave out the same ones."""
    counts, not_run = getattr(node, "workeroutput", {}).get("left_out", ({}, {}))  # none of a process that died
    LEFT_OUT.update(counts)
    NOT_RUN.update(not_run)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Names what was left out, so that nobody takes it for tested."""
    if not LEFT_OUT and not NOT_RUN:
        return
    terminalreporter.section(f"left out on the {DEVICE}")
    for what, count in sorted(LEFT_OUT.items()):
        terminalreporter.write_line(f"{count} × {what}")
    if DEVICE == "cpu" and LEFT_OUT.total() > MOST_LEFT_OUT:
        terminalreporter.write_line(f"These are {LEFT_OUT.total()} checks, expected at most {MOST_LEFT_OUT}.", red=True)
    for reason, labels in NOT_RUN.items():
        terminalreporter.write_line(f"{reason}:")
        for label in labels:
            terminalreporter.write_line(f"    {label}")
