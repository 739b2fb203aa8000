"""Compiler: a process of its own that compiles kernels, for later processes to find or for an archive.

Threads would not do: Numba compiles one function at a time. Nor would multiprocessing, which runs the user's script
again in every process; this needs no `if __name__ == "__main__"` there.
"""

import contextlib
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
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
        code = f"from {__name__} import serve; serve()"
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)  # noqa: PTH100, "" is the current folder
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            env={**os.environ, "PYTHONPATH": paths, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            process_group=0,  # Ctrl-C is for the one that has started it
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._send((into, c_functions))

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        self._answers.close()
        self._process.wait()

    def wait_until_ready(self) -> None:
        """Until it has imported what it needs; raises EOFError if it could not."""
        self._answer()

    def compile(self, kernels: Sequence[Wanted]) -> None:
        """Compiles them; raises RuntimeError with what went wrong, and EOFError if the process has ended."""
        self._send(list(kernels))
        answer = self._answer()
        if answer != READY:
            raise RuntimeError(answer)

    def _send(self, message: Any) -> None:
        try:
            self._requests.write(pickle.dumps(message))
            self._requests.flush()
        except BrokenPipeError:
            raise EOFError("a process that compiles kernels has ended") from None

    def _answer(self) -> Any:
        return pickle.load(self._answers)


def can_start() -> bool:
    """Whether there is a Python to start: an application that has one inside may be no Python itself."""
    return Path(sys.executable or "").name.startswith("python") and not getattr(sys, "frozen", False)


def serve() -> None:
    """What the process runs: compiles what it is sent, until nothing comes any more."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what others print is no answer
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


def _say(answers: BinaryIO, message: str) -> None:
    answers.write(pickle.dumps(message))
    answers.flush()


def _compile(kernels: Sequence[Wanted]) -> None:
    from onnxgrad.cpu.core.jit import KERNELS

    for kernel in kernels:
        KERNELS[kernel.name].compile(kernel.types)
