"""Watchdog: a small process that says which rank was killed, which neither that rank nor its launcher does.

There is one on each machine. It waits for the ranks there to end, names the first that ends without having said why,
ends the others if one has failed, and ends itself when all of them have.
"""

import atexit
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The byte that a rank writes to its position in a file: it ends normally, or it has said why it fails.
EXPECTED, FAILED = b"1", b"2"
GRACE_MS = 1000  # for launchers, such as mpiexec, which end the others themselves


class Watchdog:
    """Starts the process for the ranks of a machine; where the system has no pidfd, it does nothing."""

    def __init__(self, world: Any, on_machine: Sequence[int]) -> None:
        """`world` is the communicator, `on_machine` are the ranks on this machine."""
        self._position = on_machine.index(world.rank)
        processes = world.all_gather_objects(os.getpid())
        path = ""
        if self._position == 0 and len(on_machine) > 1 and hasattr(os, "pidfd_open"):
            descriptor, path = tempfile.mkstemp(prefix="onnxgrad-ranks-")
            os.write(descriptor, b"0" * len(on_machine))
            os.close(descriptor)
            ranks = [f"{rank}:{processes[rank]}" for rank in on_machine]
            # In a session of its own it is not ended together with the ranks, by mpiexec or torchrun.
            command = [sys.executable, "-S", "-E", __file__, path, *ranks]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        self._path = world.all_gather_objects(path)[on_machine[0]]
        atexit.register(self.expect_end)  # which comes before MPI's own end, where all wait for each other

    def expect_end(self) -> None:
        """Tells the watchdog that this process ends normally."""
        self._write(EXPECTED)

    def report_failure(self) -> None:
        """Tells the watchdog that this process has said why it fails: the others shall end, too."""
        self._write(FAILED)

    def _write(self, mark: bytes) -> None:
        if self._path:
            with open(self._path, "r+b", buffering=0) as file:  # noqa: PTH123
                file.seek(self._position)
                file.write(mark)


def watch(path: str, ranks: list[str]) -> None:
    """Waits until all have ended."""
    poll, watched = select.poll(), {}
    for text in ranks:
        rank, process = text.split(":")
        try:
            descriptor = os.pidfd_open(int(process))
        except OSError:  # it has ended already, or the system has no pidfd
            continue
        watched[descriptor] = (rank, process)
        poll.register(descriptor, select.POLLIN)
    is_first, has_failed = True, False
    while watched:
        ended = poll.poll(GRACE_MS if has_failed else None)
        if not ended:
            for descriptor in watched:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        for descriptor, _ in ended:
            rank, process = watched.pop(descriptor)
            poll.unregister(descriptor)
            marks = Path(path).read_bytes()
            has_failed |= FAILED in marks
            if is_first and FAILED not in marks and EXPECTED not in marks:
                where = f"process {process} on {socket.gethostname()}"
                print(f"rank {rank} has died ({where}), and so all ranks end", file=sys.stderr, flush=True)
                has_failed = True
            is_first = False  # the others follow
    Path(path).unlink(missing_ok=True)


if __name__ == "__main__":
    watch(sys.argv[1], sys.argv[2:])
