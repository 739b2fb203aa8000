"""Indices before anything is written: all of them in range, or the position of the first that is not."""

import numpy as np

from onnxgrad.arguments import index_error
from onnxgrad.cpu.core.jit import inlined, int64, native
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.tensor_types import Array

CHUNK = 1 << 16


@inlined
def wrapped(index: int, size: int) -> int:
    """A negative index counted from the end; without a branch, which signs that change would make slow."""
    return int64(index) + (size & (int64(index) >> 63))


@native
def _check_chunk(number: int, indices: Array, size: int, first_bad: Array) -> None:
    start, end = number * CHUNK, min(indices.size, (number + 1) * CHUNK)
    lowest, highest = int64(0), int64(-1)
    for i in range(start, end):  # no early exit, so that this loop runs on vectors
        lowest = min(lowest, int64(indices[i]))
        highest = max(highest, int64(indices[i]))
    first_bad[number] = -1
    if lowest < -size or highest >= size:
        for i in range(start, end):
            if indices[i] < -size or indices[i] >= size:
                first_bad[number] = i
                break


@native
def find_bad_index(indices: Array, size: int, scheduler: int) -> int:
    """The position of the first index outside [-size, size-1], or -1."""
    chunks = (indices.size + CHUNK - 1) // CHUNK
    first_bad = np.empty(chunks, np.int64)
    parallel(scheduler, chunks, _check_chunk, (indices, size, first_bad))
    for chunk in range(chunks):
        if first_bad[chunk] >= 0:
            return first_bad[chunk]
    return int64(-1)


def refuse_bad(position: int, indices: Array, size: int) -> None:
    """Turns what `find_bad_index` found into an error."""
    if position >= 0:
        raise index_error(indices.shape, position, indices.flat[position], size)
