"""JSON lines: an object for each example, with numbers, lists of numbers, or text."""

import gzip
import json
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxgrad.sources.arrays import as_column
from onnxgrad.sources.request import Request
from onnxgrad.sources.source import Source
from onnxgrad.sources.table import TAKES, Table, from_table
from onnxgrad.tensor_types import Array

__all__ = ["TAKES"]
WHAT = "a table"
SUFFIXES = (".jsonl", ".jsonl.gz")


def read(request: Request) -> Source:
    """The examples of a file."""
    try:
        table = JsonTable(request)
    except UnicodeDecodeError as error:
        raise request.error(f"is not text in UTF-8 ({error.reason} at byte {error.start})") from None
    except (OSError, EOFError, zlib.error) as error:
        raise request.error(f"cannot be read as lines of JSON ({error})") from None
    return from_table(table, request)


class JsonTable(Table):
    """The values of all lines, column by column, under the names in the first."""

    def __init__(self, request: Request) -> None:
        self._request = request
        opened: Any = gzip.open if request.path.name.lower().endswith(".gz") else open
        self._lines: list[int] = []
        rows: list[dict[str, Any]] = []
        with opened(request.path, "rt", encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    rows.append(self._parsed(line, number))
                    self._lines.append(number)
        self.names: Sequence[str] = list(rows[0]) if rows else []
        self._columns = {name: [self._cell(row, k, name) for k, row in enumerate(rows)] for name in self.names}

    def _parsed(self, line: str, number: int) -> dict[str, Any]:
        try:
            found = json.loads(line)
        except json.JSONDecodeError as error:
            raise self._request.error(f"is not JSON in line {number} ({error.msg})") from None
        if not isinstance(found, dict):
            raise self._request.error(f"has a {type(found).__name__} in line {number}, expected an object with names")
        return found

    def _cell(self, row: dict[str, Any], k: int, name: str) -> Any:
        found = row.get(name)
        if found is None:
            raise self._request.error(f"lacks {name!r} in {self.place(k)}, which line {self._lines[0]} has")
        return found

    def __len__(self) -> int:
        return len(self._lines)

    def place(self, row: int) -> str:
        return f"line {self._lines[row]}"

    def is_text(self, name: str) -> bool:
        return isinstance(self._columns[name][0], str)

    def texts(self, name: str) -> Sequence[str]:
        found = self._columns[name]
        wrong = next((k for k, cell in enumerate(found) if not isinstance(cell, str)), None)
        if wrong is not None:
            raise self._wrong(name, wrong, "text")
        return found

    def numbers(self, name: str, whole: bool) -> Array:
        cells = self._columns[name]
        wrong = next((k for k, cell in enumerate(cells) if not isinstance(cell, (int, float, list))), None)
        if wrong is not None:
            raise self._wrong(name, wrong, "a number")
        found = as_column(name, cells, self._request.subject)
        is_rounded = whole and found.dtype.kind == "f" and (found == np.rint(found)).all()
        return found.astype(np.int64) if is_rounded else found

    def _wrong(self, name: str, row: int, expected: str) -> ValueError:
        cell = self._columns[name][row]
        return self._request.error(f"has {cell!r} in the column {name!r} in {self.place(row)}, expected {expected}")
