"""Worker processes: they load batches from a source ahead of the step, in the order of the requests.

Each batch comes in a file without a name that is nowhere but in memory, and goes with the message. Workers are started
anew, not forked, and do not run the script that asks for them; they end with the connection, so also when this process
is killed.
"""

import builtins
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from onnxgrad.sources.source import Source
from onnxgrad.tensor_types import Array

AHEAD = 2  # batches that a worker is asked for at a time: one waits while it makes the next
ALIGNMENT = 64  # bytes
START = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from onnxgrad.sources.workers import work
work(int(sys.argv[2]))
"""
Task = tuple[Array, Sequence[int]]  # the arguments of Source.take


class Workers:
    """So many processes that take batches from a source."""

    def __init__(self, source: Source, count: int) -> None:
        try:
            pickled = pickle.dumps(source)
        except Exception as error:  # of any type, from whatever the source holds
            raise TypeError(
                f"Batches: a {type(source).__name__} cannot be sent to worker processes ({error}): leave out workers"
            ) from None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[socket.socket] = []
        self.end = weakref.finalize(self, _end, self._processes, self._connections)  # at exit, too
        for _ in range(count):
            self._start()
        for connection in self._connections:  # once all are starting
            _send(connection, pickled)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = [sys.executable, "-c", START, json.dumps(sys.path), str(theirs.fileno())]
            environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}  # the processes are parallel
            # In a group of their own: Ctrl-C is for this process, which ends them.
            process = subprocess.Popen(
                arguments, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, process_group=0
            )
        self._processes.append(process)
        self._connections.append(ours)

    def take(self, tasks: Iterable[Task]) -> Iterator[dict[str, Array]]:
        """The batches of all tasks, in their order. If it is left before its end, the workers end."""
        tasks, count, is_done = iter(tasks), len(self._processes), False
        waiting: deque[int] = deque()  # which worker is to answer
        asked = 0
        try:
            while True:
                while len(waiting) < count * AHEAD and (task := next(tasks, None)) is not None:
                    worker = asked % count
                    self._ask(worker, task)
                    waiting.append(worker)
                    asked += 1
                if not waiting:
                    break
                yield self._answer(waiting.popleft())
            is_done = True
        finally:
            if not is_done:  # they are at work still
                self.end()

    def _ask(self, worker: int, task: Task) -> None:
        try:
            _send(self._connections[worker], pickle.dumps(task))
        except OSError:
            raise self._lost(worker) from None

    def _answer(self, worker: int) -> dict[str, Array]:
        connection = self._connections[worker]
        try:
            answer = pickle.loads(_receive(connection))
            if isinstance(answer, Exception):
                raise answer
            _, (file, *_), _, _ = socket.recv_fds(connection, 1, 1)
        except (EOFError, ConnectionError):
            raise self._lost(worker) from None
        return _read(file, answer)

    def _lost(self, worker: int) -> RuntimeError:
        code = self._processes[worker].wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return RuntimeError(f"Batches: a worker process {how}: with fewer workers it takes less memory")


def _end(processes: list[subprocess.Popen[bytes]], connections: list[socket.socket]) -> None:
    """They have nothing to lose."""
    for connection in connections:
        connection.close()
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


# What a worker does.


def work(number: int) -> None:
    """Answers tasks on an inherited socket until it is closed."""
    connection = socket.socket(fileno=number)
    source: Any = None
    try:
        source = pickle.loads(_receive(connection))
    except (EOFError, ConnectionError):
        return
    except Exception as error:
        source = _unknown(error)
    while True:
        try:
            chosen, seed = pickle.loads(_receive(connection))
            _respond(connection, source, chosen, seed)
        except (EOFError, ConnectionError):
            return


def _respond(connection: socket.socket, source: Any, chosen: Array, seed: Sequence[int]) -> None:
    try:
        if isinstance(source, Exception):
            raise source
        file, described = _written(source.take(chosen, seed))
    except Exception as error:
        _send(connection, pickle.dumps(_plain(error)))
        return
    try:
        _send(connection, pickle.dumps(described))
        socket.send_fds(connection, [b"."], [file])
    finally:
        os.close(file)


def _unknown(error: Exception) -> Exception:
    return TypeError(
        f"Batches: the source cannot be made in a worker process ({error}): its class has to be in a module, not in "
        "the script itself"
    )


def _plain(error: Exception) -> Exception:
    """An error that every process can read, its text kept."""
    kind = type(error)
    if getattr(builtins, kind.__name__, None) is not kind:
        return RuntimeError(f"{kind.__name__}: {error}")
    if isinstance(error, OSError) and error.errno is not None:
        return type(error)(error.errno, error.strerror, error.filename)
    return type(error)(*map(str, error.args))


# The batch on its way: descriptions of the arrays, and a file that is nowhere on a disk.

Described = list[tuple[str, str, tuple[int, ...], int]]  # name, type, shape, place


def _written(batch: dict[str, Array]) -> tuple[int, Described]:
    described: Described = []
    size = 0
    arrays = {name: np.ascontiguousarray(a).reshape(np.shape(a)) for name, a in batch.items()}
    for name, array in arrays.items():
        described.append((name, array.dtype.str if array.dtype.kind != "V" else array.dtype.name, array.shape, size))
        size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    number = _shared_file()
    with open(number, "wb", closefd=False) as file:
        for (_, _, _, place), array in zip(described, arrays.values(), strict=True):
            file.seek(place)
            file.write(array.reshape(-1).view(np.uint8).data)
    return number, described


def _shared_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("batch")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _read(number: int, described: Described) -> dict[str, Array]:
    """The arrays, copied: mapped ones would take a file descriptor each for as long as they live."""
    found = {}
    with open(number, "rb") as file:
        for name, kind, shape, place in described:
            found[name] = np.empty(shape, kind)
            file.seek(place)
            file.readinto(found[name].reshape(-1).view(np.uint8).data)
    return found


def _send(connection: socket.socket, content: bytes) -> None:
    connection.sendall(len(content).to_bytes(8, "little") + content)


def _receive(connection: socket.socket) -> bytes:
    return _exactly(connection, int.from_bytes(_exactly(connection, 8), "little"))


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = connection.recv(min(size - len(found), 1 << 20))
        if not part:
            raise EOFError
        found += part
    return bytes(found)
