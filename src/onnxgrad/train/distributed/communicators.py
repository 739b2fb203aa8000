"""Communicators: how ranks exchange objects and arrays, by MPI or by torch.distributed."""

import contextlib
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np

from onnxgrad.tensor_types import Array
from onnxgrad.train.interruption import SIGNALS

R = TypeVar("R")
ERROR = 1  # exit code of a rank that failed
PATIENCE = 3.0  # seconds for a rank that failed, or the watchdog, to say why


class Communicator(ABC):
    """The processes that train together; collectives are called by all of them, in the same order.

    Arrays are NumPy's; where the communicator `reads_gpu`, those of reduce_scatter, all_gather and broadcast may be
    torch's, on a GPU. Shards are the equal parts of an array, one for each rank.
    """

    rank: int
    size: int
    reads_gpu: bool

    @abstractmethod
    def has_processes_of(self, given: Any) -> bool:
        """Whether a communicator that a user gave has the same processes, in the same order."""

    @abstractmethod
    def is_closed(self) -> bool:
        """Whether nothing can be sent any more."""

    def close(self) -> None:  # noqa: B027, some need nothing
        """When Python ends: leaves nothing at work."""

    def local_rank(self) -> int | None:
        """The number of this rank among those on its machine, if its launcher told."""
        return None

    @abstractmethod
    def abort(self) -> None:
        """Ends all processes at once."""

    @abstractmethod
    def all_gather_objects(self, value: R) -> list[R]:
        """The values of all ranks, in their order."""

    @abstractmethod
    def broadcast_object(self, value: R, root: int) -> R:
        """The value of one rank."""

    @abstractmethod
    def all_reduce(self, array: Array) -> None:
        """Replaces the array by its sum over all ranks."""

    @abstractmethod
    def reduce_scatter(self, array: Any, shard: Any) -> None:
        """Sums the array over all ranks; each rank gets its shard of the sum."""

    @abstractmethod
    def all_gather(self, shard: Any, array: Any) -> None:
        """Fills the array with the shards of all ranks; `shard` may be a view of its place in it."""

    @abstractmethod
    def broadcast(self, array: Any) -> None:
        """Overwrites the array with that of rank 0."""

    @abstractmethod
    def gather(self, shard: Array, array: Array | None) -> None:
        """Fills the array of rank 0 with the shards of all ranks."""

    @abstractmethod
    def scatter(self, array: Array | None, shard: Array) -> None:
        """Gives each rank its shard of the array of rank 0."""


class MpiCommunicator(Communicator):
    """A communicator of mpi4py, duplicated so that messages of the caller's own are kept apart."""

    reads_gpu = False

    def __init__(self, given: Any) -> None:
        from mpi4py import MPI

        self._mpi, self._world = MPI, given.Dup()
        self.rank, self.size = self._world.rank, self._world.size

    def has_processes_of(self, given: Any) -> bool:
        alike = (self._mpi.IDENT, self._mpi.CONGRUENT)
        return isinstance(given, self._mpi.Intracomm) and self._mpi.Comm.Compare(given, self._world) in alike

    def is_closed(self) -> bool:
        return bool(self._mpi.Is_finalized())

    def abort(self) -> None:
        self._world.Abort(ERROR)

    def all_gather_objects(self, value: R) -> list[R]:
        return list(self._world.allgather(value))

    def broadcast_object(self, value: R, root: int) -> R:
        return self._world.bcast(value, root=root)  # type: ignore[no-any-return]

    def all_reduce(self, array: Array) -> None:
        self._world.Allreduce(self._mpi.IN_PLACE, array)

    def reduce_scatter(self, array: Array, shard: Array) -> None:
        self._world.Reduce_scatter_block(array, shard)

    def all_gather(self, shard: Array, array: Array) -> None:
        inside = np.may_share_memory(shard, array)
        self._world.Allgather(self._mpi.IN_PLACE if inside else shard, array)

    def broadcast(self, array: Array) -> None:
        self._world.Bcast(array, root=0)

    def gather(self, shard: Array, array: Array | None) -> None:
        self._world.Gather(shard, array, root=0)

    def scatter(self, array: Array | None, shard: Array) -> None:
        self._world.Scatter(array, shard, root=0)


