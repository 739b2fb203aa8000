"""How kernels of recurrent operators hand arrays to native code: flat, half types widened, empty for None.

Arguments go over in plain tuples, of which native code makes NamedTuples: Numba takes some 5 µs to find out the type of
a NamedTuple from Python, and 1 for a tuple. With six of them GRUGrad [2, 1, 4, 4] took 75 µs instead of 64.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from onnxgrad.cpu.core.convert import input_of
from onnxgrad.cpu.core.halves import flat
from onnxgrad.cpu.core.matmul.microkernel import ROWS, gemm_address
from onnxgrad.cpu.core.recurrent.activations import CODES
from onnxgrad.cpu.core.threads import get_num_threads
from onnxgrad.ops.families.recurrent import Settings
from onnxgrad.tensor_types import Array, accumulator

LARGEST_BLOCK = 64  # rows whose steps one task computes: more would push their states out of the cache


class Sizes(NamedTuple):
    """The dimensions of a recurrent operator."""

    steps: int
    batch: int
    inputs: int
    hidden: int
    directions: int


class Direction(NamedTuple):
    """One of the directions."""

    number: int
    backwards: bool  # whether it takes the last step first


class Execution(NamedTuple):
    """How the work is split into tasks, and the address of the product they call."""

    block: int  # rows of the batch in one task
    threads: int
    gemm: int


def sizes_of(X: Array, R: Array) -> tuple[int, ...]:
    """Sizes, read off the shapes."""
    return *X.shape, R.shape[2], R.shape[0]


@functools.lru_cache
def activations_of(given: Settings) -> tuple[Array, Array, float]:
    """Activations of native code."""
    chosen = [activation for direction in given.directions for activation in direction.activations]
    parameters = np.array([(c.alpha, c.beta) for c in chosen])
    return np.array([CODES[c.name] for c in chosen]), parameters, given.clip or 0.0


@functools.lru_cache
def backwards_of(given: Settings) -> Array:
    """For each direction, whether it takes the last step first."""
    return np.array([direction.backwards for direction in given.directions])


def lengths_of(X: Array, SL: Array | None) -> Array:
    """How many steps each row has."""
    return np.full(X.shape[1], X.shape[0], np.int32) if SL is None else flat(SL)


def inputs_of(dtype: np.dtype[Any], *arrays: Array | None) -> tuple[Array, ...]:
    """Each of them flat, in the type of the computation; empty if absent."""
    return tuple(input_of(array, dtype) for array in arrays)


def execution_of(X: Array) -> tuple[int, int, int]:
    """Execution, with blocks of whole tiles and as many rows for each thread."""
    threads = get_num_threads()
    per_thread = -(-X.shape[1] // threads)
    block = min(LARGEST_BLOCK, max(ROWS, -(-per_thread // ROWS) * ROWS))
    return block, threads, gemm_address(accumulator(X.dtype))
