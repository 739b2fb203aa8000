"""Parquet files: a column for each input, or for each feature."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onnxgrad.sources.arrays import cannot_be_read
from onnxgrad.sources.arrow import ArrowTable, pyarrow
from onnxgrad.sources.request import Request
from onnxgrad.sources.source import Source
from onnxgrad.sources.table import TAKES, from_table

__all__ = ["TAKES"]
WHAT = "a table"
SUFFIXES = (".parquet",)


def read(request: Request) -> Source:
    """The examples of a file."""
    pyarrow(request)
    try:
        table = ArrowTable(request, load, [request.path])
    except (OSError, EOFError, ValueError) as error:  # of pyarrow
        raise cannot_be_read(request, error) from None
    return from_table(table, request)


def load(files: Sequence[Path]) -> Any:
    """The table of a file."""
    from pyarrow import parquet

    return parquet.read_table(files[0])
