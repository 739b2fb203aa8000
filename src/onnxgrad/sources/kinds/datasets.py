"""Hugging Face datasets on disk, as `save_to_disk` writes them: arrow files, which stay where they are."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onnxgrad.sources.arrow import ArrowTable, pyarrow
from onnxgrad.sources.request import Request
from onnxgrad.sources.source import Source
from onnxgrad.sources.table import TAKES, from_table

__all__ = ["TAKES"]
WHAT = "a Hugging Face dataset"


def is_mine(folder: Path) -> bool:
    """Whether it is one dataset, not several by name."""
    return (folder / "dataset_info.json").is_file() and any(folder.glob("*.arrow"))


def read(request: Request) -> Source:
    """The examples of a dataset."""
    pyarrow(request)
    try:
        table = ArrowTable(request, load, files_of(request.path))
    except (OSError, ValueError) as error:  # of json and pyarrow
        raise request.error(f"cannot be read as a dataset ({error})") from None
    return from_table(table, request)


def files_of(folder: Path) -> list[Path]:
    """The files of a dataset, in their order."""
    state = folder / "state.json"
    named = json.loads(state.read_text(encoding="utf-8")).get("_data_files") if state.is_file() else None
    return [folder / f["filename"] for f in named] if named else sorted(folder.glob("*.arrow"))


def load(files: Sequence[Path]) -> Any:
    """All files as one table, mapped into memory."""
    import pyarrow

    tables = []
    for file in files:
        with pyarrow.memory_map(str(file)) as mapped:
            tables.append(pyarrow.ipc.open_stream(mapped).read_all())
    return pyarrow.concat_tables(tables)
