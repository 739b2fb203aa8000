"""The optimizers' updates on the CPU, as native code: one pass over parameters, gradients and state, on all cores.

`hyper` has a row for each group of parameters, in the order that optim.py writes them; the first column is the rate.
Numbers are computed in the parameters' own type, as PyTorch does; 1 - beta is rounded once, or a beta of 0.999 would be
off by 2e-5. A chunk is cut out of the arrays before it is gone through: indices that start at 0 let the compiler use
vector instructions, which makes AdamW three times as fast on a Xeon. cuda/core/optimizers.py
has the same functions for GPUs.
"""

import functools
import math

import numpy as np

from onnxgrad.cpu.core.jit import native
from onnxgrad.cpu.core.parallel import parallel

# Terms of a sum in the order that vector instructions take them, which is the same every time.
summing = functools.partial(native, fastmath={"contract", "reassoc"})


@native
def _sgd_chunk(k, chunks, hyper, all_p, all_g, all_moved, first):
    start, stop, group = chunks[k, 0], chunks[k, 1], chunks[k, 2]
    p, g = all_p[start:stop], all_g[start:stop]
    kind = p.dtype.type
    rate, decay = kind(hyper[group, 0]), kind(hyper[group, 1])
    momentum, keep = kind(hyper[group, 2]), kind(hyper[group, 3])
    if momentum == 0:
        for i in range(len(p)):
            p[i] -= rate * (g[i] + decay * p[i])
        return
    moved = all_moved[start:stop]
    if first:
        for i in range(len(p)):
            moved[i] = g[i] + decay * p[i]
    else:
        for i in range(len(p)):
            moved[i] = momentum * moved[i] + keep * (g[i] + decay * p[i])
    if hyper[group, 4] != 0:  # Nesterov
        for i in range(len(p)):
            p[i] -= rate * (g[i] + decay * p[i] + momentum * moved[i])
    else:
        for i in range(len(p)):
            p[i] -= rate * moved[i]


@native
def sgd(chunks, hyper, p, g, momentum_of, first, scheduler):
    """PyTorch's: the first step of the momentum is the gradient itself."""
    parallel(scheduler, len(chunks), _sgd_chunk, (chunks, hyper, p, g, momentum_of, first))


@native
def _adam_chunk(k, chunks, hyper, all_p, all_g, all_m, all_v):
    start, stop, group = chunks[k, 0], chunks[k, 1], chunks[k, 2]
    p, g, m, v = all_p[start:stop], all_g[start:stop], all_m[start:stop], all_v[start:stop]
    kind = p.dtype.type
    beta1, beta2, eps = kind(hyper[group, 1]), kind(hyper[group, 2]), kind(hyper[group, 3])
    new1, new2 = kind(1 - hyper[group, 1]), kind(1 - hyper[group, 2])
    l2, before, after = kind(hyper[group, 4]), kind(hyper[group, 5]), kind(hyper[group, 6])
    rate = kind(hyper[group, 7])
    for i in range(len(p)):
        grad = g[i] + l2 * p[i]
        m[i] = beta1 * m[i] + new1 * grad
        v[i] = beta2 * v[i] + new2 * grad * grad
        now = p[i] * before
        now -= rate * m[i] / (math.sqrt(v[i]) + eps)
        p[i] = now - after * now


@native
def adam(chunks, hyper, p, g, m, v, scheduler):
    """Adam and both forms of AdamW, which differ in the numbers they are given (optim.py)."""
    parallel(scheduler, len(chunks), _adam_chunk, (chunks, hyper, p, g, m, v))


@native
def _adagrad_chunk(k, chunks, hyper, all_p, all_g, all_total):
    start, stop, group = chunks[k, 0], chunks[k, 1], chunks[k, 2]
    p, g, total = all_p[start:stop], all_g[start:stop], all_total[start:stop]
    kind = p.dtype.type
    rate, decay, eps = kind(hyper[group, 0]), kind(hyper[group, 1]), kind(hyper[group, 2])
    for i in range(len(p)):
        grad = g[i] + decay * p[i]
        total[i] += grad * grad
        p[i] -= rate * grad / (math.sqrt(total[i]) + eps)


@native
def adagrad(chunks, hyper, p, g, total, scheduler):
    parallel(scheduler, len(chunks), _adagrad_chunk, (chunks, hyper, p, g, total))


@native
def _rmsprop_chunk(k, chunks, hyper, all_p, all_g, all_square, all_mean, all_moved, centered):
    start, stop, group = chunks[k, 0], chunks[k, 1], chunks[k, 2]
    p, g, square = all_p[start:stop], all_g[start:stop], all_square[start:stop]
    mean, moved = all_mean[start:stop], all_moved[start:stop]
    kind = p.dtype.type
    rate, decay, eps = kind(hyper[group, 0]), kind(hyper[group, 1]), kind(hyper[group, 2])
    alpha, new, momentum = kind(hyper[group, 3]), kind(1 - hyper[group, 3]), kind(hyper[group, 4])
    for i in range(len(p)):
        grad = g[i] + decay * p[i]
        square[i] = alpha * square[i] + new * grad * grad
        spread = square[i]
        if centered:
            mean[i] = alpha * mean[i] + new * grad
            spread -= mean[i] * mean[i]
        step = grad / (math.sqrt(spread) + eps)
        if momentum != 0:
            moved[i] = momentum * moved[i] + step
            step = moved[i]
        p[i] -= rate * step


