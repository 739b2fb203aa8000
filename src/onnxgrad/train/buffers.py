"""Buffers: parameters, gradients and optimizer state, each one array for the whole model, sliced by parameter."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from onnxgrad.tensor_types import Array
from onnxgrad.train.devices import ALIGNMENT, Cpu, Device


class ParameterSlice(NamedTuple):
    """Where a parameter lies in the arrays."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape))


@dataclass(frozen=True)
class Chunks:
    """Rows (start, stop, group, number of the parameter), on the device; a task updates one chunk of one parameter."""

    table: Any
    elements: int  # of all chunks

    def __len__(self) -> int:
        return len(self.table)


class Buffers:
    """The parameters, side by side; slices begin on cache lines, so there are gaps, which stay zero.

    `shards` is the number of equal shards of each array, one for each rank; no chunk is in two shards.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: Any, device: Device | None = None, shards: int = 1
    ) -> None:
        self.device, self.dtype = device or Cpu(), np.dtype(dtype)
        step, at = ALIGNMENT // self.dtype.itemsize, 0
        self.slices: list[ParameterSlice] = []
        for name, shape in shapes.items():
            self.slices.append(ParameterSlice(name, at, shape))
            at += -(-self.slices[-1].size // step) * step
        self.shard = -(-at // (step * shards)) * step  # elements of one
        self.length = self.shard * shards
        self.data = self.new()
        self.is_shared = False  # whether somebody outside the trainer has the parameters, and may write into them

    @functools.cached_property
    def grad(self) -> Any:
        """The gradients."""
        return self.new()

    def new(self, fill: float = 0.0) -> Any:
        """An array as long as all parameters together."""
        result = self.device.zeros(self.length, self.dtype)
        if fill:
            for part in self.slices:
                self.view(result, part)[...] = fill
        return result

    def view(self, array: Any, part: ParameterSlice) -> Any:
        """A parameter's slice of an array, in its shape; no copy."""
        return array[part.start : part.start + part.size].reshape(part.shape)

    def views(self, array: Any) -> dict[str, Any]:
        """All parameters, by name."""
        return {part.name: self.view(array, part) for part in self.slices}

    def chunks(self, group_of: Mapping[str, int], shard: int | None = None) -> Chunks:
        """All chunks; with `shard` those of one shard, counted from its start."""
        found = np.array(list(self._chunks(group_of)), np.int64).reshape(-1, 4)
        if shard is not None:
            found = found[found[:, 0] // self.shard == shard]
            found[:, :2] -= shard * self.shard
        return Chunks(self.device.from_numpy(found), int((found[:, 1] - found[:, 0]).sum()))

    def _chunks(self, group_of: Mapping[str, int]) -> Iterator[tuple[int, int, int, int]]:
        for number, part in enumerate(self.slices):
            start, end = part.start, part.start + part.size
            while start < end:
                stop = min(start + self.device.chunk, end, (start // self.shard + 1) * self.shard)
                yield start, stop, group_of[part.name], number
                start = stop


def side_by_side(arrays: Mapping[str, Array], device: Device) -> tuple[list[Any], dict[str, Any]]:
    """Copies on the device, by name: views of one vector for each type, which are returned as well."""
    vectors: list[Any] = []
    views: dict[str, Any] = {}
    for dtype in {a.dtype: None for a in arrays.values()}:
        shapes = {name: a.shape for name, a in arrays.items() if a.dtype == dtype}
        room = Buffers(shapes, dtype, device)
        vectors.append(room.data)
        views |= room.views(room.data)
    for name, array in arrays.items():
        device.copy(views[name], array)
    return vectors, {name: views[name] for name in arrays}
