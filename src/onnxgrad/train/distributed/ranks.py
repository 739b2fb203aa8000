"""Ranks: the processes of a communicator that train together, how they communicate, and how they end together.

All messages go through the communicator that the trainer was given, of mpi4py or of torch.distributed. Numbers that
decide something are gathered from all ranks and summed in their order by each of them, so that every rank decides the
same.
"""

import atexit
import contextlib
import os
import pickle
import re
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from onnxgrad.cpu.core import groups
from onnxgrad.cpu.core.threads import get_num_threads, set_num_threads
from onnxgrad.tensor_types import Array
from onnxgrad.train.distributed.communicators import communicator_of
from onnxgrad.train.distributed.watchdog import Watchdog
from onnxgrad.train.interruption import SIGNALS, Interruption

R = TypeVar("R")
FINE, FAILED, ENDED = range(3)  # what a rank says of itself whenever all ranks meet
ROOM = 7  # numbers of a rank that are gathered together with its state


class RankError(RuntimeError):
    """Some rank failed; all ranks raise this error, at the same point."""


def on_every_rank(error: BaseException) -> BaseException:
    """Marks an error that all ranks raise at the same point, so that no rank is left waiting for another."""
    error.raised_on_every_rank = True  # type: ignore[attr-defined]
    return error


