"""Files of numpy.savez: an array for every input."""

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.sources.arrays import cannot_be_read, from_arrays
from onnxgrad.sources.request import Request
from onnxgrad.sources.source import Source
from onnxgrad.tensor_types import Array

WHAT = "a file of arrays"
SUFFIXES = (".npz",)
TAKES = ()


def read(request: Request) -> Source:
    """The arrays of a file."""
    try:
        arrays: dict[str, Any] = dict(read_npz(request.path))
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:  # of NumPy
        raise cannot_be_read(request, error) from None
    return from_arrays(arrays, request)


def read_npz(path: Path) -> dict[str, Array]:
    """The arrays of a file of numpy.savez."""
    with path.open("rb") as file:
        try:
            archive = np.load(file, allow_pickle=False)
        except ValueError:  # NumPy speaks of pickle
            raise ValueError("it has another format") from None
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it holds a single array, without a name")
        columns = {}
        for name in archive.files:
            try:
                columns[name] = archive[name]
            except ValueError:  # NumPy speaks of pickle
                raise ValueError(f"{name!r} holds Python objects, expected numbers") from None
    return columns
