"""Tables of the command line, in terminals of any width."""

import io

import pytest
from rich.console import Console

from onnxgrad.cli import tables


@pytest.mark.parametrize("width", [20, 40, 80])
def test_numbers_stay_whole_in_a_narrow_terminal(width, monkeypatch):
    printed = io.StringIO()
    monkeypatch.setattr(tables, "plain_console", lambda: Console(file=printed, width=width))
    numbers = ["1,234", "0.7428", "0.6450", "272 MB"]
    heading = ["epoch", "updates", "val loss", "val accuracy", "peak memory"]
    tables.show(heading, [["a.name.that.is.rather.long.for.a.terminal", *numbers]], numbers=len(numbers))
    assert all(number in printed.getvalue() for number in numbers)
    assert ("terminal" in printed.getvalue()) == (width == 80)
