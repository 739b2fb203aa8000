"""Sizes, types, numbers and layouts, drawn with a preference for those that go wrong."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from tests.fuzz.guarded import in_order, read_only

from onnxgrad.tensor_types import DTYPES

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SMALL = (1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8)
ODD = (9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 100, 127, 128, 129)
LARGE = (200, 255, 256, 257, 500, 513, 1000, 1025, 2049)
FEW, MANY = 20_000, 200_000  # elements of an array, as a rule and now and then
WILD_FLOATS = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40, 1e30, -1e30, 65504.0, 3e38, -3e38)
WILD_INTEGERS = (0, 1, -1, 2, -2, 127, -128, 2**31 - 1, -(2**31), 2**31, 2**62, 2**63 - 1, -(2**63), -(2**63) + 1)
# The likelier a type, the sooner its kernels have run in all ways.
LIKELY = {"float32": 12.0, "int64": 6.0}


class Draw:
    """A random generator that knows what arrays are like."""

    def __init__(self, *seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.limit = MANY if self.chance(0.02) else FEW
        self.has_empty = self.chance(0.1)

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def one(self, choices: Sequence[Any]) -> Any:
        return choices[self.number(0, len(choices))]

    def number(self, low: int, end: int) -> int:
        return int(self.rng.integers(low, end))

    def size(self, most: int = 4096, least: int = 0) -> int:
        """A dimension."""
        if self.has_empty and least == 0 and self.chance(0.2):
            return 0
        kind = self.rng.random()
        choices = SMALL if kind < 0.65 else ODD if kind < 0.95 else LARGE
        return max(least, min(most, int(self.one(choices))))

    def shape(self, rank: int, others: int = 1, least: int = 0) -> tuple[int, ...]:
        """Dimensions of an array, which has so many elements for each that is drawn."""
        dims, room = [], max(1, self.limit // max(1, others))
        for _ in range(rank):
            dims.append(self.size(max(1, room), least))
            room //= max(1, dims[-1])
        self.rng.shuffle(dims)
        return tuple(dims)

    def dtype(self, dtypes: Sequence[np.dtype[Any]]) -> np.dtype[Any]:
        weights = np.array([LIKELY.get(str(d), 1.0) for d in dtypes])
        return dtypes[int(self.rng.choice(len(dtypes), p=weights / weights.sum()))]

    def types(self, op: Any) -> dict[str, np.dtype[Any]]:
        """One for each type variable of an operator; as a rule the same for all that may be of it."""
        chosen: dict[str, np.dtype[Any]] = {}
        for entry in op.inputs:
            name, allowed = entry.constraint.name, entry.constraint.dtypes
            if name in chosen:
                continue
            first = chosen.get("T")
            if first is not None and first in allowed:
                wide = np.dtype(np.float32)
                chosen[name] = wide if wide in allowed and self.chance(0.15) else first
            else:
                chosen[name] = self.dtype(allowed)
        return chosen

    def values(self, shape: Sequence[int], dtype: np.dtype[Any], scale: float = 1.0) -> np.ndarray:
        """Numbers about zero, of any type."""
        if dtype.kind == "b":
            return self.rng.random(shape) < 0.5
        if dtype.kind == "c":
            return (self.rng.standard_normal(shape) + 1j * self.rng.standard_normal(shape)).astype(dtype)
        if dtype.kind in "iu":
            return self.rng.integers(0, 100, shape).astype(dtype)
        if dtype.kind == "V" and "int" in str(dtype):
            return self.rng.integers(0, 2, shape).astype(dtype)
        return (self.rng.standard_normal(shape) * scale).astype(dtype)

    def positive(self, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
        return (self.rng.random(shape) + 0.5).astype(dtype)

    def whole(self, low: int, end: int, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
        """Integers from low to end - 1; zeros where there are none."""
        return self.rng.integers(low, max(end, low + 1), shape).astype(dtype)

    def any_dtype(self) -> np.dtype[Any]:
        return self.one(list(DTYPES.values()))

    def wild(self, array: np.ndarray) -> np.ndarray:
        """The array with some numbers that are extreme, or none."""
        if array.size == 0 or array.dtype.kind == "b":
            return array
        found = array.copy()
        is_whole = array.dtype.kind in "iu" or "int" in str(array.dtype)
        count = 1 if self.chance(0.5) else min(found.size, self.number(1, 10))
        for at in self.rng.integers(0, found.size, count):
            number = self.one(WILD_INTEGERS if is_whole else WILD_FLOATS)
            if is_whole:
                if self.chance(0.5):
                    number = self.number(-300, 300)
                limits = ml_dtypes.iinfo(found.dtype)
                number = min(max(number, int(limits.min)), int(limits.max))
            found.reshape(-1)[at] = number
        return found

    def guarded(self, array: Any) -> Any:
        """The same values in guarded memory that is read-only, laid out in some way."""
        if not isinstance(array, np.ndarray):
            return array
        at_end = self.chance(0.6)
        if self.chance(0.6):
            return read_only(array, at_end)
        kind, rank = self.one(("order", "steps", "reversed", "stretched", "unaligned", "bytes")), array.ndim
        axes = [int(a) for a in self.rng.permutation(rank)]
        if kind == "order":
            return read_only(array, at_end, in_order(array.shape, axes))
        if kind == "steps":
            return read_only(array, at_end, in_order(array.shape, axes, [self.number(1, 4) for _ in axes]))
        if kind == "reversed":
            return read_only(array, at_end, in_order(array.shape, range(rank), [self.one((-1, 1, -2)) for _ in axes]))
        if kind == "stretched" and rank and array.size:
            axis = self.number(0, rank)
            same = np.broadcast_to(array.take([0], axis), array.shape)
            narrow = [1 if a == axis else n for a, n in enumerate(array.shape)]
            strides = list(in_order(narrow, range(rank)))
            strides[axis] = 0
            return read_only(same, at_end, tuple(strides))
        if kind == "bytes" and array.dtype.isbuiltin == 1:
            return read_only(array.astype(array.dtype.newbyteorder(">")), at_end)
        return read_only(array, at_end, shift=1 if array.dtype.itemsize > 1 else 0)
