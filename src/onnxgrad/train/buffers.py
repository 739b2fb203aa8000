"""Parameters, gradients and optimizer state: each one array for the whole model; every parameter has its part of it."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from onnxgrad.tensor_types import Array

ALIGNMENT = 64  # bytes: a cache line, and as much as any vector instruction asks for
PIECE = 1 << 15  # elements that one task updates


class Part(NamedTuple):
    """Where a parameter lies in the arrays."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return int(np.prod(self.shape))


class Buffers:
    """The parameters of one type, side by side; parts begin on cache lines, so there are gaps, which stay zero."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        if not arrays:
            raise ValueError("a trainer needs at least one parameter")
        dtypes = {a.dtype for a in arrays.values()}
        if len(dtypes) > 1:
            raise ValueError(f"parameters of one type expected, not {', '.join(sorted(map(str, dtypes)))}")
        (self.dtype,) = dtypes
        step, at = ALIGNMENT // self.dtype.itemsize, 0
        self.parts: list[Part] = []
        for name, array in arrays.items():
            self.parts.append(Part(name, at, array.shape))
            at += -(-array.size // step) * step
        self.length = at
        self.data = self.new()
        self.grad = self.new()
        for part, array in zip(self.parts, arrays.values(), strict=True):
            self.view(self.data, part)[...] = array

    def new(self, fill: float = 0.0) -> Array:
        """An array as long as all parameters together."""
        room = np.zeros(self.length + ALIGNMENT // self.dtype.itemsize, self.dtype)
        skipped = (-room.ctypes.data % ALIGNMENT) // self.dtype.itemsize
        result = room[skipped : skipped + self.length]
        if fill:
            for part in self.parts:
                self.view(result, part)[...] = fill
        return result

    def view(self, array: Array, part: Part) -> Array:
        """A parameter's part of an array, in its shape; no copy."""
        return array[part.start : part.start + part.size].reshape(part.shape)

    def views(self, array: Array) -> dict[str, Array]:
        """All of them, by name."""
        return {part.name: self.view(array, part) for part in self.parts}

    def pieces(self, group_of: Mapping[str, int]) -> Array:
        """(start, stop, group, number of the parameter) for each task; no piece is of two parameters."""
        return np.array(list(self._pieces(group_of)), np.int64).reshape(-1, 4)

    def _pieces(self, group_of: Mapping[str, int]) -> Iterator[tuple[int, int, int, int]]:
        for number, part in enumerate(self.parts):
            for start in range(part.start, part.start + part.size, PIECE):
                yield start, min(start + PIECE, part.start + part.size), group_of[part.name], number
