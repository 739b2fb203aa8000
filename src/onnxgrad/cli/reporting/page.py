"""The page itself: a template without anything from elsewhere, and the contents as JSON within it."""

import html
import json
from importlib.resources import files
from pathlib import Path

from onnxgrad.cli.reporting.contents import contents
from onnxgrad.cli.run_log import RunLog, plain
from onnxgrad.graph.files import replaced

TEMPLATE, TITLE, DATA = "report.html", "%TITLE%", "%DATA%"


def page(log: RunLog) -> str:
    """The HTML of a run."""
    shown = contents(log)
    before, _, after = files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8").partition(DATA)
    return before.replace(TITLE, html.escape(shown["title"])) + _within_script(shown) + after


def _within_script(shown: object) -> str:
    """JSON that does not end the element that it is in, whatever texts it has."""
    text = json.dumps(plain(shown), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def write_report(path: Path, log: RunLog) -> None:
    """Writes the page; the file takes its name once it is complete."""
    content = page(log).encode("utf-8", "replace")
    with replaced(path) as draft:
        draft.write_bytes(content)
