"""docs/command-line.md: its example runs as it stands."""

import re
import shlex
from pathlib import Path

import pytest
from tests.cli.test_train import events, run

PAGE = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.S)


@pytest.mark.slow
def test_the_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,), (settings,), commands = blocks("python"), blocks("toml"), blocks("sh")
    exec(code, {"__name__": "page"})
    Path("run.toml").write_text(settings)
    printed = [run(*shlex.split(command.replace("\\\n", ""))[1:]).stdout for command in commands]
    heading = "epoch +updates +train loss +val loss +val accuracy +time +peak memory"
    assert re.search(heading, printed[0]) and re.search(heading, PAGE)
    assert events("trained.jsonl", "epoch")[4]["validation"]["accuracy"] > 0.8
    assert [e["epoch"] for e in events("trained.jsonl", "epoch")] == list(range(1, 9))
    assert "val top-2" in printed[2] and len(events("other.jsonl", "epoch")) == 2
