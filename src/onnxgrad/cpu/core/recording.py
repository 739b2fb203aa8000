"""What a CPU kernel would launch, written down instead of run.

A kernel's Python part looks at shapes and settings, takes working memory and launches native code. Run once over arrays
that have shapes but no memory, it leaves a list of native calls that can be repeated, on any memory, without Python.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxgrad.tensor_types import Array

REGION = 1 << 44  # bytes of addresses for each array that has no memory; no array is larger
NOWHERE = 1 << 60  # the first of these addresses: no process has memory there
FIRST_WORKSPACE = 64  # the number of the first region of working memory; inputs and outputs come before


@dataclass
class Call:
    """native(*args, scheduler), and how much memory it goes over."""

    native: Any
    args: tuple[Any, ...]
    bytes_touched: int


@dataclass
class Recording:
    """All calls of one kernel, in order, and the sizes of its working memory in bytes."""

    calls: list[Call] = field(default_factory=list)
    workspaces: list[int] = field(default_factory=list)

    def workspace(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """An array without memory that stands for working memory."""
        array = without_memory(FIRST_WORKSPACE + len(self.workspaces), shape, dtype)
        self.workspaces.append(array.nbytes)
        return array


_here = threading.local()


def current() -> Recording | None:
    """The recording that this thread makes, if it does."""
    return getattr(_here, "recording", None)


@contextlib.contextmanager
def record() -> Iterator[Recording]:
    """Whatever kernels launch on this thread is written down and not run."""
    around, found = current(), Recording()
    _here.recording = found
    try:
        yield found
    finally:
        _here.recording = around


class _Region:
    def __init__(self, number: int, shape: Sequence[int], size: int) -> None:
        data = (NOWHERE + number * REGION, False)
        self.__array_interface__ = {"shape": (*shape, size), "typestr": "|u1", "data": data, "version": 3}


def without_memory(number: int, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """An array of that shape and type in a region of addresses of its own. It must not be read or written."""
    size = int(np.prod(shape, dtype=object)) * dtype.itemsize
    return np.asarray(_Region(number, (), size)).view(dtype).reshape(shape)


def region_of(array: Array) -> tuple[int, int] | None:
    """(number, offset in bytes) of an array without memory; None for one that has it."""
    address = array.ctypes.data - NOWHERE
    return None if address < 0 else divmod(address, REGION)
