"""Parameters, gradients and optimizer state: each one array for the whole model; every parameter has its part of it."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Pieces:
    """Tasks: (start, stop, group, number of the parameter) for each, on the device; no piece is of two parameters."""

    table: Any
    elements: int  # in all of them

    def __len__(self) -> int:
        return len(self.table)


class Buffers:
    """The parameters, side by side; parts begin on cache lines, so there are gaps, which stay zero.

    `blocks` is how many equal blocks the arrays can be cut into, one for each rank; no piece is of two blocks.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: Any, device: Device | None = None, blocks: int = 1
    ) -> None:
        if not shapes:
            raise ValueError("a trainer needs at least one parameter")
        self.device, self.dtype = device or Cpu(), np.dtype(dtype)
        step, at = ALIGNMENT // self.dtype.itemsize, 0
        self.parts: list[Part] = []
        for name, shape in shapes.items():
            self.parts.append(Part(name, at, shape))
            at += -(-self.parts[-1].size // step) * step
        self.block = -(-at // (step * blocks)) * step
        self.length = self.block * blocks
        self.data = self.new()
        self.grad = self.new()

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

    def pieces(self, group_of: Mapping[str, int], block: int | None = None) -> Pieces:
        """All of them; with `block` those of one block, counted from its start."""
        found = np.array(list(self._pieces(group_of)), np.int64).reshape(-1, 4)
        if block is not None:
            found = found[found[:, 0] // self.block == block]
            found[:, :2] -= block * self.block
        return self._on_device(found)

    def without(self, pieces: Pieces, names: Collection[str]) -> Pieces:
        """The pieces of other parameters."""
        table = self.device.to_numpy(pieces.table)
        numbers = [number for number, part in enumerate(self.parts) if part.name in names]
        return self._on_device(table[~np.isin(table[:, 3], numbers)])

    def _on_device(self, table: Array) -> Pieces:
        return Pieces(self.device.from_numpy(table), int((table[:, 1] - table[:, 0]).sum()))

    def _pieces(self, group_of: Mapping[str, int]) -> Iterator[tuple[int, int, int, int]]:
        for number, part in enumerate(self.parts):
            start, end = part.start, part.start + part.size
            while start < end:
                stop = min(start + self.device.piece, end, (start // self.block + 1) * self.block)
                yield start, stop, group_of[part.name], number
                start = stop
