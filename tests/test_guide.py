"""The Python of pages runs as it stands, from top to bottom, and prints what they show; links lead somewhere."""

import contextlib
import io
import re
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import onnxgrad

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RUNNING = [
    "guide", "getting-started", "fine-tuning", "from-onnxruntime-training", "anywhere", "data", "pytorch", "arrays",
]  # fmt: skip
# A block of Python, and the block of plain text that may follow it.
BLOCKS = re.compile(r"```python\n(.*?)```\n(?:\n```\n(.*?)```\n)?", re.S)


@pytest.mark.parametrize("name", RUNNING)
def test_every_block_prints_what_is_shown(name, forget_rules, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = DOCS / f"{name}.md"
    text = page.read_text()
    names = {"__name__": "page"}
    blocks = list(BLOCKS.finditer(text))
    assert len(blocks) >= 3
    for block in blocks:
        code, expected = block.groups()
        line = text[: block.start(1)].count("\n")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + code, str(page), "exec"), names)
        assert printed.getvalue() == (expected or ""), f"the block at line {line} of {page.name}"


@pytest.mark.slow
def test_the_export_shown_keeps_what_training_needs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```py\n(.*?torch\.onnx\.export.*?)```", (DOCS / "getting-started.md").read_text(), re.S)[1]
    nn = torch.nn
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(144, 10)
    with warnings.catch_warnings():  # of the exporter
        warnings.simplefilter("ignore")
        exec(code, {"torch": torch, "module": nn.Sequential(*layers), "example": torch.randn(2, 1, 8, 8)})
    assert {"Dropout", "BatchNormalization"} <= {n.op_type for n in onnx.load("model.onnx").graph.node}
    trainer = onnxgrad.Trainer("model.onnx", onnxgrad.losses.CrossEntropy("logits"), onnxgrad.optim.SGD())
    assert list(trainer.parameters) == ["0.weight", "0.bias", "1.weight", "1.bias", "5.weight", "5.bias"]
    trainer.step({"x": np.ones((5, 1, 8, 8), np.float32), "target": np.zeros(5, np.int64)})
    assert (
        list(trainer.statistics) == ["1.running_mean", "1.running_var"] and trainer.statistics["1.running_mean"].any()
    )


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *DOCS.glob("*.md")], ids=lambda p: p.stem)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            assert anchor in [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings], anchor
