"""Watchdog: a small process that says which rank was killed, which neither that rank nor mpiexec does.

There is one on each machine. It waits for the ranks there to end, names the first that ends without having said why,
and ends when all of them have.
"""

import atexit
import os
import select
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

EXPECTED = b"1"  # the byte that a rank writes to its position in a file when its end needs no report


class Watchdog:
    """Starts the process for the ranks of a machine; where the system has no pidfd, it does nothing."""

    def __init__(self, machine: Any, rank: int) -> None:
        """`machine` is the communicator of the ranks on it, `rank` the number of this one."""
        self._position = machine.rank
        processes = machine.gather((rank, os.getpid()), root=0)
        path = ""
        if processes is not None and machine.size > 1 and hasattr(os, "pidfd_open"):
            descriptor, path = tempfile.mkstemp(prefix="onnxgrad-ranks-")
            os.write(descriptor, b"0" * machine.size)
            os.close(descriptor)
            ranks = [f"{number}:{process}" for number, process in processes]
            # In a session of its own mpiexec does not end it together with the ranks.
            command = [sys.executable, "-S", "-E", __file__, path, *ranks]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        self._path = machine.bcast(path, root=0)
        atexit.register(self.expect_end)  # which comes before MPI's own end, where all wait for each other

    def expect_end(self) -> None:
        """Tells the watchdog that this process ends normally, or has reported why it ends."""
        if self._path:
            with open(self._path, "r+b", buffering=0) as file:  # noqa: PTH123
                file.seek(self._position)
                file.write(EXPECTED)


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
    is_reported = False  # once one has said why it ends, the others follow
    while watched:
        for descriptor, _ in poll.poll():
            rank, process = watched.pop(descriptor)
            poll.unregister(descriptor)
            if not is_reported and EXPECTED not in Path(path).read_bytes():
                where = f"process {process} on {socket.gethostname()}"
                print(f"rank {rank} has died ({where}), and so all ranks end", file=sys.stderr, flush=True)
            is_reported = True
    Path(path).unlink(missing_ok=True)


if __name__ == "__main__":
    watch(sys.argv[1], sys.argv[2:])
