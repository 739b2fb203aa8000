"""compiling_ahead(): while this process compiles a kernel, others compile those that it will need next."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from onnxgrad.cpu.core.compilers import Compiler, Wanted, can_start
from onnxgrad.cpu.core.recording import Recording

WORTH_A_PROCESS = 2  # kernels: to import what it needs takes a process a second

_here = threading.local()  # two threads may make the first steps of two trainers


class Ahead:
    """Kernels that nobody has begun with, of which processes take the last and this one what it needs."""

    def __init__(self, find: Callable[[], list[Wanted]], processes: int) -> None:
        """`find` is called when the first kernel has to be compiled: most of the time there is none."""
        self._find, self._processes = find, processes
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, str], Wanted] | None = None
        self._begun: dict[tuple[str, str], threading.Event] = {}

    def has_compiled(self, name: str, types: Any) -> bool:
        """Asked before this process compiles a kernel: whether another has; if it is at it, this one waits."""
        key = (name, repr(types))
        if self._waiting is None:
            self._begin(key)
        with self._lock:
            assert self._waiting is not None
            self._waiting.pop(key, None)
            done = self._begun.get(key)
        if done is None:
            return False
        done.wait()
        return True

    def end(self) -> None:
        """Processes finish what they are at, and nobody waits for it."""
        with self._lock:
            self._waiting, self._begun = {}, {}

    def _begin(self, first: tuple[str, str]) -> None:
        """Starts the processes, but not for the first kernel, which this one is about to compile."""
        self._waiting = {}  # finding them may compile something, too
        missing = {(w.name, repr(w.types)): w for w in self._find() if _is_missing(w)}
        missing.pop(first, None)
        with self._lock:
            self._waiting = missing
        for _ in range(min(self._processes, len(missing) // WORTH_A_PROCESS)):
            with contextlib.suppress(RuntimeError):  # the system has no thread to give, or the interpreter is ending
                threading.Thread(target=self._work, name="onnxgrad compiling", daemon=True).start()

    def _work(self) -> None:
        """Has a process compile one kernel after another. What it fails at, this process will try, and tell."""
        with contextlib.suppress(OSError), Compiler() as process:
            process.wait_until_ready()
            while (taken := self._take()) is not None:
                kernel, done = taken
                try:
                    with contextlib.suppress(RuntimeError):
                        process.compile([kernel])
                finally:
                    done.set()

    def _take(self) -> tuple[Wanted, threading.Event] | None:
        with self._lock:
            if not self._waiting:
                return None
            key, kernel = self._waiting.popitem()
            done = self._begun[key] = threading.Event()
            return kernel, done


@contextlib.contextmanager
def compiling_ahead(find: Callable[[], list[Wanted]], processes: int) -> Iterator[None]:
    """Meanwhile kernels that have to be compiled are shared with so many processes, if there are enough of them."""
    if processes < 1 or not can_start():
        yield
        return
    around, here = current(), Ahead(find, processes)
    _here.ahead = here
    try:
        yield
    finally:
        _here.ahead = around
        here.end()


def current() -> Ahead | None:
    """What this thread shares with processes, if it does."""
    return getattr(_here, "ahead", None)


def has_compiled(name: str, types: Any) -> bool:
    """Whether another process has compiled a kernel that this one needs; it then is among those kept."""
    here = current()
    return here is not None and here.has_compiled(name, types)


def give_up() -> None:
    """What another process has compiled is not there: it could not be kept, and the next ones cannot be either."""
    here = current()
    if here is not None:
        here.end()


def launched(recording: Recording, needs: frozenset[str] = frozenset()) -> Iterator[Wanted]:
    """The kernels that a call would have launched."""
    import numba

    from onnxgrad.cpu.core.jit import KERNELS

    names = {id(kernel): name for name, kernel in KERNELS.items()}
    for call in recording.calls:
        yield Wanted(names[id(call.native)], (*map(numba.typeof, call.args), numba.int64), needs)


def _is_missing(kernel: Wanted) -> bool:
    """Whether it has to be compiled and another process can hand it over."""
    from onnxgrad.cpu.core.jit import KERNELS

    compiled = KERNELS[kernel.name]
    cache = compiled._cache
    return kernel.types not in compiled.overloads and cache.keeps and not cache.has(kernel.types)
