"""The threads that CPU kernels run on.

A kernel is native code that splits its work into tasks; which thread takes which task never changes the result. Here
Python threads are lent to it for the time of a call, which leave the interpreter's lock alone while they help. It is
safe to call kernels from any number of threads and after a fork, which the pools that come with Numba do not allow.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from onnxgrad.cpu.core.recording import Call, current

NOTHING_WRONG = -1  # what a kernel that looks for bad values returns if there are none
SERIAL = 0  # in place of a scheduler's address: run every task on the calling thread
# Below this many bytes of arguments a call is over before a second thread has woken up, which takes up to 100 µs.
WORTH_SHARING = 1 << 18
SHARE = 1 << 16  # bytes of arguments that are worth one more thread


def _available() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_limit = _available()


def set_num_threads(count: int) -> None:
    """Lets CPU kernels use up to `count` threads; results do not depend on it, bit for bit."""
    global _limit
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"set_num_threads: count is {count!r}, expected an int")
    if count < 1:
        raise ValueError(f"set_num_threads: count is {count}, expected at least 1")
    _limit = count


def get_num_threads() -> int:
    """How many threads CPU kernels may use: every core this process is allowed, unless set_num_threads was called."""
    return _limit


class _Job:
    """Something to call once, by a worker or, if none was free in time, by nobody."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._function, self._args = function, args
        self._claim = threading.Lock()

    def claim(self) -> bool:
        """True for the first who asks."""
        return self._claim.acquire(blocking=False)

    def run(self) -> None:
        self._function(*self._args)


class _Pool:
    """Worker threads that take jobs off one queue, started when first needed."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._lock = threading.Lock()
        self._workers = 0
        self._waiting = 0  # jobs that no worker has finished yet

    def submit(self, job: _Job) -> None:
        """Queues a job for a worker, a new one if all are busy and the limit allows it."""
        with self._lock:
            if self._waiting >= self._workers < _limit:
                worker = threading.Thread(target=self._work, name="onnxgrad", daemon=True)
                with contextlib.suppress(RuntimeError):  # the system has no thread to give: make do with fewer
                    worker.start()
                    self._workers += 1
            if self._workers == 0:
                return
            self._waiting += 1
        self._jobs.put(job)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job.claim():
                job.run()
            del job  # a worker that waits must not keep the arrays of its last job alive
            with self._lock:
                self._waiting -= 1


_pool = _Pool()


def _forget_workers() -> None:
    """A forked child has the queue but not the threads."""
    global _pool
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_workers)


def launch(native: Callable[..., Any], *args: Any, bytes_touched: int) -> Any:
    """Calls `native(*args, scheduler)`, with other threads to help if there is enough to do."""
    recording = current()
    if recording is not None:
        recording.calls.append(Call(native, args, bytes_touched))
        return NOTHING_WRONG
    if _limit == 1 or bytes_touched < WORTH_SHARING:
        return native(*args, SERIAL)
    from onnxgrad.cpu.core.task_board import CLOSED, help_kernel, new_board  # here, since it loads Numba

    board = new_board()
    helpers = [_Job(help_kernel, board) for _ in range(min(_limit - 1, max(1, bytes_touched // SHARE)))]
    try:
        for helper in helpers:
            _pool.submit(helper)
        return native(*args, board.ctypes.data)
    finally:
        board[CLOSED] = 1
        for helper in helpers:
            helper.claim()  # who has not begun need not
