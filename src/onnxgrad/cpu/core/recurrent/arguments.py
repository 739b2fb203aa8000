"""How kernels of recurrent operators hand arrays to native code: flat, half types widened, None as nothing."""

from typing import Any

import numpy as np

from onnxgrad.cpu.core.convert import widen
from onnxgrad.cpu.core.halves import flat
from onnxgrad.cpu.core.matmul.microkernel import ROWS
from onnxgrad.cpu.core.memory import workspace
from onnxgrad.cpu.core.recurrent.activations import CODES
from onnxgrad.cpu.core.threads import get_num_threads
from onnxgrad.ops.families.recurrent import Settings
from onnxgrad.tensor_types import Array, accumulator

LARGEST_BLOCK = 64  # rows that walk through time together: more would push their states out of the cache


def codes_of(given: Settings) -> tuple[Array, Array]:
    """Codes and parameters of the activations, for each direction in turn."""
    chosen = [activation for direction in given.directions for activation in direction.activations]
    return np.array([CODES[c.name] for c in chosen]), np.array([(c.alpha, c.beta) for c in chosen])


def backwards_of(given: Settings) -> Array:
    """For each direction, whether it takes the last step first."""
    return np.array([direction.backwards for direction in given.directions])


def lengths_of(X: Array, SL: Array | None) -> Array:
    """How many steps each row has."""
    return np.full(X.shape[1], X.shape[0], np.int32) if SL is None else flat(SL)


def input_of(array: Array | None, dtype: np.dtype[Any]) -> Array:
    """Flat, in the type of the computation; empty if absent."""
    return np.empty(0, accumulator(dtype)) if array is None else widen(array)


def working_copy(array: Array | None, dtype: np.dtype[Any]) -> Array:
    """The array itself, flat, or float32 memory of its size if it holds half numbers; empty if absent."""
    if array is None:
        return np.empty(0, accumulator(dtype))
    return workspace((array.size,), np.float32) if array.itemsize == 2 else array.reshape(-1)


def rows_per_block(rows: int) -> int:
    """Rows a thread takes at a time: whole tiles, evenly shared."""
    shared = -(-rows // get_num_threads())
    return min(LARGEST_BLOCK, max(ROWS, -(-shared // ROWS) * ROWS))
