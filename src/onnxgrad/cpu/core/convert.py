"""Whole arrays from one type to another: from half types to float32, mostly, and back."""

from typing import Any

import numpy as np

from onnxgrad.cpu.core.halves import flat, load, store
from onnxgrad.cpu.core.jit import native
from onnxgrad.cpu.core.memory import workspace
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.threads import launch
from onnxgrad.tensor_types import Array, accumulator

CHUNK = 1 << 16


@native
def _convert_chunk(number: int, source: Array, target: Array) -> None:
    for i in range(number * CHUNK, min(source.size, (number + 1) * CHUNK)):
        store(target, i, load(source, i))


@native
def _convert(source: Array, target: Array, scheduler: int) -> None:
    parallel(scheduler, (source.size + CHUNK - 1) // CHUNK, _convert_chunk, (source, target))


def convert(source: Array, target: Array) -> None:
    """The numbers of one array into another of as many, of any floating-point types."""
    launch(_convert, flat(source), flat(target), bytes_touched=source.nbytes)


def widen(array: Array) -> Array:
    """The elements in C order, one-dimensional; half numbers as float32."""
    if array.itemsize != 2:
        return flat(array)
    wide = workspace((array.size,), np.float32)
    convert(array, wide)
    return wide


def input_of(array: Array | None, dtype: np.dtype[Any]) -> Array:
    """Flat, in the type of the computation; empty if absent."""
    return np.empty(0, accumulator(dtype)) if array is None else widen(array)


def working_copy(array: Array | None, dtype: np.dtype[Any]) -> Array:
    """The array itself, flat, or float32 memory of its size if it holds half numbers; empty if absent."""
    if array is None:
        return np.empty(0, accumulator(dtype))
    return workspace((array.size,), np.float32) if array.itemsize == 2 else array.reshape(-1)


def narrow(wide: Array, array: Array | None) -> None:
    """Rounds a working copy's numbers into an array of half numbers; others are there already."""
    if array is not None and array.itemsize == 2:
        convert(wide, array)
