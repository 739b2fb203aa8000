"""The threads that CPU kernels run on.

A kernel is native code that splits its work into tasks and asks a scheduler, a plain function pointer, to call its
task loop from several threads at once; which thread takes which task never changes the result. The scheduler here
borrows Python threads, which leave the interpreter's lock alone while they are in native code. It is safe to use from
any number of threads and after a fork, which the pools that come with Numba are not.
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

SERIAL = 0  # in place of a scheduler's address: run every task on the calling thread
# Below this many bytes of arguments a call is over before a second thread has woken up (about 25 µs).
WORTH_SHARING = 1 << 18


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
        self.function, self.args = function, args
        self.result: Any = None
        self.error: BaseException | None = None
        self._claim = threading.Lock()
        self._done = threading.Lock()
        self._done.acquire()

    def claim(self) -> bool:
        """True for the first who asks."""
        return self._claim.acquire(blocking=False)

    def run(self) -> None:
        try:
            self.result = self.function(*self.args)
        except BaseException as error:  # handed to whoever waits
            self.error = error
        finally:
            self._done.release()

    def wait(self) -> None:
        self._done.acquire()


class _Pool:
    """Worker threads that take jobs off one queue, started when first needed."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._lock = threading.Lock()
        self._workers = 0
        self._waiting = 0  # jobs that no worker has finished yet

    def submit(self, job: _Job) -> bool:
        """Queues a job for a worker, a new one if all are busy and the limit allows it; False if there is none."""
        with self._lock:
            if self._waiting >= self._workers < _limit:
                worker = threading.Thread(target=self._work, name="onnxgrad", daemon=True)
                with contextlib.suppress(RuntimeError):  # the system has no thread to give: make do with fewer
                    worker.start()
                    self._workers += 1
            if self._workers == 0:
                return False
            self._waiting += 1
        self._jobs.put(job)
        return True

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

_TaskLoop = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Scheduler = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


def _schedule(task_loop: int, work: int, tasks: int) -> None:
    """Runs `task_loop(work)` on this thread and up to limit - 1 others, and returns when all have left it."""
    run = _TaskLoop(task_loop)
    helpers = [_Job(run, work) for _ in range(min(_limit, tasks) - 1)]
    for helper in helpers:
        _pool.submit(helper)
    run(work)
    for helper in helpers:
        if not helper.claim():  # it started: it still looks at `work`, which dies when we return
            helper.wait()


_callback = _Scheduler(_schedule)
_scheduler_address = ctypes.cast(_callback, ctypes.c_void_p).value or 0


def launch(native: Callable[..., Any], *args: Any, bytes_touched: int) -> Any:
    """Calls `native(*args, scheduler)`, with other threads to help if there is enough to do."""
    if _limit == 1 or bytes_touched < WORTH_SHARING:
        return native(*args, SERIAL)
    if threading.current_thread() is not threading.main_thread():
        return native(*args, _scheduler_address)
    # Python raises KeyboardInterrupt in the main thread at any line, in _schedule too, where it would cut the wait for
    # helpers short and leave them with a dead pointer. So the main thread only waits, and Ctrl-C works at once.
    job = _Job(native, *args, _scheduler_address)
    if not _pool.submit(job):
        return native(*args, SERIAL)
    job.wait()
    if job.error is not None:
        raise job.error
    return job.result
