"""How kernels are compiled: to native code without Python's lock, once per machine, kept on disk."""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba


@functools.cache
def _source_stamp() -> bytes:
    """A hash of every kernel file.

    Numba forgets a cached function when its own file changes. Kernels here are built from functions of other files,
    so one changed file makes all of them stale.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


def native(function: Callable[..., Any], **options: Any) -> Any:
    """Compiles on first use and keeps the result in __pycache__ or, where that is read-only, the user's cache folder.

    The arithmetic is the machine's: a division by zero gives inf, a multiplication and an addition may fuse.
    """
    compiled = numba.njit(nogil=True, error_model="numpy", fastmath={"contract"}, **options)(function)
    try:
        compiled.enable_caching()
    except RuntimeError:  # no folder can be written: compile in every process
        return compiled
    compiled._cache._cache_file._source_stamp = _source_stamp()
    return compiled


def inlined(function: Callable[..., Any]) -> Any:
    """Like `native`, for small functions inside loops: a real call would count references to every array it is given."""
    return native(function, forceinline=True)
