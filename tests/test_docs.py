"""Docs that are generated match the code, and what the README shows is what it prints."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import onnxgrad

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```\s+```\n(.*?)```", README, re.S)


def run(*arguments, folder=ROOT):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=folder, check=False)


def test_generated_pages_are_up_to_date():
    result = run("docs/generate.py", "--check")
    assert result.returncode == 0, result.stdout


def test_the_reference_has_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in onnxgrad.__all__ if not re.search(rf"\bonnxgrad\.{name}\b", page)] == []


@pytest.mark.parametrize("code, printed", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_of_the_readme_print_what_it_says(code, printed, tmp_path):
    assert run(ROOT / "release" / "readme_files.py", folder=tmp_path).returncode == 0
    result = run("-c", code, folder=tmp_path)
    assert result.stdout == printed, result.stderr


def test_the_site_has_every_page_and_its_links_lead_somewhere(tmp_path):
    result = run("docs/site/stage.py", str(tmp_path / "pages"))
    assert result.returncode == 0, result.stderr
    pages = list((tmp_path / "pages").glob("*.md"))  # those of examples hold code
    assert {p.stem for p in (ROOT / "docs").glob("*.md")} < {p.stem for p in pages}
    for page in pages:
        for target in re.findall(r"\]\((?!http|#)([^)#\s]+)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S)):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_readme_names_the_two_commands():
    assert "make demo" in README and "make test" in README


def test_the_readme_says_where_the_files_of_its_first_example_come_from():
    command = "python release/readme_files.py"
    assert README.index(command) < README.index("train.npz")
    assert (ROOT / command.split()[1]).exists()


def test_the_glossary_is_sorted_and_names_files_that_exist():
    rows = re.findall(r"^\| (?!term)(\w.*?) \| .* \| (.*) \|$", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    terms = [term for term, _ in rows]
    assert terms == sorted(terms, key=str.lower)
    paths = [path for _, places in rows for path in re.findall("`(.*?)`", places)]
    assert [p for p in paths if not ((ROOT / "src" / "onnxgrad" / p).exists() or (ROOT / p).exists())] == []
