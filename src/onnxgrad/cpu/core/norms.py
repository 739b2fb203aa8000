"""The length of arrays taken as vectors: the root of the sum of their squares, which is added up in float64."""

import math

import numpy as np

from onnxgrad.cpu.core.halves import load, store
from onnxgrad.cpu.core.jit import inlined, native
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.reductions import add_in_any_order
from onnxgrad.tensor_types import Array

BLOCK = 1 << 15  # elements of a task; fixed, since it orders the additions


@inlined
def sum_of_squares(x: Array, start: int, stop: int) -> float:
    """Of the elements from `start` to before `stop`; to Numba, float() of a float32 number is one."""
    total = 0.0
    for i in range(start, stop):
        number = np.float64(load(x, i))
        total = add_in_any_order(total, number * number)
    return total


@native
def _block(k: int, x: Array, sums: Array) -> None:
    sums[k] = sum_of_squares(x, k * BLOCK, min((k + 1) * BLOCK, x.size))


@native
def length(x: Array, result: Array, scheduler: int) -> None:
    """result[0] = the length of x."""
    sums = np.zeros((x.size + BLOCK - 1) // BLOCK)
    parallel(scheduler, sums.size, _block, (x, sums))
    store(result, 0, math.sqrt(sums.sum()))
