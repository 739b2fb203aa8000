"""A table of pyarrow: columns of numbers, lists, text or pictures, in memory or mapped from files."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.sources.arrays import as_column, ragged
from onnxgrad.sources.request import Request
from onnxgrad.sources.table import Table
from onnxgrad.tensor_types import Array

Load = Callable[[Sequence[Path]], Any]  # of files as one pyarrow.Table


def pyarrow(request: Request) -> Any:
    """The library, where it is installed."""
    try:
        import pyarrow
    except ImportError:
        raise ImportError(
            f"{request.subject}: reading {request.path.suffix or 'datasets'} needs pyarrow: pip install "
            "'onnxgrad[parquet]'"
        ) from None
    return pyarrow


class ArrowTable(Table):
    """A pyarrow.Table; `features` are those of a Hugging Face dataset, if it is one."""

    def __init__(self, request: Request, load: Load, files: Sequence[Path]) -> None:
        self._request, self._load, self._files = request, load, files
        self._table = table = load(files)
        self._types = pyarrow(request).types
        self.names: Sequence[str] = table.column_names
        self.classes = {
            name: f["names"] for name, f in features_of(table).items() if isinstance(f, dict) and f.get("names")
        }

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def place(self, row: int) -> str:
        return f"example {row}"

    def _type(self, name: str) -> Any:
        kind = self._table.schema.field(name).type
        while isinstance(getattr(kind, "storage_type", None), pyarrow(self._request).DataType):
            kind = kind.storage_type
        return kind.value_type if self._types.is_dictionary(kind) else kind

    def is_text(self, name: str) -> bool:
        kind = self._type(name)
        return bool(self._types.is_string(kind) or self._types.is_large_string(kind))

    def is_picture(self, name: str) -> bool:
        kind = self._type(name)
        return bool(self._types.is_struct(kind) and kind.get_field_index("bytes") >= 0)

    def texts(self, name: str) -> Sequence[str]:
        column = self._table.column(name)
        if column.null_count:
            raise self._gap(name, "text")
        found: list[str] = column.to_pylist()
        return found

    def _gap(self, name: str, expected: str) -> ValueError:
        row = self._table.column(name).is_null().to_pylist().index(True)
        return self._request.error(f"has nothing in the column {name!r} in {self.place(row)}, expected {expected}")

    def numbers(self, name: str, whole: bool) -> Array:
        column = self._table.column(name)
        if not hasattr(self._type(name), "value_type") and column.null_count:
            raise self._gap(name, "a number")
        parts = [self._array(name, chunk) for chunk in column.chunks]
        shapes = {p.shape[1:] for p in parts if len(p)}
        if len(shapes) > 1:
            raise ragged(name, self._request.subject)
        return parts[0] if len(parts) == 1 else np.concatenate([p for p in parts if len(p)])

    def _array(self, name: str, chunk: Any) -> Array:
        """The numbers of a chunk, where they are, if possible."""
        chunk = getattr(chunk, "storage", chunk)
        if not hasattr(chunk.type, "value_type") or self._types.is_dictionary(chunk.type):
            return as_column(name, chunk.to_numpy(zero_copy_only=False), self._request.subject)
        inner = self._array(name, chunk.flatten())
        lengths = np.unique(chunk.value_lengths().to_numpy(zero_copy_only=False)) if len(chunk) else [0]
        if chunk.null_count or len(lengths) != 1:
            raise ragged(name, self._request.subject)
        return inner.reshape(len(chunk), int(lengths[0]), *inner.shape[1:])

    def pictures(self, name: str) -> Any:
        return Cells(self._load, self._files, name)


class Cells:
    """A column, which a worker process reads from the files itself."""

    def __init__(self, load: Load, files: Sequence[Path], name: str) -> None:
        self._how = load, files, name
        self._column = load(files).column(name)

    def __reduce__(self) -> Any:
        return Cells, self._how

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, row: int) -> Any:
        return self._column[row].as_py()


def features_of(table: Any) -> Mapping[str, Any]:
    """The features that the `datasets` library notes in its files."""
    noted = (table.schema.metadata or {}).get(b"huggingface")
    found: Mapping[str, Any] = json.loads(noted).get("info", {}).get("features", {}) if noted else {}
    return found
