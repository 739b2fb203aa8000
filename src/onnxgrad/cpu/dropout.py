"""DropoutGrad and SeededDropout on the CPU: one pass, draws and product together."""

import numpy as np

from onnxgrad.cpu.core.halves import flat, load, store
from onnxgrad.cpu.core.jit import native
from onnxgrad.cpu.core.memory import GIVEN
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.threads import launch
from onnxgrad.ops.dropout import BITS, FIRST, GAMMA, SECOND, threshold
from onnxgrad.tensor_types import Array, accumulator

TASK = 1 << 14  # elements
STEP, MIX1, MIX2 = np.uint64(GAMMA), np.uint64(FIRST), np.uint64(SECOND)
LAST = np.uint64(64 - BITS)


def seeded_dropout(data: Array, seed: Array, output: Array, ratio: float, memory: int = GIVEN) -> None:
    scale = accumulator(data.dtype).type(1 / (1 - ratio))
    work = (flat(data), flat(seed), flat(output), scale, threshold(ratio))
    launch(_drop, *work, bytes_touched=2 * data.nbytes)


@native
def _drop(data: Array, seed: Array, output: Array, scale: float, limit: int, scheduler: int) -> None:
    tasks = (data.size + TASK - 1) // TASK
    parallel(scheduler, tasks, _drop_some, (data, seed, output, scale, limit))


@native
def _drop_some(task: int, data: Array, seed: Array, output: Array, scale: float, limit: int) -> None:
    key, nothing = np.uint64(seed[0]), type(scale)(0)
    for i in range(task * TASK, min(data.size, (task + 1) * TASK)):
        z = (np.uint64(i + 1) + key) * STEP
        z = (z ^ (z >> np.uint64(30))) * MIX1
        z = (z ^ (z >> np.uint64(27))) * MIX2
        z ^= z >> np.uint64(31)
        kept = np.int64(z >> LAST) >= limit
        store(output, i, load(data, i) * scale if kept else nothing)


def dropout_grad(
    dy: Array, mask: Array, ratio: Array | None, training_mode: Array | None, dx: Array, memory: int = GIVEN
) -> None:
    share = np.array([0.5], np.float32) if ratio is None else ratio
    training = np.ones(1, np.bool_) if training_mode is None else training_mode
    work = (flat(dy), flat(mask), flat(share), flat(training), flat(dx), accumulator(dy.dtype).type(1))
    launch(_keep, *work, bytes_touched=2 * dy.nbytes + mask.nbytes)


@native
def _keep(dy: Array, mask: Array, ratio: Array, training: Array, dx: Array, one: float, scheduler: int) -> None:
    tasks = (dy.size + TASK - 1) // TASK
    parallel(scheduler, tasks, _keep_some, (dy, mask, ratio, training, dx, one))


@native
def _keep_some(task: int, dy: Array, mask: Array, ratio: Array, training: Array, dx: Array, one: float) -> None:
    share, nothing = load(ratio, 0), type(one)(0)
    dropped = share != 0 and training[0]
    kept = one - type(one)(share) if dropped else one
    for i in range(task * TASK, min(dy.size, (task + 1) * TASK)):
        store(dx, i, load(dy, i) / kept if load(mask, i) or not dropped else nothing)
