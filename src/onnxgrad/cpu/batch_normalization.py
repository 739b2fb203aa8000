"""Batch normalization on the CPU, and its gradient: a channel's sums in one pass over it, its results in a second.

A task takes a channel through both passes while it is in the cache. Few channels are cut into slices of the batch,
and where a channel's numbers lie apart in memory, a task goes down many channels at once; the passes then come one
after the other for all channels. All this follows from the shape alone, and so do the bits of the result.

Sums are kept in float64, also those of float32: it costs nothing, since memory is what takes the time. So one pass
will do for mean and variance as well: of numbers less the mean of the batch's first image, which is near theirs.
"""

import numpy as np

from onnxgrad.cpu.core.halves import flat, load, store
from onnxgrad.cpu.core.jit import inlined, native
from onnxgrad.cpu.core.memory import workspace
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.reductions import add_in_any_order
from onnxgrad.cpu.core.threads import launch
from onnxgrad.tensor_types import Array

NARROW = 8  # numbers of a channel beside each other, below which they count as lying apart
TASK = 1 << 13  # elements of a task, at least
SLICES = 32  # of all channels together, at least, where each is worth a task
COLUMNS = 256  # of a task that goes down many channels


def batch_normalization_grad(
    dY: Array,
    X: Array,
    scale: Array,
    mean: Array | None,
    inv_std: Array | None,
    X_grad: Array | None,
    scale_grad: Array | None,
    bias_grad: Array | None,
    epsilon: float,
) -> None:
    if scale.size == 0:
        return
    sizes = _sizes(X, scale.size)
    nothing, none = np.empty(0, X.dtype), np.empty(0, scale.dtype)
    launch(
        _gradients,
        *(flat(a) for a in (dY, X, scale)),
        *(flat(none if a is None else a) for a in (mean, inv_std)),
        flat(nothing if X_grad is None else X_grad),
        *(flat(none if a is None else a) for a in (scale_grad, bias_grad)),
        workspace((sizes[1] * sizes[4] * 4,), np.float64),
        sizes,
        float(epsilon),
        mean is None,
        bytes_touched=3 * X.nbytes,
    )


Inputs = tuple[Array, Array, Array, Array, Array]
Sizes = tuple[int, int, int, int, int]  # images, channels, numbers of a channel, channels of a block, slices