@native
def rmsprop(chunks, hyper, p, g, square, mean, momentum_of, centered, scheduler):
    """Arrays that a choice does not need may be empty."""
    parallel(scheduler, len(chunks), _rmsprop_chunk, (chunks, hyper, p, g, square, mean, momentum_of, centered))


@summing
def _lamb_direction_chunk(k, chunks, hyper, all_p, all_g, all_m, all_v, all_directions, sums):
    start, stop, group = chunks[k, 0], chunks[k, 1], chunks[k, 2]
    p, g, m, v = all_p[start:stop], all_g[start:stop], all_m[start:stop], all_v[start:stop]
    direction = all_directions[start:stop]
    kind = p.dtype.type
    beta1, beta2, eps = kind(hyper[group, 1]), kind(hyper[group, 2]), kind(hyper[group, 3])
    new1, new2 = kind(1 - hyper[group, 1]), kind(1 - hyper[group, 2])
    decay, corrected1, corrected2 = kind(hyper[group, 4]), kind(hyper[group, 5]), kind(hyper[group, 6])
    weights = steps = 0.0
    for i in range(len(p)):
        m[i] = beta1 * m[i] + new1 * g[i]
        v[i] = beta2 * v[i] + new2 * g[i] * g[i]
        step = (m[i] / corrected1) / (math.sqrt(v[i] / corrected2) + eps) + decay * p[i]
        direction[i] = step
        weights += np.float64(p[i]) * np.float64(p[i])
        steps += np.float64(step) * np.float64(step)
    sums[k, 0] = weights
    sums[k, 1] = steps


@native
def _lamb_move_chunk(k, chunks, hyper, all_p, all_directions, ratios):
    start, stop, group, number = chunks[k, 0], chunks[k, 1], chunks[k, 2], chunks[k, 3]
    p, direction = all_p[start:stop], all_directions[start:stop]
    rate = p.dtype.type(hyper[group, 0] * ratios[number])
    for i in range(len(p)):
        p[i] -= rate * direction[i]


@native
def lamb_direction(chunks, hyper, p, g, m, v, direction, sums, scheduler):
    """Adam's step, and the sums of squares of weights and step for each chunk."""
    parallel(scheduler, len(chunks), _lamb_direction_chunk, (chunks, hyper, p, g, m, v, direction, sums))


@native
def lamb_ratios(chunks, sums, ratios, scheduler):
    """The size of each parameter over that of its step."""
    totals = np.zeros((len(ratios), 2))
    for k in range(len(chunks)):  # in order, whichever thread has added up what
        totals[chunks[k, 3], 0] += sums[k, 0]
        totals[chunks[k, 3], 1] += sums[k, 1]
    for number in range(len(ratios)):
        weights, steps = math.sqrt(totals[number, 0]), math.sqrt(totals[number, 1])
        ratios[number] = weights / steps if weights > 0 and steps > 0 else 1.0


@native
def lamb_move(chunks, hyper, p, direction, ratios, scheduler):
    """The step, scaled for each parameter by its ratio."""
    parallel(scheduler, len(chunks), _lamb_move_chunk, (chunks, hyper, p, direction, ratios))


@summing
def _square_chunk(k, chunks, all_g, sums):
    g = all_g[chunks[k, 0] : chunks[k, 1]]
    total = 0.0
    for i in range(len(g)):
        number = np.float64(g[i])  # to Numba, float() of a float32 number is one, whose square may overflow
        total += number * number
    sums[k] = total


@native
def squares(chunks, g, sums, scheduler):
    """The sum of squares of each chunk, in float64."""
    parallel(scheduler, len(chunks), _square_chunk, (chunks, g, sums))


@native
def _average_chunk(k, chunks, all_p, all_averages, weight):
    start, stop = chunks[k, 0], chunks[k, 1]
    p, average = all_p[start:stop], all_averages[start:stop]
    if weight < 0.5:  # either form is the one that rounds less, and exact at its end
        new = p.dtype.type(weight)
        for i in range(len(p)):
            average[i] += new * (p[i] - average[i])
    else:
        old = p.dtype.type(1 - weight)
        for i in range(len(p)):
            average[i] = p[i] - old * (p[i] - average[i])


@native
def average(chunks, p, averages, weight, scheduler):
    """averages += weight · (p - averages), as torch.lerp computes it"""
    parallel(scheduler, len(chunks), _average_chunk, (chunks, p, averages, weight))


@native
def _scale_chunk(k, chunks, all_g, factor):
    g = all_g[chunks[k, 0] : chunks[k, 1]]
    by = g.dtype.type(factor)
    for i in range(len(g)):
        g[i] *= by


@native
def scale(chunks, g, factor, scheduler):
    """g *= factor"""
    parallel(scheduler, len(chunks), _scale_chunk, (chunks, g, factor))


@native
def _clamp_chunk(k, chunks, all_g, limit):
    g = all_g[chunks[k, 0] : chunks[k, 1]]
    most = g.dtype.type(limit)
    for i in range(len(g)):
        g[i] = min(max(g[i], -most), most)


@native
def clamp(chunks, g, limit, scheduler):
    """g within ± limit"""
    parallel(scheduler, len(chunks), _clamp_chunk, (chunks, g, limit))


@native
def _add_chunk(k, chunks, all_totals, all_g):
    total, g = all_totals[chunks[k, 0] : chunks[k, 1]], all_g[chunks[k, 0] : chunks[k, 1]]
    for i in range(len(g)):
        total[i] += g[i]


@native
def add(chunks, total, g, scheduler):
    """total += g"""
    parallel(scheduler, len(chunks), _add_chunk, (chunks, total, g))
