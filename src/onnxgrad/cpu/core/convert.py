"""Whole arrays from half types to float32 and back."""

import numpy as np

from onnxgrad.cpu.core.halves import flat, load, store
from onnxgrad.cpu.core.jit import native
from onnxgrad.cpu.core.memory import workspace
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.threads import launch
from onnxgrad.tensor_types import Array

CHUNK = 1 << 16


@native
def _convert_chunk(number: int, source: Array, target: Array) -> None:
    for i in range(number * CHUNK, min(source.size, (number + 1) * CHUNK)):
        store(target, i, load(source, i))


@native
def _convert(source: Array, target: Array, scheduler: int) -> None:
    parallel(scheduler, (source.size + CHUNK - 1) // CHUNK, _convert_chunk, (source, target))


def widen(array: Array) -> Array:
    """The elements in C order, one-dimensional; half numbers as float32."""
    if array.itemsize != 2:
        return flat(array)
    wide = workspace((array.size,), np.float32)
    launch(_convert, flat(array), wide, bytes_touched=array.nbytes)
    return wide


def narrow(wide: Array, array: Array) -> None:
    """Rounds float32 numbers into an array of half numbers; does nothing if `wide` is the array's own memory."""
    if array.itemsize == 2:
        launch(_convert, wide, flat(array), bytes_touched=array.nbytes)
