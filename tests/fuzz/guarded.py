"""Arrays between two pages that nobody may touch, so that a read or a write past an end is a fault."""

import ctypes
import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

PAGE = mmap.PAGESIZE
READ, WRITE, NOTHING = mmap.PROT_READ, mmap.PROT_WRITE, 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class NoRoomError(MemoryError):
    """What a call is given, or gives, is more than there is room for."""


class Region:
    """Pages for `size` bytes, at their end or at their start, and one page before and after; gone when it goes."""

    def __init__(self, size: int, at_end: bool) -> None:
        self.room = max(1, -(-size // PAGE)) * PAGE
        whole = self.room + 2 * PAGE
        start = _libc.mmap(None, whole, NOTHING, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if start == ctypes.c_void_p(-1).value:
            raise NoRoomError(f"the system gave no {whole} bytes")
        weakref.finalize(self, _libc.munmap, start, whole).atexit = False
        self.pages = start + PAGE
        self.protect(READ | WRITE if size else NOTHING)  # of an array without elements nothing may be touched
        address = self.pages + (self.room - size if at_end else 0)
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}

    def protect(self, rights: int) -> None:
        """Allows reading and writing, or less."""
        if _libc.mprotect(self.pages, self.room, rights):
            raise OSError(ctypes.get_errno(), "mprotect failed")


def region_bytes(size: int, at_end: bool) -> tuple[Region, np.ndarray]:
    """A region and its bytes, which keep it."""
    region = Region(size, at_end)
    return region, np.asarray(region)


def empty(shape: tuple[int, ...], dtype: np.dtype[Any], at_end: bool, fill: int) -> np.ndarray:
    """An array to write to, each of its bytes `fill`."""
    _, content = region_bytes(int(np.prod(shape, dtype=object)) * dtype.itemsize, at_end)
    if fill:
        content.fill(fill)
    return content.view(dtype).reshape(shape)


def read_only(values: np.ndarray, at_end: bool, strides: tuple[int, ...] | None = None, shift: int = 0) -> np.ndarray:
    """The values, in C order or with strides (in elements), `shift` bytes off their alignment, in pages to be read."""
    size = values.dtype.itemsize
    if strides is None:
        strides = in_order(values.shape, range(values.ndim))
    reach = [(n - 1) * s for n, s in zip(values.shape, strides, strict=True)] if values.size else []
    before, after = -sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    count = before + after + 1 if values.size else 0
    region, content = region_bytes(count * size + (shift if count else 0), at_end)
    start = shift + before * size if count else 0
    steps = tuple(s * size for s in strides)
    array = np.ndarray(values.shape, values.dtype, content, start, steps)
    array[...] = values
    if count:
        region.protect(READ)
    return array


def in_order(shape: Sequence[int], axes: Sequence[int], steps: Sequence[int] | None = None) -> tuple[int, ...]:
    """Strides in elements, of axes that lie in memory in this order, the last one densest, each with its step."""
    strides, stride = [0] * len(shape), 1
    for axis in reversed(axes):
        step = steps[axis] if steps else 1
        strides[axis] = stride * step
        stride *= max(shape[axis], 1) * abs(step)
    return tuple(strides)
