"""Compiler: a process of its own that compiles kernels, for later processes to find or for an archive.

Threads would not do: Numba compiles one function at a time. Nor would multiprocessing, which runs the user's script
again in every process; this needs no `if __name__ == "__main__"` there.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

READY = "ready"


class Wanted(NamedTuple):
    """A kernel to compile: its name, the types of its arguments, and instructions that a processor may be without."""

    name: str
    types: Any
    needs: frozenset[str] = frozenset()

    @property
    def module(self) -> str:
        return self.name.split("-")[0].rpartition(".")[0].removeprefix("onnxgrad.")


class Compiler:
    """The process, as the one sees it that has started it. It ends when that one does, after the kernel at hand."""

    def __init__(
        self,
        environment: Mapping[str, str] = {},
        into: Path | None = None,
        c_functions: bool = False,
        log: int | None = subprocess.DEVNULL,
    ) -> None:
        """`environment` has variables besides those of this process; `into` is a folder for an archive's kernels.

        With `c_functions` it compiles all of these to begin with. `log` is where it writes what it has to say.
        """
        answers, theirs = os.pipe()  # not what it prints, where a sitecustomize.py may have something to say, too
        code = f"from {__name__} import serve; serve({theirs})"
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)  # noqa: PTH100, "" is the current folder
        self._answers = os.fdopen(answers, "rb")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                env={**os.environ, "PYTHONPATH": paths, **environment},
                stdin=subprocess.PIPE,
                stdout=2 if log is None else log,
                stderr=log,
                pass_fds=[theirs],
                process_group=0,  # Ctrl-C is for the one that has started it
            )
        finally:
            os.close(theirs)
        assert self._process.stdin is not None
        self._requests = self._process.stdin
        self._begin_with = into, c_functions

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        self._answers.close()
        self._process.wait()

    def wait_until_ready(self) -> None:
        """Until it has imported what it needs; raises ChildProcessError if it could not."""
        self._send(self._begin_with)
        self._answer()

    def compile(self, kernels: Sequence[Wanted]) -> None:
        """Compiles them; raises RuntimeError with what went wrong, and ChildProcessError if the process has ended."""
        self._send(list(kernels))
        answer = self._answer()
        if answer != READY:
            raise RuntimeError(answer)

    def kill(self) -> None:
        """Ends it at once, also with a kernel at hand."""
        self._process.kill()

    def _send(self, message: Any) -> None:
        try:
            self._requests.write(pickle.dumps(message))
            self._requests.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _answer(self) -> Any:
        try:
            return pickle.load(self._answers)
        except EOFError:
            raise self._ended() from None

    def _ended(self) -> ChildProcessError:
        status = self._process.wait()
        why = f"with exit status {status}"
        if status < 0:
            why = f"by signal {-status}" + ", as where memory is short" * (status == -signal.SIGKILL)
        return ChildProcessError(f"a process that compiles kernels was ended {why}")


def can_start() -> bool:
    """Whether there is a Python to start: an application that has one inside may be no Python itself."""
    return Path(sys.executable or "").name.startswith("python") and not getattr(sys, "frozen", False)


def serve(file: int) -> None:
    """What the process runs: compiles what it is sent, until nothing comes any more, and answers in an open file."""
    requests, answers = sys.stdin.buffer, FileIO(file, "wb")
    into, c_functions = pickle.load(requests)
    from onnxgrad.cpu.core import kernel_cache
    from onnxgrad.cpu.core.warmup import import_kernels, load_kernels

    if into is not None:
        kernel_cache.build_into(into)
    (load_kernels if c_functions else import_kernels)()
    _say(answers, READY)
    while (kernels := _next(requests)) is not None:
        try:
            _compile(kernels)
        except Exception:  # is raised by the one that asked
            _say(answers, traceback.format_exc())
        else:
            _say(answers, READY)


def _next(requests: BinaryIO) -> list[Wanted] | None:
    try:
        found: list[Wanted] = pickle.load(requests)
    except EOFError:
        return None
    return found


def _say(answers: FileIO, message: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the process that asked has been killed; no more requests come
        answers.write(pickle.dumps(message))


def _compile(kernels: Sequence[Wanted]) -> None:
    from onnxgrad.cpu.core.jit import KERNELS

    for kernel in kernels:
        KERNELS[kernel.name].compile(kernel.types)
