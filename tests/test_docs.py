"""Docs that are generated match the code, and what the README shows is what it prints."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = re.findall(r"```python\n(.*?)```\s+```\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, check=False)


def test_generated_pages_are_up_to_date():
    result = run("docs/generate.py", "--check")
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("code, printed", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_of_the_readme_print_what_it_says(code, printed):
    assert run("-c", code).stdout == printed


def test_the_readme_names_the_two_commands():
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text and "make test" in text
