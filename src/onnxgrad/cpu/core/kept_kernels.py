"""KeptKernels: the compiled kernels that a machine keeps, a file each, which several processes may read and write."""

import contextlib
import functools
import hashlib
import pickle
import sys
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import config
from numba.core.caching import FunctionCache, _CacheLocator
from numba.core.registry import cpu_target
from numba.core.serialize import dumps

from onnxgrad.cpu.core.levels import shipped, source_stamp

DIGEST = hashlib.sha256().digest_size


class KeptKernels:
    """Those of one function.

    Not Numba's own files: it numbers them, and two processes that compile at a time may give one number to two
    kernels, of which a third process then loads the wrong one. Here the name of a file says all that is in it.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        module = function.__module__
        self._name = (module.rpartition(".")[2] + name.removeprefix(module)).replace("<", "").replace(">", "")
        self.folder = _folder_for(function)
        self._folders = _folders_before(self.folder, function)

    def read(self, signature: Any) -> Any:
        """What `write` was given for arguments of these types; None if that is not there or not of these sources."""
        content = self._content(signature)
        return None if content is None else pickle.loads(content)

    def has(self, signature: Any) -> bool:
        """Whether there is something to read."""
        return self._content(signature) is not None

    def write(self, signature: Any, parts: Any) -> None:
        """Keeps it for later processes; where that is not possible, they are told so and compile it again."""
        if self.folder is None:
            _warn("anywhere, neither beside the package nor in the user's cache folder")
            return
        content = dumps(parts)
        try:
            write_whole(self.folder / self._file(signature), _digest(content) + content)
        except OSError as error:
            _warn(f"in {str(self.folder)!r} ({error.strerror})")

    def _content(self, signature: Any) -> bytes | None:
        file = self._file(signature)
        for folder in self._folders:
            with contextlib.suppress(OSError):
                content = (folder / file).read_bytes()
                if content[:DIGEST] == _digest(content[DIGEST:]):
                    return content[DIGEST:]
        return None

    def _file(self, signature: Any) -> str:
        made_for = hashlib.sha256(repr((self._name, signature, *_machine())).encode()).hexdigest()[:16]
        return f"{self._name}.{made_for}.nbc"


def write_whole(path: Path, content: bytes) -> None:
    """Puts the file there when all of it is written: several processes may write it, and each may be interrupted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{uuid.uuid4().hex}")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _folder_for(function: Callable[..., Any]) -> Path | None:
    """__pycache__ or, where that is read-only, the user's cache folder."""
    try:
        return Path(FunctionCache(function).cache_path).absolute()  # the process may change its current folder
    except RuntimeError:
        return None


def _folders_before(own: Path | None, function: Callable[..., Any]) -> list[Path]:
    """The folders to read: this user's own, and those that would have come first if this user could write to them.

    Another one could, as root does who calls `onnxgrad warmup` when an image is made.
    """
    source = function.__code__.co_filename
    wanted = [Path(source).with_name("__pycache__")]
    chosen = getattr(config, "CACHE_DIR", None)  # NUMBA_CACHE_DIR
    if chosen:
        wanted.insert(0, Path(chosen, _CacheLocator.get_suitable_cache_subpath(source)).absolute())
    if own is None:
        return wanted
    return [own, *wanted[: wanted.index(own) if own in wanted else None]]


@functools.cache
def _warn(where: str) -> None:
    """Once for each place."""
    warnings.warn(
        f"compiled kernels cannot be kept {where}, so that later processes compile them again: "
        "NUMBA_CACHE_DIR may name a folder that can be written to and has room",
        RuntimeWarning,
        stacklevel=2,
    )


@functools.cache
def _machine() -> tuple[Any, ...]:
    """What else a kernel is made for."""
    target: Any = cpu_target.target_context
    return (sys.implementation.cache_tag, sys.abiflags, numba.__version__, target.codegen().magic_tuple())


@functools.cache
def _stamp() -> bytes:
    """A kernel that is compiled here agrees with those that are shipped, and is stale once sources have changed."""
    there = shipped()
    return source_stamp() + (there[0].name.encode() if there else b"")


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(_stamp() + content).digest()
