"""The optimizers' updates on the CPU, as native code: one pass over parameters, gradients and state, on all cores.

`hyper` has a row for each group of parameters, in the order that optim.py writes them; the first column is the rate.
Numbers are computed in the parameters' own type, as PyTorch does. update_cuda.py has the same functions for GPUs.
"""

import math

import numpy as np

from onnxgrad.cpu.core.jit import native
from onnxgrad.cpu.core.parallel import parallel


@native
def _sgd_piece(k, pieces, hyper, p, g, momentum_of, first):
    start, stop, group = pieces[k, 0], pieces[k, 1], pieces[k, 2]
    kind = p.dtype.type
    rate, decay, momentum, keep = (
        kind(hyper[group, 0]),
        kind(hyper[group, 1]),
        kind(hyper[group, 2]),
        kind(hyper[group, 3]),
    )
    nesterov = hyper[group, 4] != 0
    for i in range(start, stop):
        step = g[i] + decay * p[i]
        if momentum != 0:
            momentum_of[i] = step if first else momentum * momentum_of[i] + keep * step
            step = step + momentum * momentum_of[i] if nesterov else momentum_of[i]
        p[i] -= rate * step


@native
def sgd(pieces, hyper, p, g, momentum_of, first, scheduler):
    """PyTorch's: the first step of the momentum is the gradient itself."""
    parallel(scheduler, len(pieces), _sgd_piece, (pieces, hyper, p, g, momentum_of, first))


@native
def _adam_piece(k, pieces, hyper, p, g, m, v):
    start, stop, group = pieces[k, 0], pieces[k, 1], pieces[k, 2]
    kind = p.dtype.type
    beta1, beta2, eps = kind(hyper[group, 1]), kind(hyper[group, 2]), kind(hyper[group, 3])
    l2, before, after = kind(hyper[group, 4]), kind(hyper[group, 5]), kind(hyper[group, 6])
    rate, root = kind(hyper[group, 7]), kind(hyper[group, 8])
    one = kind(1)
    for i in range(start, stop):
        grad = g[i] + l2 * p[i]
        m[i] = beta1 * m[i] + (one - beta1) * grad
        v[i] = beta2 * v[i] + (one - beta2) * grad * grad
        now = p[i] * before
        now -= rate * m[i] / (math.sqrt(v[i]) / root + eps)
        p[i] = now - after * now


@native
def adam(pieces, hyper, p, g, m, v, scheduler):
    """Adam and both forms of AdamW, which differ in the numbers they are given (optim.py)."""
    parallel(scheduler, len(pieces), _adam_piece, (pieces, hyper, p, g, m, v))


@native
def _adagrad_piece(k, pieces, hyper, p, g, total):
    start, stop, group = pieces[k, 0], pieces[k, 1], pieces[k, 2]
    kind = p.dtype.type
    rate, decay, eps = kind(hyper[group, 0]), kind(hyper[group, 1]), kind(hyper[group, 2])
    for i in range(start, stop):
        grad = g[i] + decay * p[i]
        total[i] += grad * grad
        p[i] -= rate * grad / (math.sqrt(total[i]) + eps)


@native
def adagrad(pieces, hyper, p, g, total, scheduler):
    parallel(scheduler, len(pieces), _adagrad_piece, (pieces, hyper, p, g, total))


@native
def _rmsprop_piece(k, pieces, hyper, p, g, square, mean, momentum_of, centered):
    start, stop, group = pieces[k, 0], pieces[k, 1], pieces[k, 2]
    kind = p.dtype.type
    rate, decay, eps = kind(hyper[group, 0]), kind(hyper[group, 1]), kind(hyper[group, 2])
    alpha, momentum, one = kind(hyper[group, 3]), kind(hyper[group, 4]), kind(1)
    for i in range(start, stop):
        grad = g[i] + decay * p[i]
        square[i] = alpha * square[i] + (one - alpha) * grad * grad
        spread = square[i]
        if centered:
            mean[i] = alpha * mean[i] + (one - alpha) * grad
            spread -= mean[i] * mean[i]
        step = grad / (math.sqrt(spread) + eps)
        if momentum != 0:
            momentum_of[i] = momentum * momentum_of[i] + step
            step = momentum_of[i]
        p[i] -= rate * step