class SingleProcess:
    """One process: it has nothing to communicate."""

    rank, size, is_first = 0, 1, True

    def __init__(self) -> None:
        self._interruption: Interruption | None = None

    def listen_to(self, interruption: Interruption | None) -> None:
        """From now on `stop` reports the signals that `interruption` receives."""
        self._interruption = interruption

    @property
    def stop(self) -> str | None:
        """The name of a signal that some rank has received and all ranks know of."""
        return None if self._interruption is None else self._interruption.received

    def agree_to_stop(self) -> str | None:
        """Brings `stop` up to date."""
        return self.stop

    def sum_losses(self, loss: float, error: Exception | None = None) -> float:
        """The sum over all ranks; an error of one rank is raised by all. Also brings `stop` up to date."""
        if error is not None:
            raise error
        return loss

    def each(self, iterable: Iterable[R]) -> Iterator[R]:
        """Iterates in step: all ranks are at the same item, or all are at the end."""
        return iter(iterable)

    def on_first(self, work: Callable[[], R]) -> R:
        """Does `work` on rank 0; every rank returns its result, or raises its error."""
        return work()

    def all_gather(self, value: R, error: Exception | None = None) -> list[R]:
        """The values of all ranks, in their order; an error of one rank is raised by all."""
        if error is not None:
            raise error
        return [value]

    def meet(self) -> None:
        """Waits for all ranks; if one has ended, all others raise an error. What ranks do together begins with it."""

    def broadcast(self, array: Array) -> None:
        """Overwrites the array with that of rank 0."""

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around work that ranks do in step: an error that only this rank raises ends all of them."""
        yield


class Ranks(SingleProcess):
    """The ranks of a communicator, of mpi4py or of torch.distributed."""

    def __init__(self, communicator: Any) -> None:
        super().__init__()
        self._world = communicator_of(communicator)
        self.rank, self.size = self._world.rank, self._world.size
        self.is_first = self.rank == 0
        self.reads_gpu = self._world.reads_gpu
        self.group = groups.join(self._all_reduce_within_graph)
        self._stop: str | None = None
        self._ended: list[int] = []  # ranks that ended before the others
        machines = self._world.all_gather_objects(_machine())
        self._on_machine = [rank for rank, machine in enumerate(machines) if machine == machines[self.rank]]
        self._watchdog = Watchdog(self._world, self._on_machine)
        self._share_cores()
        self._end_with_errors()
        atexit.register(self._end, os.getpid())  # which comes before MPI's own end

    def are_those_of(self, communicator: Any) -> bool:
        """Whether it has the same processes, in the same order."""
        return self._world.has_processes_of(communicator)

    def listen_to(self, interruption: Interruption | None) -> None:
        super().listen_to(interruption)
        self._stop = None

    @property
    def stop(self) -> str | None:
        return self._stop

    # Numbers

    def all_gather_numbers(self, numbers: Sequence[float], error: Exception | None = None) -> Array:
        """A row of numbers from each rank; an error of one rank is raised by all."""
        fit = len(numbers) <= ROOM
        met = self._meet(FINE if error is None else FAILED, numbers if fit else ())
        if (met[:, 0] == FAILED).any():
            raise self._common_error(error, np.flatnonzero(met[:, 0]))
        if fit:
            return met[:, 1 : 1 + len(numbers)]
        rows = np.empty((self.size, len(numbers)))
        self._world.all_gather(np.array(numbers, np.float64), rows)
        return rows

    def meet(self) -> None:
        self._meet(FINE)

    def _meet(self, state: int, numbers: Sequence[float] = ()) -> Array:
        """A state and up to ROOM numbers from each rank.

        A rank that ends takes part in it, whatever the others are about to do, and they learn that it has ended instead
        of waiting for it.
        """
        if not self._ended:
            mine = np.zeros(1 + ROOM)
            mine[: 1 + len(numbers)] = state, *numbers
            met = np.empty((self.size, 1 + ROOM))
            self._world.all_gather(mine, met)
            self._ended = np.flatnonzero(met[:, 0] == ENDED).tolist()
        if self._ended and state != ENDED:
            raise on_every_rank(
                RankError(
                    f"{_ranks(self._ended)} ended, by sys.exit() perhaps, before the others were done: every rank has "
                    "to call the same methods of the trainer"
                )
            )
        return met

    def _common_error(self, mine: Exception | None, failed: Array) -> BaseException:
        """The error that this rank raises: its own if all ranks have one, else that of the first, with its rank."""
        message = self._world.broadcast_object("" if mine is None else _sentence(mine), int(failed[0]))
        if mine is not None and len(failed) == self.size:
            return on_every_rank(mine)
        return on_every_rank(RankError(f"rank {failed[0]}: {message}"))

    def sum_losses(self, loss: float, error: Exception | None = None) -> float:
        rows = self.all_gather_numbers([loss, self._signal()], error)
        self._note(rows[:, 1])
        return float(sum(rows[:, 0].tolist()))

    def agree_to_stop(self) -> str | None:
        self._note(self.all_gather_numbers([self._signal()])[:, 0])
        return self._stop

    def _signal(self) -> int:
        received = None if self._interruption is None else self._interruption.received
        return 0 if received is None else 1 + SIGNALS.index(received)

    def _note(self, signals: Array) -> None:
        received = [int(s) for s in signals if s]
        self._stop = SIGNALS[received[0] - 1] if received else None

    def each(self, iterable: Iterable[R]) -> Iterator[R]:
        iterator = iter(iterable)
        while True:
            error: Exception | None = None
            found: list[R] = []
            try:
                found = [next(iterator)]
            except StopIteration:
                pass
            except Exception as problem:
                error = problem
            there = self.all_gather_numbers([len(found)], error)[:, 0]
            if there.min() != there.max():
                without = _ranks(np.flatnonzero(there == 0))
                raise on_every_rank(
                    RankError(
                        f"{without} ran out of batches before the others: give every rank the same number of batches"
                    )
                )
            if not found:
                return
            yield found[0]

    def on_first(self, work: Callable[[], R]) -> R:
        self.meet()
        result: Any = None
        error: Exception | None = None
        if self.is_first:
            try:
                result = work()
            except Exception as problem:
                error = problem
        packed = _packed(result if error is None else error)
        failed, packed = self._world.broadcast_object((error is not None, packed), 0)
        if not failed:
            return result if self.is_first else pickle.loads(packed)  # type: ignore[no-any-return]
        raise on_every_rank(error if error is not None else pickle.loads(packed))

    def all_gather(self, value: R, error: Exception | None = None) -> list[R]:
        self.all_gather_numbers([], error)
        return self._world.all_gather_objects(value)

    def expect_same(self, facts: Sequence[tuple[str, Any]]) -> None:
        """Raises one sentence that names the first fact which is not the same on all ranks."""
        # The repr of some objects has their address, which differs between processes.
        gathered = self.all_gather([(name, re.sub(" at 0x[0-9a-f]+", "", repr(value))) for name, value in facts])
        for k, (name, value) in enumerate(gathered[0]):
            others = [r for r, theirs in enumerate(gathered) if len(theirs) <= k or theirs[k] != (name, value)]
            if others:
                raise on_every_rank(ValueError(f"Trainer: {name} on {_ranks(others)} is not that of rank 0"))

    def expect_same_bits(self, digests: Sequence[int], names: Sequence[str], when: str) -> None:
        """Raises one sentence that names the first array whose digest is not that of rank 0."""
        self.meet()
        rows = np.empty((self.size, len(digests)), np.int64)
        self._world.all_gather(np.array(digests, np.int64), rows)
        differs = rows != rows[0]
        if differs.any():
            k = int(np.flatnonzero(differs.any(0))[0])
            others = _ranks(np.flatnonzero(differs[:, k]))
            raise on_every_rank(
                RankError(f"the ranks have drifted apart: {when}, {names[k]!r} on {others} is not that of rank 0")
            )

    # Arrays

    def all_reduce(self, array: Array) -> None:
        """Replaces the array by its sum over all ranks."""
        self._world.all_reduce(array)

    def reduce_scatter(self, array: Any, shard: Any) -> None:
        """Sums the array over all ranks; each rank gets its shard of the sum."""
        self._world.reduce_scatter(array, shard)

    def all_gather_shards(self, shard: Any, array: Any) -> None:
        """Fills the array with the shards of all ranks; `shard` may be a view of its place in it."""
        self._world.all_gather(shard, array)

    def all_gather_rows(self, rows: Array) -> Array:
        """The rows of all ranks, whose numbers may differ."""
        return np.concatenate(self._world.all_gather_objects(np.ascontiguousarray(rows)))

    def broadcast(self, array: Any) -> None:
        self._world.broadcast(array)

    def gather(self, shard: Array, array: Array | None) -> None:
        """Fills the array of rank 0 with the shards of all ranks."""
        self._world.gather(shard, array)

    def scatter(self, array: Array | None, shard: Array) -> None:
        """Gives each rank its shard of the array of rank 0."""
        self._world.scatter(array, shard)

    def local_rank(self) -> int:
        """The number of this rank among those on its machine."""
        told = self._world.local_rank()
        return self._on_machine.index(self.rank) if told is None else told

    def _share_cores(self) -> None:
        """Sets threads for this rank's fraction of the cores, unless cores are assigned or threads set already."""
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
        of_all = self._world.all_gather_objects(allowed)
        same_for_all = all(of_all[rank] == allowed for rank in self._on_machine)
        if same_for_all and get_num_threads() == len(allowed):
            set_num_threads(max(1, len(allowed) // len(self._on_machine)))

    def _all_reduce_within_graph(self, array: Array) -> None:
        """For native code, through which Python errors do not pass."""
        try:
            self.all_reduce(array)
        except BaseException as error:
            self.abort(error)

    # The end

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if not getattr(error, "raised_on_every_rank", False):
                self.abort(error)
            raise

    def abort(self, error: BaseException) -> None:
        """Prints which rank failed and why, and ends all of them."""
        traceback.print_exception(error)
        print(f"rank {self.rank}: {_sentence(error)}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        self._watchdog.report_failure()
        self._world.abort()

    def _end_with_errors(self) -> None:
        """Has an uncaught error end all ranks, instead of leaving the others waiting; one rank prints it."""
        before = sys.excepthook

        def end(kind: type[BaseException], error: BaseException, at: Any) -> None:
            if not getattr(error, "raised_on_every_rank", False):
                self.abort(error)
            elif self.rank == next(rank for rank in range(self.size) if rank not in self._ended):
                before(kind, error, at)

        sys.excepthook = end

    def _end(self, process: int) -> None:
        """When Python ends: tells ranks that are not at their end, and wait for this one in what they do together."""
        if os.getpid() == process and not self._world.is_closed():
            if not self._ended:
                self._meet(ENDED)
            self._world.close()


_known: list[Ranks] = []


def ranks_of(communicator: Any) -> SingleProcess:
    """The ranks of a communicator, one object for all trainers that have it; a single process without one."""
    if communicator is None:
        return SingleProcess()
    found = next((ranks for ranks in _known if ranks.are_those_of(communicator)), None)
    if found is None:
        found = Ranks(communicator)
        _known.append(found)
    return found


def _machine() -> str:
    """A name that this machine, and no other, has: many may be "localhost"."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text() if boot.is_file() else ''}"


def _ranks(numbers: Iterable[Any]) -> str:
    *before, last = [str(int(n)) for n in numbers]
    return f"ranks {', '.join(before)} and {last}" if before else f"rank {last}"


def _sentence(error: BaseException) -> str:
    text = str(error)
    return text if isinstance(error, (ValueError, OSError, RankError)) and text else f"{type(error).__name__}: {text}"


def _packed(value: Any) -> bytes:
    try:
        packed = pickle.dumps(value)
        pickle.loads(packed)  # some errors can be written but not read
    except Exception:
        packed = pickle.dumps(RankError(_sentence(value)))
    return packed
