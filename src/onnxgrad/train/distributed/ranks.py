"""The processes that train together, "ranks" in MPI's words: what they tell each other, and how they end together.

Whatever is sent goes through the communicator of mpi4py that the trainer was given. Numbers that decide something are
gathered from all ranks and added up in their order by each of them, so that every rank decides the same.
"""

import contextlib
import os
import pickle
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from onnxgrad.cpu.core import groups
from onnxgrad.cpu.core.threads import get_num_threads, set_num_threads
from onnxgrad.tensor_types import Array
from onnxgrad.train.distributed.watchdog import Watch
from onnxgrad.train.interruption import SIGNALS, Interruption

R = TypeVar("R")
ERROR = 1  # exit code of a rank that failed


class RankError(RuntimeError):
    """Something is wrong with some of the ranks; all of them raise it, at the same point."""


def on_every_rank(error: BaseException) -> BaseException:
    """Marks an error that all ranks raise at the same point: nobody waits for anybody then."""
    error.raised_on_every_rank = True  # type: ignore[attr-defined]
    return error


class Alone:
    """One process, without MPI: there is nobody to tell anything."""

    rank, size, is_alone, is_first = 0, 1, True, True

    def __init__(self) -> None:
        self._interruption: Interruption | None = None

    def heed(self, interruption: Interruption | None) -> None:
        """From now on `stop` tells of signals that it receives."""
        self._interruption = interruption

    @property
    def stop(self) -> str | None:
        """The name of a signal that some rank has received, and all know of."""
        return None if self._interruption is None else self._interruption.received

    def agree_to_stop(self) -> str | None:
        """Brings `stop` up to date."""
        return self.stop

    def add_losses(self, loss: float, error: Exception | None = None) -> float:
        """The sum over all ranks; an error of some rank is raised by all. Also brings `stop` up to date."""
        if error is not None:
            raise error
        return loss

    def each(self, iterable: Iterable[R]) -> Iterator[R]:
        """What an iterable gives; all ranks are at the same item, or all are at the end."""
        return iter(iterable)

    def on_first(self, work: Callable[[], R]) -> R:
        """Does it on rank 0; its result, or its error, is everybody's."""
        return work()

    def everybodys(self, found: R, error: Exception | None = None) -> list[R]:
        """What each rank has found, in their order; an error of some rank is raised by all."""
        if error is not None:
            raise error
        return [found]

    def broadcast(self, array: Array) -> None:
        """Rank 0's numbers, for all."""

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around what ranks do in step: an error that only this one raises ends all of them."""
        yield


class Ranks(Alone):
    """The ranks of a communicator; messages of the caller's own do not get in the way."""

    is_alone = False

    def __init__(self, communicator: Any) -> None:
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise ImportError(f"Trainer: a communicator needs mpi4py: pip install onnxgrad[mpi] ({error})") from None
        if not isinstance(communicator, MPI.Intracomm):
            raise TypeError(
                f"Trainer: communicator is a {type(communicator).__name__}, expected one of mpi4py, as MPI.COMM_WORLD"
            )
        super().__init__()
        self._mpi, self._world = MPI, communicator.Dup()
        self.rank, self.size = self._world.rank, self._world.size
        self.is_first = self.rank == 0
        self.group = groups.join(self._add_up_within_graph)
        self._stop: str | None = None
        self._machine = self._world.Split_type(MPI.COMM_TYPE_SHARED)
        self._watch = Watch(self._machine, self.rank)
        self._share_cores()
        self._end_with_errors()

    def are_those_of(self, communicator: Any) -> bool:
        """Whether it has the same processes, in the same order."""
        alike = (self._mpi.IDENT, self._mpi.CONGRUENT)
        return (
            isinstance(communicator, self._mpi.Intracomm) and self._mpi.Comm.Compare(communicator, self._world) in alike
        )

    def heed(self, interruption: Interruption | None) -> None:
        super().heed(interruption)
        self._stop = None

    @property
    def stop(self) -> str | None:
        return self._stop

    # Numbers

    def share(self, numbers: Sequence[float], error: Exception | None = None) -> Array:
        """A row of numbers from each rank. If some have an error instead, all raise it."""
        mine = np.array([error is not None, *numbers], np.float64)
        rows = np.empty((self.size, len(mine)))
        self._world.Allgather(mine, rows)
        if rows[:, 0].any():
            raise self._common_error(error, np.flatnonzero(rows[:, 0]))
        return rows[:, 1:]

    def _common_error(self, mine: Exception | None, failed: Array) -> BaseException:
        """Everybody's own, if all have one, else that of the first, under its rank."""
        told = self._world.bcast("" if mine is None else _sentence(mine), root=int(failed[0]))
        if mine is not None and len(failed) == self.size:
            return on_every_rank(mine)
        return on_every_rank(RankError(f"rank {failed[0]}: {told}"))

    def add_losses(self, loss: float, error: Exception | None = None) -> float:
        rows = self.share([loss, self._signal()], error)
        self._note(rows[:, 1])
        return float(sum(rows[:, 0].tolist()))

    def agree_to_stop(self) -> str | None:
        self._note(self.share([self._signal()])[:, 0])
        return self._stop

    def _signal(self) -> int:
        received = None if self._interruption is None else self._interruption.received
        return 0 if received is None else 1 + SIGNALS.index(received)

    def _note(self, signals: Array) -> None:
        heard = [int(s) for s in signals if s]
        self._stop = SIGNALS[heard[0] - 1] if heard else None

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
            there = self.share([len(found)], error)[:, 0]
            if there.min() != there.max():
                without = _ranks(np.flatnonzero(there == 0))
                raise on_every_rank(
                    RankError(f"{without} ran out of batches before others: every rank needs the same number of them")
                )
            if not found:
                return
            yield found[0]

    def on_first(self, work: Callable[[], R]) -> R:
        result: Any = None
        error: Exception | None = None
        if self.is_first:
            try:
                result = work()
            except Exception as problem:
                error = problem
        failed, told = self._world.bcast((error is not None, _packed(result if error is None else error)), root=0)
        if not failed:
            return result if self.is_first else pickle.loads(told)  # type: ignore[no-any-return]
        raise on_every_rank(error if error is not None else pickle.loads(told))

    def everybodys(self, found: R, error: Exception | None = None) -> list[R]:
        self.share([], error)
        return list(self._world.allgather(found))

    def expect_same(self, facts: Sequence[tuple[str, Any]]) -> None:
        """Raises one sentence that names the first fact which is not the same on all ranks."""
        # What has no words of its own is known by its address, which says nothing.
        everybodys = self.everybodys([(name, re.sub(" at 0x[0-9a-f]+", "", repr(value))) for name, value in facts])
        for k, (name, value) in enumerate(everybodys[0]):
            others = [r for r, theirs in enumerate(everybodys) if len(theirs) <= k or theirs[k] != (name, value)]
            if others:
                raise on_every_rank(ValueError(f"Trainer: {name} on {_ranks(others)} is not that of rank 0"))

    def expect_same_bits(self, digests: Sequence[int], names: Sequence[str], when: str) -> None:
        """Raises one sentence that names the first array whose digest is not that of rank 0."""
        rows = np.empty((self.size, len(digests)), np.uint32)
        self._world.Allgather(np.array(digests, np.uint32), rows)
        differs = rows != rows[0]
        if differs.any():
            k = int(np.flatnonzero(differs.any(0))[0])
            others = _ranks(np.flatnonzero(differs[:, k]))
            raise on_every_rank(
                RankError(f"the ranks have drifted apart: {when}, {names[k]!r} on {others} is not that of rank 0")
            )

    # Arrays

    def add_up(self, array: Array) -> None:
        """The sum over all ranks, in place."""
        self._world.Allreduce(self._mpi.IN_PLACE, array)

    def add_up_and_cut(self, array: Array, mine: Array) -> None:
        """The sum over all ranks, of which each gets its block."""
        self._world.Reduce_scatter_block(array, mine)

    def put_together(self, mine: Array, array: Array) -> None:
        """The blocks of all ranks, side by side; `mine` may be a part of `array`."""
        inside = np.may_share_memory(mine, array)
        self._world.Allgather(self._mpi.IN_PLACE if inside else mine, array)

    def one_after_another(self, mine: Array) -> Array:
        """Rows of all ranks, of which each has some."""
        return np.concatenate(self._world.allgather(np.ascontiguousarray(mine)))

    def broadcast(self, array: Array) -> None:
        self._world.Bcast(array, root=0)

    def to_first(self, mine: Array, array: Array | None) -> None:
        """The blocks of all ranks, side by side on rank 0."""
        self._world.Gather(mine, array, root=0)

    def from_first(self, array: Array | None, mine: Array) -> None:
        """Each rank's block of what rank 0 has."""
        self._world.Scatter(array, mine, root=0)

    def place_on_machine(self) -> int:
        """The number of this rank among those that share its machine."""
        return int(self._machine.rank)

    def _share_cores(self) -> None:
        """Threads for this rank's part of the cores, unless somebody has seen to that already."""
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
        same_for_all = all(theirs == allowed for theirs in self._machine.allgather(allowed))
        if same_for_all and get_num_threads() == len(allowed):
            set_num_threads(max(1, len(allowed) // self._machine.size))

    def _add_up_within_graph(self, array: Array) -> None:
        """For native code, through which no error passes."""
        try:
            self.add_up(array)
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
        """Says which rank failed and why, and ends all of them."""
        traceback.print_exception(error)
        print(f"rank {self.rank}: {_sentence(error)}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        self._watch.say_nothing()
        self._world.Abort(ERROR)

    def _end_with_errors(self) -> None:
        """An error that nobody catches ends all ranks, instead of leaving the others waiting; rank 0 tells of it."""
        before = sys.excepthook

        def end(kind: type[BaseException], error: BaseException, at: Any) -> None:
            if not getattr(error, "raised_on_every_rank", False):
                self.abort(error)
            elif self.is_first:
                before(kind, error, at)

        sys.excepthook = end


_known: list[Ranks] = []


def ranks_of(communicator: Any) -> Alone:
    """Those of a communicator, the same for all trainers that have it; or nobody else."""
    if communicator is None:
        return Alone()
    found = next((ranks for ranks in _known if ranks.are_those_of(communicator)), None)
    if found is None:
        found = Ranks(communicator)
        _known.append(found)
    return found


def _ranks(numbers: Iterable[Any]) -> str:
    told = [str(int(n)) for n in numbers]
    return f"rank {told[0]}" if len(told) == 1 else f"ranks {', '.join(told[:-1])} and {told[-1]}"


def _sentence(error: BaseException) -> str:
    text = str(error)
    return text if isinstance(error, (ValueError, OSError, RankError)) and text else f"{type(error).__name__}: {text}"


def _packed(found: Any) -> bytes:
    try:
        packed = pickle.dumps(found)
        pickle.loads(packed)  # some errors can be written but not read
    except Exception:
        packed = pickle.dumps(RankError(_sentence(found)))
    return packed