@native
def rmsprop(pieces, hyper, p, g, square, mean, momentum_of, centered, scheduler):
    """Arrays that a choice does not need may be empty."""
    parallel(scheduler, len(pieces), _rmsprop_piece, (pieces, hyper, p, g, square, mean, momentum_of, centered))


@native
def _lamb_direction(k, pieces, hyper, p, g, m, v, direction, sums):
    start, stop, group = pieces[k, 0], pieces[k, 1], pieces[k, 2]
    kind = p.dtype.type
    beta1, beta2, eps = kind(hyper[group, 1]), kind(hyper[group, 2]), kind(hyper[group, 3])
    decay, corrected1, corrected2, one = kind(hyper[group, 4]), kind(hyper[group, 5]), kind(hyper[group, 6]), kind(1)
    weights = steps = 0.0
    for i in range(start, stop):
        m[i] = beta1 * m[i] + (one - beta1) * g[i]
        v[i] = beta2 * v[i] + (one - beta2) * g[i] * g[i]
        step = (m[i] / corrected1) / (math.sqrt(v[i] / corrected2) + eps) + decay * p[i]
        direction[i] = step
        weights += float(p[i]) * float(p[i])
        steps += float(step) * float(step)
    sums[k, 0] = weights
    sums[k, 1] = steps


@native
def _lamb_move(k, pieces, hyper, p, direction, ratios):
    start, stop, group, number = pieces[k, 0], pieces[k, 1], pieces[k, 2], pieces[k, 3]
    rate = p.dtype.type(hyper[group, 0] * ratios[number])
    for i in range(start, stop):
        p[i] -= rate * direction[i]


@native
def lamb(pieces, hyper, p, g, m, v, direction, sums, ratios, scheduler):
    """Steps scaled by the size of each parameter over that of its step; `direction` and the rest is working memory."""
    parallel(scheduler, len(pieces), _lamb_direction, (pieces, hyper, p, g, m, v, direction, sums))
    totals = np.zeros((len(ratios), 2))
    for k in range(len(pieces)):  # in order, whichever thread has added up what
        totals[pieces[k, 3], 0] += sums[k, 0]
        totals[pieces[k, 3], 1] += sums[k, 1]
    for number in range(len(ratios)):
        weights, steps = math.sqrt(totals[number, 0]), math.sqrt(totals[number, 1])
        ratios[number] = weights / steps if weights > 0 and steps > 0 else 1.0
    parallel(scheduler, len(pieces), _lamb_move, (pieces, hyper, p, direction, ratios))


@native
def _square_piece(k, pieces, g, sums):
    total = 0.0
    for i in range(pieces[k, 0], pieces[k, 1]):
        total += float(g[i]) * float(g[i])
    sums[k] = total


@native
def squares(pieces, g, sums, scheduler):
    """The sum of squares of each piece, in float64."""
    parallel(scheduler, len(pieces), _square_piece, (pieces, g, sums))


@native
def _scale_piece(k, pieces, g, factor):
    by = g.dtype.type(factor)
    for i in range(pieces[k, 0], pieces[k, 1]):
        g[i] *= by


@native
def scale(pieces, g, factor, scheduler):
    """g *= factor"""
    parallel(scheduler, len(pieces), _scale_piece, (pieces, g, factor))


@native
def _clamp_piece(k, pieces, g, limit):
    most = g.dtype.type(limit)
    for i in range(pieces[k, 0], pieces[k, 1]):
        g[i] = min(max(g[i], -most), most)


@native
def clamp(pieces, g, limit, scheduler):
    """g within ± limit"""
    parallel(scheduler, len(pieces), _clamp_piece, (pieces, g, limit))


@native
def _add_piece(k, pieces, total, g):
    for i in range(pieces[k, 0], pieces[k, 1]):
        total[i] += g[i]


@native
def add(pieces, total, g, scheduler):
    """total += g"""
    parallel(scheduler, len(pieces), _add_piece, (pieces, total, g))
