"""SeededDropout on the CPU: one pass, draws and product together."""

import numpy as np

from onnxgrad.cpu.core.halves import flat, load, store
from onnxgrad.cpu.core.jit import native
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.memory import GIVEN
from onnxgrad.ops.dropout import BITS, FIRST, GAMMA, SECOND, threshold
from onnxgrad.tensor_types import Array, accumulator
from onnxgrad.threads import launch

TASK = 1 << 14  # elements
STEP, MIX1, MIX2 = np.uint64(GAMMA), np.uint64(FIRST), np.uint64(SECOND)
LAST = np.uint64(64 - BITS)


def seeded_dropout(data: Array, seed: Array, output: Array, ratio: float, memory: int = GIVEN) -> None:
    scale = np.array([1 / (1 - ratio)], accumulator(data.dtype))  # an array has a type in native code, a number none
    work = (flat(data), flat(seed), flat(output), scale, threshold(ratio))
    launch(_drop, *work, bytes_touched=2 * data.nbytes)


@native
def _drop(data: Array, seed: Array, output: Array, scale: Array, limit: int, scheduler: int) -> None:
    tasks = (data.size + TASK - 1) // TASK
    parallel(scheduler, tasks, _drop_some, (data, seed, output, scale, limit))


@native
def _drop_some(task: int, data: Array, seed: Array, output: Array, scale: Array, limit: int) -> None:
    key, factor = np.uint64(seed[0]), scale[0]
    nothing = factor * 0
    for i in range(task * TASK, min(data.size, (task + 1) * TASK)):
        z = (np.uint64(i + 1) + key) * STEP
        z = (z ^ (z >> np.uint64(30))) * MIX1
        z = (z ^ (z >> np.uint64(27))) * MIX2
        z ^= z >> np.uint64(31)
        kept = np.int64(z >> LAST) >= limit
        store(output, i, load(data, i) * factor if kept else nothing)
