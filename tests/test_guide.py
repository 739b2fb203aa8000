"""The guide's Python runs as it stands, from top to bottom, and prints what the guide shows."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from onnxgrad.rules import RULES

GUIDE = Path(__file__).parents[1] / "docs" / "guide.md"
# A block of Python, and the block of plain text that may follow it.
BLOCKS = re.compile(r"```python\n(.*?)```\n(?:\n```\n(.*?)```\n)?", re.S)
README = Path(__file__).parents[1] / "README.md"


@pytest.fixture
def rules():
    """The guide adds some."""
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


def test_every_block_prints_what_is_shown(rules):
    text = GUIDE.read_text()
    names = {"__name__": "guide"}
    blocks = list(BLOCKS.finditer(text))
    assert len(blocks) >= 10
    for block in blocks:
        code, expected = block.groups()
        line = text[: block.start(1)].count("\n")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + code, str(GUIDE), "exec"), names)
        assert printed.getvalue() == (expected or ""), f"the block at line {line} of the guide"


def test_links_lead_somewhere():
    for page in (GUIDE, README, GUIDE.with_name("rules.md"), GUIDE.with_name("layout.md")):
        for target, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
                assert anchor in [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings], anchor