class TorchCommunicator(Communicator):
    """A process group of torch.distributed: arrays on GPUs go by its NCCL, if it has that, and all else by gloo.

    For gloo there is a group of our own, which also keeps messages of the caller's own apart.
    """

    def __init__(self, given: Any) -> None:
        import torch
        from torch import distributed

        self._torch, self._distributed, self._given = torch, distributed, given
        self.rank, self.size = given.rank(), given.size()
        self.reads_gpu = "cuda:nccl" in str(distributed.get_backend_config(given))
        # torch 2.13 has new names for these two, and warns of the old ones.
        self._all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        self._reduce_scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
        ranks = distributed.get_process_group_ranks(given)
        with self._or_end():
            self._host = distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)

    def has_processes_of(self, given: Any) -> bool:
        return given is self._given

    def is_closed(self) -> bool:
        try:
            self._distributed.get_process_group_ranks(self._host)
        except KeyError:  # destroy_process_group() was called
            return True
        return False

    def close(self) -> None:
        # gloo's threads let go of the arrays they sent, for which they need Python: a thread that comes too late aborts
        # the process. The end of the group waits for them.
        self._distributed.destroy_process_group(self._host)
        del self._host

    def local_rank(self) -> int | None:
        return int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else None

    def abort(self) -> None:
        os._exit(ERROR)  # which closes its connections, and so ends the others

    def all_gather_objects(self, value: R) -> list[R]:
        values: list[Any] = [None] * self.size
        with self._or_end():
            self._distributed.all_gather_object(values, value, group=self._host)
        return values

    def broadcast_object(self, value: R, root: int) -> R:
        values = [value]
        with self._or_end():
            self._distributed.broadcast_object_list(values, group=self._host, group_src=root)
        return values[0]

    def all_reduce(self, array: Array) -> None:
        with self._or_end():
            self._distributed.all_reduce(self._torch.from_numpy(array), group=self._host)

    def reduce_scatter(self, array: Any, shard: Any) -> None:
        group, tensor = self._group_and_tensor(array)
        with self._or_end():
            self._reduce_scatter(self._group_and_tensor(shard)[1], tensor, group=group)

    def all_gather(self, shard: Any, array: Any) -> None:
        group, tensor = self._group_and_tensor(array)
        with self._or_end():
            self._all_gather(tensor, self._group_and_tensor(shard)[1], group=group)

    def broadcast(self, array: Any) -> None:
        group, tensor = self._group_and_tensor(array, as_bytes=True)
        with self._or_end():
            self._distributed.broadcast(tensor, group=group, group_src=0)

    def gather(self, shard: Array, array: Array | None) -> None:
        rows = None if array is None else list(self._torch.from_numpy(array.reshape(self.size, -1)))
        with self._or_end():
            self._distributed.gather(self._torch.from_numpy(shard), rows, group=self._host, group_dst=0)

    def scatter(self, array: Array | None, shard: Array) -> None:
        rows = None if array is None else list(self._torch.from_numpy(array.reshape(self.size, -1)))
        with self._or_end():
            self._distributed.scatter(self._torch.from_numpy(shard), rows, group=self._host, group_src=0)

    def _group_and_tensor(self, array: Any, as_bytes: bool = False) -> tuple[Any, Any]:
        """The group that an array goes by, and the array as a vector of torch's; bytes are of every type."""
        if not isinstance(array, np.ndarray):
            return self._given, array
        flat = array.reshape(-1)
        return self._host, self._torch.from_numpy(flat.view(np.uint8) if as_bytes else flat)

    @contextlib.contextmanager
    def _or_end(self) -> Iterator[None]:
        """Around a collective: if another rank is gone, this one ends, too.

        The other one has said why, or its watchdog has. That of this machine ends this process (watchdog.py), if the
        other one was on it; else a sentence says here what happened there.
        """
        try:
            yield
        except RuntimeError as error:
            if threading.current_thread() is threading.main_thread():
                for name in SIGNALS:  # from now on they end it
                    signal.signal(getattr(signal, name), signal.SIG_DFL)
            time.sleep(PATIENCE)
            told = str(error).splitlines()[0]
            print(f"rank {self.rank} ends, because another rank has ended: {told}", file=sys.stderr, flush=True)
            os._exit(ERROR)


def communicator_of(given: Any) -> Communicator:
    """The communicator that a user gave to a trainer."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and hasattr(distributed, "ProcessGroup") and isinstance(given, distributed.ProcessGroup):
        return TorchCommunicator(given)
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ImportError(
            "Trainer: a communicator is a process group of torch.distributed, or needs mpi4py: pip install "
            f"'onnxgrad[mpi]' ({error})"
        ) from None
    if not isinstance(given, MPI.Intracomm):
        raise TypeError(
            f"Trainer: communicator is a {type(given).__name__}, expected one of mpi4py, such as MPI.COMM_WORLD, or a "
            "process group of torch.distributed"
        )
    return MpiCommunicator(given)
