"""A rank that is killed cannot say so, and mpiexec ends the others at once: a small process of its own says it.

There is one on each machine. It waits for the ranks there to end, tells of the first that ends without having said why,
and goes when all have gone.
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

TOLD = b"1"  # what a rank writes in its place of a file when its end needs no telling


class Watch:
    """Has the ranks of a machine looked after; where the system has no means to, it does nothing."""

    def __init__(self, machine: Any, rank: int) -> None:
        """`machine` is the communicator of the ranks on it, `rank` what this one is called."""
        self._place = machine.rank
        processes = machine.gather((rank, os.getpid()), root=0)
        path = ""
        if processes is not None and machine.size > 1 and hasattr(os, "pidfd_open"):
            descriptor, path = tempfile.mkstemp(prefix="onnxgrad-ranks-")
            os.write(descriptor, b"0" * machine.size)
            os.close(descriptor)
            told = [f"{number}:{process}" for number, process in processes]
            # In a session of its own mpiexec does not end it together with the ranks.
            command = [sys.executable, "-S", "-E", __file__, path, *told]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        self._path = machine.bcast(path, root=0)
        atexit.register(self.say_nothing)  # which comes before MPI's own end, where all wait for each other

    def say_nothing(self) -> None:
        """This process ends as it should, or has told why it ends."""
        if self._path:
            with open(self._path, "r+b", buffering=0) as file:  # noqa: PTH123
                file.seek(self._place)
                file.write(TOLD)


def look_after(path: str, ranks: list[str]) -> None:
    """Waits until all have ended."""
    poll, watched = select.poll(), {}
    for told in ranks:
        rank, process = told.split(":")
        try:
            descriptor = os.pidfd_open(int(process))
        except OSError:  # it has ended already, or the system does not know how
            continue
        watched[descriptor] = (rank, process)
        poll.register(descriptor, select.POLLIN)
    is_told = False  # once one has said why it ends, the others follow
    while watched:
        for descriptor, _ in poll.poll():
            rank, process = watched.pop(descriptor)
            poll.unregister(descriptor)
            if not is_told and TOLD not in Path(path).read_bytes():
                where = f"process {process} on {socket.gethostname()}"
                print(f"rank {rank} has died ({where}), and so all ranks end", file=sys.stderr, flush=True)
            is_told = True
    Path(path).unlink(missing_ok=True)


if __name__ == "__main__":
    look_after(sys.argv[1], sys.argv[2:])
