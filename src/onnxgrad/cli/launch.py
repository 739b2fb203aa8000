"""onnxgrad under mpiexec or torchrun: its processes, and how all end when one reports an error."""

import atexit
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import click

# Set by the launchers of MPICH, Intel MPI and Slurm (PMI), Open MPI and PMIx.
MPI_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun, all of them
HEAD_START = 1.0  # seconds for the first process to say what all of them would


class Processes(NamedTuple):
    """The processes that train together."""

    communicator: Any  # as Trainer takes it
    rank: int
    size: int
    launcher: str  # as typed before the command


def processes(device: str) -> Processes | None:
    """Those that a launcher started to train on such a device, or None for one that was started alone."""
    if all(name in os.environ for name in TORCH_VARIABLES):
        return _of_torchrun(device)
    if any(name in os.environ for name in MPI_VARIABLES):
        return _of_mpiexec()
    return None


def _of_mpiexec() -> Processes | None:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ValueError(
            f"mpiexec started this process, but mpi4py is not installed: pip install 'onnxgrad[mpi]' ({error})"
        ) from None
    world = MPI.COMM_WORLD
    return Processes(world, world.rank, world.size, f"mpiexec -n {world.size}") if world.size > 1 else None


def _of_torchrun(device: str) -> Processes | None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size == 1:
        return None
    try:
        from torch import distributed
    except ImportError as error:
        raise ValueError(f"torchrun started this process, but torch cannot be imported here ({error})") from None
    # torch's environment: MASTER_ADDR, RANK and so on. Each process trains on the GPU of the number LOCAL_RANK.
    on_gpus = device == "cuda" and distributed.is_nccl_available()
    distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    atexit.register(_leave, distributed)  # which comes after the end of the ranks (train/distributed/ranks.py)
    machines = size // int(os.environ.get("LOCAL_WORLD_SIZE", size))
    several = f"--nnodes {machines} " if machines > 1 else ""
    launcher = f"torchrun {several}--nproc-per-node {size // machines} -m"
    return Processes(distributed.group.WORLD, rank, size, launcher)


def _leave(distributed: Any) -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


def end_all(error: BaseException, sentence: str, exit_code: int) -> None:
    """Ends the other processes as well, unless there are none, or all raise the same error."""
    rank, abort = _rank_and_abort()
    if rank is None:
        return
    if getattr(error, "raised_on_every_rank", False):
        if rank:
            raise click.exceptions.Exit(exit_code) from None
        return
    if rank:
        time.sleep(HEAD_START)
    click.echo(f"onnxgrad: rank {rank}: {sentence}", err=True)
    abort(exit_code)


def _rank_and_abort() -> tuple[int | None, Callable[[int], Any]]:
    """The rank of this process, if there are others, and what ends all of them."""
    mpi, distributed = sys.modules.get("mpi4py.MPI"), sys.modules.get("torch.distributed")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1:
        return mpi.COMM_WORLD.rank, mpi.COMM_WORLD.Abort
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), os._exit  # torchrun ends the others
    return None, os._exit
