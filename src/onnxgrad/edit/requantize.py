"""Requantization: rounds changed weights to few bits again, in their original blocks."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrad.graph.quantization import spread
from onnxgrad.tensor_types import Array


@dataclass(frozen=True)
class Blocks:
    """Which elements share a scale: all, those with one index along an axis, or runs along it."""

    shape: tuple[int, ...]
    axis: int | None = None
    size: int = 0  # of a run

    def reduced(self, ufunc: Any, x: Array) -> Array:
        """One number of each block, in the shape of the scales."""
        if self.axis is None:
            return np.asarray(ufunc.reduce(x, axis=None))
        if self.size:
            found: Array = ufunc.reduceat(x, np.arange(0, self.shape[self.axis], self.size), axis=self.axis)
            return found
        return np.asarray(ufunc.reduce(x, axis=tuple(k for k in range(x.ndim) if k != self.axis)))

    def spread(self, x: Array) -> Array:
        """A number of each block for all of its elements."""
        return spread(x, self.shape, self.axis or 0, self.size)


@dataclass(frozen=True)
class Quantized:
    """(levels - zero) · scale; `zero` is in the shape of `scale`."""

    levels: Array  # whole numbers
    scale: Array
    zero: Array
    lowest: int
    highest: int
    blocks: Blocks

    @property
    def wide(self) -> Array:
        """The numbers that it stands for."""
        apart = self.levels.astype(np.float32) - self.blocks.spread(self.zero.astype(np.float32))
        return apart * self.blocks.spread(self.scale.astype(np.float32))

    @property
    def is_symmetric(self) -> bool:
        """Whether 0 lies in the middle of the range of every block."""
        return bool((self.zero == (self.lowest + self.highest + 1) // 2).all())

    def plus(self, delta: Array) -> "Quantized":
        """The same scheme, with new scales, and zero points if it has such, where something is added to a block."""
        wide = self.wide + delta
        scale, zero = self._symmetric(wide) if self.is_symmetric else self._asymmetric(wide)
        changed = (self.blocks.reduced(np.maximum, np.abs(delta)) > 0) & (scale > 0)
        changed = changed.reshape(self.scale.shape)
        scale = np.where(changed, scale.reshape(self.scale.shape), self.scale.astype(np.float32))
        scale = scale.astype(self.scale.dtype)  # before numbers are divided by it
        zero = np.where(changed, zero.reshape(self.zero.shape), self.zero)
        levels = np.rint(wide / self.blocks.spread(scale.astype(np.float32))) + self.blocks.spread(zero)
        levels = np.clip(levels, self.lowest, self.highest).astype(np.int32)
        return Quantized(levels, scale, zero, self.lowest, self.highest, self.blocks)

    def _symmetric(self, wide: Array) -> tuple[Array, Array]:
        middle = int(self.zero.flat[0])
        above = self.blocks.reduced(np.maximum, wide) / (self.highest - middle)
        below = self.blocks.reduced(np.minimum, wide) / (self.lowest - middle)
        return np.maximum(above, below), np.full(self.zero.shape, middle, self.zero.dtype)

    def _asymmetric(self, wide: Array) -> tuple[Array, Array]:
        most = np.maximum(self.blocks.reduced(np.maximum, wide), 0)
        least = np.minimum(self.blocks.reduced(np.minimum, wide), 0)
        scale = (most - least) / (self.highest - self.lowest)
        zero = np.rint(self.lowest - least / np.where(scale > 0, scale, 1))
        return scale, np.clip(zero, self.lowest, self.highest).astype(self.zero.dtype)


def unpacked(packed: Array, rows: int, bits: int) -> Array:
    """[rows, numbers], of bytes that hold several, the first in the lowest bits."""
    parts: Array = packed.reshape(-1, 1) >> np.arange(0, 8, bits, dtype=np.uint8) & (2**bits - 1)
    numbers: Array = parts.reshape(rows, -1).astype(np.int32)
    return numbers


def packed(numbers: Array, bits: int, fill: Array | int = 0) -> Array:
    """Bytes of [rows, numbers], with `fill` where a last byte, or block, has room."""
    each = 8 // bits
    room = -numbers.shape[1] % each
    wide = np.concatenate([numbers, np.full((len(numbers), room), fill)], 1) if room else numbers
    shifted = wide.reshape(len(numbers), -1, each).astype(np.uint8) << np.arange(0, 8, bits, dtype=np.uint8)
    result: Array = np.bitwise_or.reduce(shifted, axis=-1)
    return result
