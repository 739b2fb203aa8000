"""Parameters, gradients and optimizer state: each one array for the whole model; every parameter has its part of it."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from onnxgrad.tensor_types import Array
from onnxgrad.train.devices import ALIGNMENT, Cpu, Device


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
    """The parameters, side by side; parts begin on cache lines, so there are gaps, which stay zero."""

    def __init__(self, arrays: Mapping[str, Array], device: Device | None = None) -> None:
        if not arrays:
            raise ValueError("a trainer needs at least one parameter")
        self.device = device or Cpu()
        (self.dtype,) = {a.dtype for a in arrays.values()}
        step, at = ALIGNMENT // self.dtype.itemsize, 0
        self.parts: list[Part] = []
        for name, array in arrays.items():
            self.parts.append(Part(name, at, array.shape))
            at += -(-array.size // step) * step
        self.length = at
        self.data = self.new()
        self.grad = self.new()
        for part, array in zip(self.parts, arrays.values(), strict=True):
            self.device.copy(self.view(self.data, part), array)

    def new(self, fill: float = 0.0) -> Any:
        """An array as long as all parameters together."""
        result = self.device.zeros(self.length, self.dtype)
        if fill:
            for part in self.parts:
                self.view(result, part)[...] = fill
        return result

    def view(self, array: Any, part: Part) -> Any:
        """A parameter's part of an array, in its shape; no copy."""
        return array[part.start : part.start + part.size].reshape(part.shape)

    def views(self, array: Any) -> dict[str, Any]:
        """All of them, by name."""
        return {part.name: self.view(array, part) for part in self.parts}

    def pieces(self, group_of: Mapping[str, int]) -> Any:
        """(start, stop, group, number of the parameter) for each task; no piece is of two parameters."""
        return self.device.from_numpy(np.array(list(self._pieces(group_of)), np.int64).reshape(-1, 4))

    def _pieces(self, group_of: Mapping[str, int]) -> Iterator[tuple[int, int, int, int]]:
        for number, part in enumerate(self.parts):
            for start in range(part.start, part.start + part.size, self.device.piece):
                yield start, min(start + self.device.piece, part.start + part.size), group_of[part.name], number
