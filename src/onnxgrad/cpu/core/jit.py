"""How kernels are compiled: to native code without Python's lock, once per machine, kept on disk."""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core.ccallback import CFunc
from numba.extending import intrinsic


@functools.cache
def _source_stamp() -> bytes:
    """A hash of every kernel file.

    Numba forgets a cached function when its own file changes. Kernels here are built from functions of other files,
    so one changed file makes all of them stale.
    """
    digest = hashlib.sha256()
    package = Path(__file__).parents[2]
    patterns = ("cpu/**/*.py", "runtime/**/*.py", "ops/**/*.py")  # numbers of ops/ are compiled in, too
    for path in sorted({path for pattern in patterns for path in package.glob(pattern)}):
        digest.update(path.read_bytes())
    return digest.digest()


int64: Any = np.int64  # a machine number: to the type checker, in native code, anything goes

# The arithmetic is the machine's: a division by zero gives inf, a multiplication and an addition may fuse.
OPTIONS: dict[str, Any] = {"error_model": "numpy", "fastmath": {"contract"}}


def _keep_on_disk(compiled: Any) -> Any:
    """Caches in __pycache__ or, where that is read-only, in the user's cache folder."""
    try:
        compiled.enable_caching()
    except RuntimeError:  # no folder can be written: compile in every process
        return compiled
    compiled._cache._cache_file._source_stamp = _source_stamp()
    return compiled


def native(function: Callable[..., Any], **options: Any) -> Any:
    """A function for other native code and for Python, compiled when first called."""
    return _keep_on_disk(numba.njit(nogil=True, **{**OPTIONS, **options})(function))


def inlined(function: Callable[..., Any]) -> Any:
    """Like `native`, for small functions inside loops: a real call counts references to every array it is given."""
    return native(function, forceinline=True)


def machine_code(function: Callable[..., Any]) -> Any:
    """A function that writes the LLVM code of its call itself; arguments known when compiling come as literals."""
    return intrinsic(prefer_literal=True)(function)


def c_function(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """A function with an address, that is called rather than merged into its callers; compiled at once."""

    def build(function: Callable[..., Any]) -> Any:
        compiled = CFunc(function, (signature.args, signature.return_type), locals={}, options=OPTIONS)
        _keep_on_disk(compiled).compile()
        return compiled

    return build
