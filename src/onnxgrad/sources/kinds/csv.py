"""CSV and TSV files, plain or by gzip: a header and a row for each example, or numbers alone."""

import csv
import gzip
import itertools
import zlib
from collections.abc import Sequence
from typing import Any, TextIO

import numpy as np

from onnxgrad.sources.request import Request
from onnxgrad.sources.source import Source
from onnxgrad.sources.table import TAKES, Table, from_table
from onnxgrad.tensor_types import Array

__all__ = ["TAKES"]
WHAT = "a table"
SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")


def read(request: Request) -> Source:
    """The examples of a file."""
    try:
        table = CsvTable(request)
    except UnicodeDecodeError as error:
        raise request.error(f"is not text in UTF-8 ({error.reason} at byte {error.start})") from None
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise request.error(f"cannot be read as a table ({error})") from None
    return from_table(table, request)


class CsvTable(Table):
    """The cells of a file as text, column by column; `_lines` are where the rows end."""

    def __init__(self, request: Request) -> None:
        self._request = request
        with self._open() as file:
            is_tab = request.path.name.lower().removesuffix(".gz").endswith(".tsv")
            rows = csv.reader(file, delimiter="\t" if is_tab else _delimiter(file), strict=True)
            first, cells = next(((rows.line_num, [c.strip() for c in row]) for row in rows if row), (0, []))
            has_header = _is_header(cells)
            self.names: list[str] = cells if has_header else [f"column{k + 1}" for k in range(len(cells))]
            self._lines: list[int] = [] if has_header else [first]
            found = [] if has_header else [cells]
            try:
                self._columns = self._transposed(rows, found)
            except csv.Error as error:
                raise request.error(f"cannot be read as a table in line {rows.line_num} ({error})") from None
        twice = next((n for k, n in enumerate(self.names) if n in self.names[:k]), None)
        if twice is not None:
            raise request.error(f"has two columns {twice!r} in line {first}")
        if self.names and not self.names[0]:  # the numbers of rows, as pandas and R write them
            del self.names[0]
        self._is_text: dict[str, bool] = {}

    def _open(self) -> TextIO:
        path = self._request.path
        opened: Any = gzip.open if path.name.lower().endswith(".gz") else open
        found: TextIO = opened(path, "rt", encoding="utf-8-sig", newline="")
        return found

    def _transposed(self, rows: Any, found: list[list[str]]) -> dict[str, Sequence[str]]:
        width, lines = len(self.names), self._lines
        for row in rows:
            if len(row) != width:
                if not row:  # an empty line
                    continue
                raise self._request.error(
                    f"has {len(row)} cell{'s' * (len(row) > 1)} in line {rows.line_num}, expected {width}"
                )
            found.append(row)
            lines.append(rows.line_num)
        return dict(zip(self.names, zip(*found, strict=True), strict=True)) if found else {}

    def __len__(self) -> int:
        return len(self._lines)

    def place(self, row: int) -> str:
        return f"line {self._lines[row]}"

    def is_text(self, name: str) -> bool:
        if name not in self._is_text:
            # One cell of text above numbers is a mistake, of which numbers() says where it is.
            cells = list(itertools.islice((c for c in self._columns[name] if c.strip()), 2))
            self._is_text[name] = bool(cells) and not any(map(_is_number, cells))
        return self._is_text[name]

    def texts(self, name: str) -> Sequence[str]:
        found = [c.strip() for c in self._columns[name]]
        if not all(found):
            raise self._wrong(name, found.index(""), "text")
        return found

    def numbers(self, name: str, whole: bool) -> Array:
        cells = self._columns[name]
        try:
            return np.fromiter(map(int, cells), np.int64, len(cells))
        except (ValueError, OverflowError):
            pass
        try:
            found = np.fromiter(map(float, cells), np.float64, len(cells))
        except ValueError:
            raise self._wrong(name, next(k for k, c in enumerate(cells) if not _is_number(c)), "a number") from None
        if np.isnan(found).any():
            raise self._wrong(name, int(np.argmax(np.isnan(found))), "a number")
        return found.astype(np.int64) if whole and (found == np.rint(found)).all() else found

    def _wrong(self, name: str, row: int, expected: str) -> ValueError:
        cell = self._columns[name][row].strip()
        what = f"has {cell!r}" if cell else "has nothing"
        return self._request.error(f"{what} in the column {name!r} in {self.place(row)}, expected {expected}")


def _delimiter(file: TextIO) -> str:
    """A comma, or the semicolon or tab of spreadsheets; the file is back at its beginning."""
    first = file.readline()
    file.seek(0)
    return max(",;\t", key=lambda d: (first.count(d), d == ","))


def _is_header(cells: list[str]) -> bool:
    """Whether a first row has names: no number, or besides names 0, 1, 2 …, which is what pandas calls columns."""
    numbers = [c for c in cells if _is_number(c)]
    return not numbers or (len(numbers) > 2 and numbers == [str(k) for k in range(len(numbers))])


def _is_number(cell: str) -> bool:
    try:
        return bool(float(cell) == float(cell))
    except ValueError:
        return False
