"""LayerNormalizationGrad and SimplifiedLayerNormalizationGrad on the CPU: one pass over blocks of rows.

Each block adds its rows up into sums of its own, for scale and bias; a second pass adds the blocks' sums up in order.
How many blocks there are follows from the shape alone, so neither do the bits of the result depend on anything else.
"""

import math

import numpy as np

from onnxgrad.cpu.core.halves import flat, load, store, zero
from onnxgrad.cpu.core.jit import native
from onnxgrad.cpu.core.memory import workspace
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.reductions import add_in_any_order
from onnxgrad.cpu.core.threads import launch
from onnxgrad.tensor_types import Array, accumulator

TASK = 1 << 15  # elements of a block, at least
BLOCKS = 64  # at most, so that their sums stay small beside the rows
COLUMNS = 256  # of the sums that one task of the second pass adds up


def layer_normalization_grad(
    Y_grad: Array,
    X: Array,
    scale: Array,
    mean: Array,
    inv_std_var: Array,
    X_grad: Array | None,
    scale_grad: Array | None,
    bias_grad: Array | None,
    axis: int,
) -> None:
    _run(Y_grad, X, scale, mean, inv_std_var, X_grad, scale_grad, bias_grad, axis, True)


def simplified_layer_normalization_grad(
    Y_grad: Array,
    X: Array,
    scale: Array,
    inv_std_var: Array,
    X_grad: Array | None,
    scale_grad: Array | None,
    axis: int,
) -> None:
    _run(Y_grad, X, scale, inv_std_var, inv_std_var, X_grad, scale_grad, None, axis, False)


def _run(
    Y_grad: Array,
    X: Array,
    scale: Array,
    mean: Array,
    inv_std_var: Array,
    X_grad: Array | None,
    scale_grad: Array | None,
    bias_grad: Array | None,
    axis: int,
    centred: bool,
) -> None:
    rows, size = math.prod(X.shape[: axis % X.ndim]), scale.size
    if size == 0:
        return
    per_block = max(1, TASK // size, -(-rows // BLOCKS))
    room = (-(-rows // per_block) * size,)
    nothing = np.empty(0, X.dtype)
    launch(
        _gradients,
        *(flat(a) for a in (Y_grad, X, scale, mean, inv_std_var)),
        *(flat(nothing if a is None else a) for a in (X_grad, scale_grad, bias_grad)),
        *(workspace(room, accumulator(X.dtype)) for _ in range(2)),
        (rows, size, per_block),
        centred,
        bytes_touched=3 * X.nbytes,
    )


@native
def _gradients(
    Y_grad: Array,
    X: Array,
    scale: Array,
    mean: Array,
    inv_std_var: Array,
    X_grad: Array,
    scale_grad: Array,
    bias_grad: Array,
    of_scale: Array,
    of_bias: Array,
    sizes: tuple[int, int, int],
    centred: bool,
    scheduler: int,
) -> None:
    rows, size, per_block = sizes
    blocks = (rows + per_block - 1) // per_block
    inputs = (Y_grad, X, scale, mean, inv_std_var)
    parallel(scheduler, blocks, _block, (inputs, X_grad, of_scale, of_bias, sizes, centred))
    tasks = (size + COLUMNS - 1) // COLUMNS
    if scale_grad.size > 0:
        parallel(scheduler, tasks, _total, (of_scale, scale_grad, blocks))
    if bias_grad.size > 0:
        parallel(scheduler, tasks, _total, (of_bias, bias_grad, blocks))


@native
def _block(
    number: int,
    inputs: tuple[Array, Array, Array, Array, Array],
    X_grad: Array,
    of_scale: Array,
    of_bias: Array,
    sizes: tuple[int, int, int],
    centred: bool,
) -> None:
    Y_grad, X, scale, mean, inv_std_var = inputs
    rows, size, per_block = sizes
    number_type = type(load(X, 0))  # float32 for half numbers
    first, share = number * size, number_type(1) / number_type(size)
    zero(of_scale, first, first + size)
    zero(of_bias, first, first + size)
    for row in range(number * per_block, min(rows, (number + 1) * per_block)):
        at, inv = row * size, number_type(load(inv_std_var, row))
        shift = number_type(load(mean, row)) if centred else number_type(0)
        level = along = number_type(0)  # what of the gradient moves the row's mean, and what its deviation
        if centred:
            for j in range(size):
                g, x = load(Y_grad, at + j), load(X, at + j) - shift
                store(of_bias, first + j, load(of_bias, first + j) + g)
                store(of_scale, first + j, load(of_scale, first + j) + g * (x * inv))
                level = add_in_any_order(level, g * load(scale, j))
                along = add_in_any_order(along, g * load(scale, j) * x)
        else:
            for j in range(size):
                g, x = load(Y_grad, at + j), load(X, at + j)
                store(of_scale, first + j, load(of_scale, first + j) + g * (x * inv))
                along = add_in_any_order(along, g * load(scale, j) * x)
        if X_grad.size > 0:
            level, along = level * share, along * share * inv * inv
            for j in range(size):
                g = load(Y_grad, at + j) * load(scale, j)
                store(X_grad, at + j, inv * (g - level - (load(X, at + j) - shift) * along))


@native
def _total(task: int, sums: Array, result: Array, blocks: int) -> None:
    left, size = task * COLUMNS, result.size
    count = min(COLUMNS, size - left)
    total = np.zeros(count, sums.dtype)
    for block in range(blocks):
        at = block * size + left
        for j in range(count):
            store(total, j, load(total, j) + load(sums, at + j))
    for j in range(count):
        store(result, left + j, load(total, j))
