"""What pytest runs of the operators' tests on a device other than the CPU, and a list of all that it leaves out.

Triton's interpreter takes about a second for what a GPU does in microseconds. So of a test with many cases it gets
some, chosen such that every type, axis, layout … still occurs.
"""

from collections import defaultdict
from typing import Any

import pytest
from tests.checks import DEVICE, reaches_device

MOST_CASES = 24
# Tests that call an operator hundreds of times in every case.
MANY_CALLS = {
    "test_every_slice_of_a_small_axis",
    "test_numpy_reads_the_same_wherever_it_has_a_say",
    "test_only_the_outputs_asked_for",
}
LEFT_OUT: dict[str, list[str]] = defaultdict(list)  # what, by the reason


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what says nothing about the device, and what its interpreter has no time for."""
    if DEVICE == "cpu":
        return
    kept = []
    for (path, name), cases in _by_function(items).items():
        label = f"{path.stem.removeprefix('test_')}::{name}"
        if path.parent.name == "ops" and not reaches_device(cases[0].obj):
            LEFT_OUT["speaks of the CPU alone"].append(label)
        elif DEVICE == "interpreter" and name in MANY_CALLS:
            LEFT_OUT["hundreds of calls in every case, too slow for the interpreter"].append(label)
        else:
            step = _step(cases) if DEVICE == "interpreter" else 1
            kept += cases[::step]
            if step > 1:
                left = len(cases) - len(cases[::step])
                LEFT_OUT["more cases than the interpreter has time for"].append(f"{label} {left} of {len(cases)}")
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


def _by_function(items: list[pytest.Item]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = defaultdict(list)
    for item in items:
        found[item.path, getattr(item, "originalname", item.name)].append(item)
    return found


def _step(cases: list[Any]) -> int:
    """The smallest k for which every k-th case is few enough and every value of every parameter still occurs."""
    if len(cases) <= MOST_CASES:
        return 1

    def values(some: list[Any]) -> set[tuple[str, int]]:
        return {pair for case in some for pair in case.callspec.indices.items()}

    everything = values(cases)
    for step in range(-(-len(cases) // MOST_CASES), len(cases)):
        if values(cases[::step]) == everything:
            return step
    return 1  # a list of single cases, such as the bad calls: none of them stands for another


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Names what was left out, so that nobody takes it for tested."""
    if DEVICE == "cpu":
        return
    from tests import gpu

    terminalreporter.section(f"left out on the {DEVICE}")
    for what, count in sorted(gpu.LEFT_OUT.items()):
        terminalreporter.write_line(f"{count} × {what}")
    for reason, labels in LEFT_OUT.items():
        terminalreporter.write_line(f"{reason}:")
        for label in labels:
            terminalreporter.write_line(f"    {label}")
