"""A folder with an .npy file for every input: arrays that stay in their files, of which batches read what they need."""

from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.sources.arrays import from_arrays
from onnxgrad.sources.request import Request
from onnxgrad.sources.source import Arrays, Source, Subset
from onnxgrad.tensor_types import Array

WHAT = "a folder of .npy files"
TAKES = ()


def is_mine(folder: Path) -> bool:
    """Whether it has such files."""
    return any(folder.glob("*.npy"))


def read(request: Request) -> Source:
    """The arrays of a folder, by the names of their files."""
    mapped = _mapped(request, sorted(request.path.glob("*.npy")))
    found = from_arrays(mapped, request)
    assert isinstance(found, Arrays)
    return MappedArrays(request.path, {name: mapped[name] for name in found.arrays}, found.remarks)


def _mapped(request: Request, files: list[Path]) -> dict[str, Any]:
    found = {}
    for file in files:
        try:
            found[file.stem] = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, EOFError, ValueError) as error:
            raise ValueError(f"{request.subject}: {str(file)!r} cannot be read as .npy ({error})") from None
    return found


class MappedArrays(Arrays):
    """Arrays that stay in their files; a worker process maps these itself."""

    is_ready = False

    def __init__(self, folder: Path, arrays: dict[str, Array], remarks: Any = ()) -> None:
        super().__init__(arrays, remarks=remarks)
        self._folder = folder

    def take(self, chosen: Array, seed: Any = ()) -> dict[str, Array]:
        return {name: _rows(a, chosen) for name, a in self.arrays.items()}

    def subset(self, chosen: Array) -> Source:
        return Subset(self, chosen)

    def __reduce__(self) -> Any:
        return _again, (self._folder.absolute(), list(self.arrays))


def _rows(array: Any, chosen: Array) -> Array:
    """Some rows of a mapped array, each by one read: a page that is mapped brings others along, which nobody reads."""
    if not array.flags.c_contiguous or not array.size:
        return np.asarray(array[chosen])
    found = np.empty((len(chosen), *array.shape[1:]), array.dtype)
    rows = found.reshape(len(chosen), -1).view(np.uint8)
    with Path(array.filename).open("rb", buffering=0) as file:
        for row, k in zip(rows, chosen, strict=True):
            file.seek(array.offset + int(k) * rows.shape[1])
            if file.readinto(row.data) != rows.shape[1]:
                raise ValueError(f"{str(array.filename)!r} has become shorter: example {k} is missing")
    return found


def _again(folder: Path, names: list[str]) -> MappedArrays:
    return MappedArrays(folder, {n: np.load(folder / f"{n}.npy", mmap_mode="r") for n in names})
