"""Where results live: small ones in NumPy's memory, large ones in pages of our own that are used again.

Memory fresh from the system costs more than most gradients do: each page is cleared and mapped when first touched
(94 MB: 9 ms on two cores, against 2 ms to write it). So the pages of a large result that nobody holds any more wait for
the next one of about that size. While they wait the system may take them back whenever it is short (MADV_FREE).
"""

import contextlib
import ctypes
import gc
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxgrad.cpu.core.recording import current
from onnxgrad.tensor_types import Array

# What a kernel may assume of the memory it writes to:
GIVEN = 0  # it is the caller's: nothing may be written before everything is checked
FRESH = 1  # it is new, and dropped if the kernel raises
ZEROS = 2  # it is new and all zeros, which need not be written, so that untouched pages are never made

LARGE = 1 << 25  # bytes; below, the C library keeps and reuses memory itself
HUGE_PAGE = 1 << 21
_PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**63
WAITING_LIMIT = _PHYSICAL // 8  # bytes of pages kept for later, all together


class _Pages:
    """Freed pages by size, the most recently used last.

    There is no lock: a result may be freed by the garbage collector at any line, also within these, and a fork may
    leave a lock locked for ever. Each step is one atomic operation of a list.
    """

    def __init__(self) -> None:
        self._waiting: list[mmap.mmap] = []

    def take(self, size: int) -> tuple[mmap.mmap, bool]:
        """Pages for `size` bytes, and whether they are new, that is, zeros."""
        pages = self._take_waiting(size)
        if pages is not None:
            return pages, False
        try:
            pages = _new_pages(size)
        except OSError:  # `ulimit -v` counts those that wait, too
            self._waiting.clear()
            pages = _new_pages(size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
        return pages, True

    def _take_waiting(self, size: int) -> mmap.mmap | None:
        for pages in reversed(list(self._waiting)):
            if size <= len(pages) <= size + size // 8:
                with contextlib.suppress(ValueError):  # another thread was quicker
                    self._waiting.remove(pages)
                    return pages
        return None

    def give_back(self, pages: mmap.mmap) -> None:
        if hasattr(mmap, "MADV_FREE"):
            with contextlib.suppress(OSError):
                pages.madvise(mmap.MADV_FREE)
        self._waiting.append(pages)
        while sum(map(len, list(self._waiting))) > WAITING_LIMIT:
            with contextlib.suppress(IndexError):
                self._waiting.pop(0)


def _new_pages(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(-1, size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


_pages = _Pages()


def workspace(shape: Sequence[int], dtype: Any) -> Array:
    """Memory for the time of a kernel, with anything in it."""
    recording = current()
    if recording is not None:
        return recording.workspace(shape, np.dtype(dtype))
    return allocate(shape, np.dtype(dtype))[0]


def allocate(shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[Array, int]:
    """A new array and what is known of it, FRESH or ZEROS.

    One larger than the machine is refused with a sentence, before the system would kill the process for it.
    """
    size = math.prod(shape) * dtype.itemsize
    try:
        if size > _PHYSICAL:
            raise MemoryError
        if size < LARGE:
            return np.empty(shape, dtype), FRESH
        pages, new = _pages.take(-(-size // HUGE_PAGE) * HUGE_PAGE)
    except (MemoryError, OSError):
        raise MemoryError(
            f"the result of shape {list(shape)} needs {size / 2**30:.1f} GiB, more than there is"
        ) from None
    # Every view of the array keeps this object alive; when it goes, the pages are free.
    owner: Any = (ctypes.c_char * size).from_buffer(pages)
    weakref.finalize(owner, _pages.give_back, pages).atexit = False
    return np.frombuffer(owner, np.uint8).view(dtype).reshape(shape), ZEROS if new else FRESH


def give_back() -> None:
    """Hands memory that nobody uses any more to the system: graphs, whose parts hold each other, and the C heap."""
    gc.collect()
    if hasattr(library := ctypes.CDLL(None), "malloc_trim"):  # glibc
        library.malloc_trim(0)
