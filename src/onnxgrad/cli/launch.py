"""onnxgrad under mpiexec: the processes it was started as, and how they end when one of them refuses."""

import os
import sys
import time
from typing import Any

import click

# Set by the launchers of MPICH, Intel MPI and Slurm (PMI), Open MPI and PMIx.
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
HEAD_START = 1.0  # seconds for the first process to say what all of them would


def communicator() -> Any:
    """That of all processes, or None for one that was started alone."""
    if not any(name in os.environ for name in RANK_VARIABLES):
        return None
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ValueError(
            f"mpiexec started this process, but mpi4py is not installed: pip install onnxgrad[mpi] ({error})"
        ) from None
    return MPI.COMM_WORLD if MPI.COMM_WORLD.size > 1 else None


def end_all(error: BaseException, sentence: str, exit_code: int) -> None:
    """Ends the other processes as well, unless there are none, or all raise the same error."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized() or module.COMM_WORLD.size == 1:
        return
    rank = module.COMM_WORLD.rank
    if getattr(error, "raised_on_every_rank", False):
        if rank:
            raise click.exceptions.Exit(exit_code) from None
        return
    if rank:
        time.sleep(HEAD_START)
    click.echo(f"onnxgrad: rank {rank}: {sentence}", err=True)
    module.COMM_WORLD.Abort(exit_code)