def _sizes(X: Array, channels: int) -> Sizes:
    images = X.shape[0]
    size = X.size // max(1, images * channels)
    block = max(1, (COLUMNS if size < NARROW else TASK // max(1, images)) // max(1, size))
    blocks = -(-channels // block)
    return images, channels, size, block, max(1, min(-(-SLICES // blocks), X.size // blocks // TASK, images))


@native
def _gradients(
    dY: Array,
    X: Array,
    scale: Array,
    mean: Array,
    inv_std: Array,
    X_grad: Array,
    scale_grad: Array,
    bias_grad: Array,
    sums: Array,
    sizes: Sizes,
    epsilon: float,
    measured: bool,
    scheduler: int,
) -> None:
    _, channels, _, block, slices = sizes
    inputs, results = (dY, X, scale, mean, inv_std), (X_grad, scale_grad, bias_grad)
    blocks = (channels + block - 1) // block
    if slices == 1:
        parallel(scheduler, blocks, _whole, (inputs, results, sums, sizes, epsilon, measured))
        return
    parallel(scheduler, blocks * slices, _add_up, (inputs, sums, sizes, measured))
    parallel(scheduler, blocks, _finish, (inputs, results, sums, sizes, epsilon, measured))
    parallel(scheduler, blocks * slices, _apply, (inputs, X_grad, sums, sizes))


@native
def _whole(
    number: int,
    inputs: Inputs,
    results: tuple[Array, Array, Array],
    sums: Array,
    sizes: Sizes,
    epsilon: float,
    measured: bool,
) -> None:
    """All of a block of channels."""
    _add_up(number, inputs, sums, sizes, measured)
    _finish(number, inputs, results, sums, sizes, epsilon, measured)
    _apply(number, inputs, results[0], sums, sizes)


@inlined
def _images(number: int, sizes: Sizes) -> tuple[int, int]:
    """The images of a slice, from the first to the one after the last."""
    images, slices = sizes[0], sizes[4]
    return number * images // slices, (number + 1) * images // slices


@inlined
def _shift(channel: int, X: Array, mean: Array, size: int, measured: bool) -> float:
    """A number near the channel's mean: its mean in the first image; or the mean itself, where it is given."""
    if not measured:
        return np.float64(load(mean, channel))
    total = 0.0
    for j in range(channel * size, (channel + 1) * size):
        total = add_in_any_order(total, np.float64(load(X, j)))
    return total / max(1, size)


@native
def _add_up(number: int, inputs: Inputs, sums: Array, sizes: Sizes, measured: bool) -> None:
    """For each channel of a block the sums over a slice: of g, g · d, d and d², where d is x less a shift."""
    _, channels, size, block, slices = sizes
    first, end = _images(number % slices, sizes)
    left = number // slices * block
    right = min(channels, left + block)
    if size < NARROW:
        _add_up_columns(inputs, sums, sizes, measured, left, right, first, end, number % slices)
        return
    dY, X, _, mean, _ = inputs
    for c in range(left, right):
        shift = _shift(c, X, mean, size, measured)
        level = along = total = square = 0.0
        for n in range(first, end):
            at = (n * channels + c) * size
            if measured:
                for j in range(at, at + size):
                    g, d = np.float64(load(dY, j)), np.float64(load(X, j)) - shift
                    level = add_in_any_order(level, g)
                    along = add_in_any_order(along, g * d)
                    total = add_in_any_order(total, d)
                    square = add_in_any_order(square, d * d)
            else:
                for j in range(at, at + size):
                    g = np.float64(load(dY, j))
                    level = add_in_any_order(level, g)
                    along = add_in_any_order(along, g * (np.float64(load(X, j)) - shift))
        to = (number % slices * channels + c) * 4
        store(sums, to, level)
        store(sums, to + 1, along)
        store(sums, to + 2, total)
        store(sums, to + 3, square)


@native
def _add_up_columns(
    inputs: Inputs,
    sums: Array,
    sizes: Sizes,
    measured: bool,
    left: int,
    right: int,
    first: int,
    end: int,
    number: int,
) -> None:
    """The same, down all columns of these channels at once."""
    dY, X, _, mean, _ = inputs
    _, channels, size, _, _ = sizes
    width = (right - left) * size
    shift, level, along = np.empty(width), np.zeros(width), np.zeros(width)
    total, square = np.zeros(width), np.zeros(width)
    for j in range(width):
        store(shift, j, _shift(left + j // size, X, mean, size, measured))
    for n in range(first, end):
        at = (n * channels + left) * size
        for j in range(width):
            g, d = np.float64(load(dY, at + j)), np.float64(load(X, at + j)) - load(shift, j)
            store(level, j, load(level, j) + g)
            store(along, j, load(along, j) + g * d)
        if measured:
            for j in range(width):
                d = np.float64(load(X, at + j)) - load(shift, j)
                store(total, j, load(total, j) + d)
                store(square, j, load(square, j) + d * d)
    for c in range(left, right):
        to, at = (number * channels + c) * 4, (c - left) * size
        for k, column in enumerate((level, along, total, square)):
            result = 0.0
            for j in range(at, at + size):
                result += load(column, j)
            store(sums, to + k, result)


@native
def _finish(
    number: int,
    inputs: Inputs,
    results: tuple[Array, Array, Array],
    sums: Array,
    sizes: Sizes,
    epsilon: float,
    measured: bool,
) -> None:
    """The gradients of scale and bias; the first slice's sums become p, q, k and r: X_grad = p·g + q·(x - k) + r."""
    _, X, scale, mean, inv_std = inputs
    _, scale_grad, bias_grad = results
    images, channels, size, block, slices = sizes
    share = 1 / max(1, images * size)
    for c in range(number * block, min(channels, (number + 1) * block)):
        level = along = total = square = 0.0
        for s in range(slices):
            at = (s * channels + c) * 4
            level += load(sums, at)
            along += load(sums, at + 1)
            total += load(sums, at + 2)
            square += load(sums, at + 3)
        centre = _shift(c, X, mean, size, measured)
        if measured:
            beyond = total * share
            variance = square * share - beyond * beyond
            inv = 1 / np.sqrt((0.0 if variance < 0 else variance) + epsilon)
            centre += beyond
            along -= beyond * level
        else:
            inv = np.float64(load(inv_std, c))
        if scale_grad.size > 0:
            store(scale_grad, c, type(load(scale_grad, 0))(along * inv))
        if bias_grad.size > 0:
            store(bias_grad, c, type(load(bias_grad, 0))(level))
        p = np.float64(load(scale, c)) * inv
        q = -p * inv * inv * along * share
        k = np.float64(type(load(X, 0))(centre))  # what of it a number like those of X can hold
        store(sums, c * 4, p)
        store(sums, c * 4 + 1, q)
        store(sums, c * 4 + 2, k)
        store(sums, c * 4 + 3, q * (k - centre) - p * level * share)


@native
def _apply(number: int, inputs: Inputs, X_grad: Array, sums: Array, sizes: Sizes) -> None:
    """X_grad of a block of channels, for a slice of the batch."""
    if X_grad.size == 0:
        return
    dY, X, _, _, _ = inputs
    _, channels, size, block, slices = sizes
    first, end = _images(number % slices, sizes)
    left = number // slices * block
    right = min(channels, left + block)
    if size < NARROW:
        _apply_columns(dY, X, X_grad, sums, channels, size, left, right, first, end)
        return
    number_type = type(load(X, 0))  # float32 for half numbers
    for c in range(left, right):
        p, q = number_type(load(sums, c * 4)), number_type(load(sums, c * 4 + 1))
        k, r = number_type(load(sums, c * 4 + 2)), number_type(load(sums, c * 4 + 3))
        for n in range(first, end):
            at = (n * channels + c) * size
            for j in range(at, at + size):
                store(X_grad, j, p * load(dY, j) + (q * (load(X, j) - k) + r))


@native
def _apply_columns(
    dY: Array,
    X: Array,
    X_grad: Array,
    sums: Array,
    channels: int,
    size: int,
    left: int,
    right: int,
    first: int,
    end: int,
) -> None:
    """The same, row after row of all columns of these channels."""
    width, number_type = (right - left) * size, type(load(X, 0))
    columns = np.empty(4 * COLUMNS)
    for i in range(4):
        for j in range(width):
            store(columns, i * COLUMNS + j, load(sums, (left + j // size) * 4 + i))
    for n in range(first, end):
        at = (n * channels + left) * size
        for j in range(width):
            g, d = np.float64(load(dY, at + j)), np.float64(load(X, at + j)) - load(columns, 2 * COLUMNS + j)
            value = load(columns, j) * g + (load(columns, COLUMNS + j) * d + load(columns, 3 * COLUMNS + j))
            store(X_grad, at + j, number_type(value))


def batch_norm_internal(
    X: Array,
    scale: Array,
    B: Array,
    input_mean: Array,
    input_var: Array,
    Y: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    saved_mean: Array | None,
    saved_inv_std: Array | None,
    epsilon: float,
    momentum: float,
    training_mode: int,
) -> None:
    if scale.size == 0:
        return
    sizes, none = _sizes(X, scale.size), np.empty(0, input_mean.dtype)
    statistics = (running_mean, running_var, saved_mean, saved_inv_std)
    launch(
        _normalize,
        *(flat(a) for a in (X, scale, B, input_mean, input_var)),
        flat(np.empty(0, X.dtype) if Y is None else Y),
        *(flat(none if a is None else a) for a in statistics),
        workspace((sizes[1] * sizes[4] * 3,), np.float64),
        sizes,
        (float(epsilon), float(momentum)),
        training_mode != 0,
        bytes_touched=2 * X.nbytes,
    )


@native
def _normalize(
    X: Array,
    scale: Array,
    B: Array,
    mean: Array,
    variance: Array,
    Y: Array,
    running_mean: Array,
    running_var: Array,
    saved_mean: Array,
    saved_inv_std: Array,
    sums: Array,
    sizes: Sizes,
    settings: tuple[float, float],
    measured: bool,
    scheduler: int,
) -> None:
    _, channels, _, block, slices = sizes
    inputs, statistics = (X, scale, B, mean, variance), (running_mean, running_var, saved_mean, saved_inv_std)
    blocks = (channels + block - 1) // block
    if slices == 1:
        parallel(scheduler, blocks, _normalize_whole, (inputs, Y, statistics, sums, sizes, settings, measured))
        return
    if measured:
        parallel(scheduler, blocks * slices, _measure, (X, sums, sizes))
    parallel(scheduler, blocks, _tell, (inputs, statistics, sums, sizes, settings, measured))
    parallel(scheduler, blocks * slices, _scale, (X, Y, sums, sizes))


Statistics = tuple[Array, Array, Array, Array]


@native
def _normalize_whole(
    number: int,
    inputs: Inputs,
    Y: Array,
    statistics: Statistics,
    sums: Array,
    sizes: Sizes,
    settings: tuple[float, float],
    measured: bool,
) -> None:
    """All of a block of channels."""
    if measured:
        _measure(number, inputs[0], sums, sizes)
    _tell(number, inputs, statistics, sums, sizes, settings, measured)
    _scale(number, inputs[0], Y, sums, sizes)


@native
def _measure(number: int, X: Array, sums: Array, sizes: Sizes) -> None:
    """For each channel of a block the sums over a slice: of d and d², where d is x less a shift."""
    _, channels, size, block, slices = sizes
    first, end = _images(number % slices, sizes)
    left = number // slices * block
    right = min(channels, left + block)
    if size >= NARROW:
        for c in range(left, right):
            shift = _shift(c, X, X, size, True)
            total = square = 0.0
            for n in range(first, end):
                at = (n * channels + c) * size
                for j in range(at, at + size):
                    d = np.float64(load(X, j)) - shift
                    total = add_in_any_order(total, d)
                    square = add_in_any_order(square, d * d)
            store(sums, (number % slices * channels + c) * 3, total)
            store(sums, (number % slices * channels + c) * 3 + 1, square)
        return
    width = (right - left) * size
    shifts, totals, squares = np.empty(width), np.zeros(width), np.zeros(width)
    for j in range(width):
        store(shifts, j, _shift(left + j // size, X, X, size, True))
    for n in range(first, end):
        at = (n * channels + left) * size
        for j in range(width):
            d = np.float64(load(X, at + j)) - load(shifts, j)
            store(totals, j, load(totals, j) + d)
            store(squares, j, load(squares, j) + d * d)
    for c in range(left, right):
        total = square = 0.0
        for j in range((c - left) * size, (c - left + 1) * size):
            total += load(totals, j)
            square += load(squares, j)
        store(sums, (number % slices * channels + c) * 3, total)
        store(sums, (number % slices * channels + c) * 3 + 1, square)


@native
def _tell(
    number: int,
    inputs: Inputs,
    statistics: Statistics,
    sums: Array,
    sizes: Sizes,
    settings: tuple[float, float],
    measured: bool,
) -> None:
    """The statistics of a block of channels; the first slice's sums become p, k and r: Y = p · (x - k) + r."""
    X, scale, B, mean, variance = inputs
    running_mean, running_var, saved_mean, saved_inv_std = statistics
    images, channels, size, block, slices = sizes
    epsilon, momentum = settings
    share = 1 / max(1, images * size)
    for c in range(number * block, min(channels, (number + 1) * block)):
        now: float = np.float64(load(mean, c))
        spread: float = np.float64(load(variance, c))
        centre, square, new_mean, new_spread = now, spread, now, spread
        if measured:
            total = square = 0.0
            for s in range(slices):
                total += load(sums, (s * channels + c) * 3)
                square += load(sums, (s * channels + c) * 3 + 1)
            beyond = total * share
            square = square * share - beyond * beyond
            square = 0.0 if square < 0 else square
            centre = _shift(c, X, X, size, True) + beyond
            new_mean, new_spread = now * momentum + centre * (1 - momentum), spread * momentum + square * (1 - momentum)
        inv = 1 / np.sqrt(square + epsilon)
        if running_mean.size > 0:
            store(running_mean, c, type(load(running_mean, 0))(new_mean))
        if running_var.size > 0:
            store(running_var, c, type(load(running_var, 0))(new_spread))
        if saved_mean.size > 0:
            store(saved_mean, c, type(load(saved_mean, 0))(centre))
        if saved_inv_std.size > 0:
            store(saved_inv_std, c, type(load(saved_inv_std, 0))(inv))
        p = np.float64(load(scale, c)) * inv
        k = np.float64(type(load(X, 0))(centre))  # what of it a number like those of X can hold
        store(sums, c * 3, p)
        store(sums, c * 3 + 1, k)
        store(sums, c * 3 + 2, np.float64(load(B, c)) + p * (k - centre))


@native
def _scale(number: int, X: Array, Y: Array, sums: Array, sizes: Sizes) -> None:
    """Y of a block of channels, for a slice of the batch."""
    if Y.size == 0:
        return
    _, channels, size, block, slices = sizes
    first, end = _images(number % slices, sizes)
    left = number // slices * block
    right = min(channels, left + block)
    number_type = type(load(X, 0))  # float32 for half numbers
    if size >= NARROW:
        for c in range(left, right):
            p, k, r = (
                number_type(load(sums, c * 3)),
                number_type(load(sums, c * 3 + 1)),
                number_type(load(sums, c * 3 + 2)),
            )
            for n in range(first, end):
                at = (n * channels + c) * size
                for j in range(at, at + size):
                    store(Y, j, p * (load(X, j) - k) + r)
        return
    width = (right - left) * size
    columns = np.empty(3 * COLUMNS)
    for i in range(3):
        for j in range(width):
            store(columns, i * COLUMNS + j, load(sums, (left + j // size) * 3 + i))
    for n in range(first, end):
        at = (n * channels + left) * size
        for j in range(width):
            d = np.float64(load(X, at + j)) - load(columns, COLUMNS + j)
            store(Y, at + j, number_type(load(columns, j) * d + load(columns, 2 * COLUMNS + j)))
