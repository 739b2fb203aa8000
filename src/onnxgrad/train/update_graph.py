"""Clipping and the optimizers' updates as nodes of a graph, in the arithmetic of cpu/core/optimizers.py."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import onnx_ir as ir

from onnxgrad.graph.builder import op
from onnxgrad.graph.tensor import Tensor
from onnxgrad.train.optim import SGD, Adagrad, Adam, Lamb, Optimizer, RMSprop


class Now(NamedTuple):
    """What an update of one parameter starts from."""

    p: Tensor  # the parameter
    g: Tensor  # its gradient
    slots: Mapping[str, Tensor]
    hyper: Sequence[Any]  # the numbers of optimizer.hyper(), in the parameter's type
    numbers: Mapping[str, Any]  # the optimizer's settings for this parameter
    is_first: Tensor  # whether it is the first update


Updated = tuple[Tensor, dict[str, Tensor]]  # a parameter and its slots after the update


def clipped(gradients: Sequence[Tensor], norm: float | None, value: float | None) -> list[Tensor]:
    """The gradients, with the norm of all together and each number bounded."""
    if norm is not None:
        squares = [op.Cast(op.ReduceSumSquare(g, keepdims=0), to=ir.DataType.DOUBLE) for g in gradients]
        total = op.Sqrt(op.Sum(*squares))
        factor = op.Where(total > norm, norm / (total + 1e-6), 1.0)
        gradients = [g * op.CastLike(factor, g) for g in gradients]
    if value is not None:
        gradients = [op.Min(op.Max(g, -value), value) for g in gradients]
    return list(gradients)


@functools.singledispatch
def updated(optimizer: Optimizer, now: Now) -> Updated:
    """A parameter and its slots after an update."""
    raise NotImplementedError


def can_be_written(optimizer: Optimizer) -> bool:
    """Whether there is a form for graphs: a class of somebody's that derives from one of ours may do something else."""
    kind = type(optimizer)
    return kind.__module__ == Optimizer.__module__ and updated.dispatch(kind) is not updated.dispatch(Optimizer)


@updated.register
def _sgd(optimizer: SGD, now: Now) -> Updated:
    p, (rate, decay, momentum, keep, _) = now.p, now.hyper
    grad = _decayed(now, decay)
    if not now.numbers["momentum"]:
        return p - rate * grad, dict(now.slots)
    moved = op.Where(now.is_first, grad, momentum * now.slots["momentum"] + keep * grad)
    step = grad + momentum * moved if now.numbers["nesterov"] else moved
    return p - rate * step, {"momentum": moved}


@updated.register
def _adam(optimizer: Adam, now: Now) -> Updated:
    """Both forms of AdamW, too."""
    _, beta1, beta2, eps, l2, before, after, rate = now.hyper
    grad = _decayed(now, l2) if type(optimizer) is Adam else now.g
    m, v = _means(now, grad, beta1, beta2)
    p = now.p * before - rate * m / (op.Sqrt(v) + eps)
    if isinstance(after, Tensor):
        p = p - after * p
    return p, {"m": m, "v": v}


@updated.register
def _adagrad(optimizer: Adagrad, now: Now) -> Updated:
    rate, decay, eps = now.hyper
    grad = _decayed(now, decay)
    total = now.slots["sum"] + grad * grad
    return now.p - rate * grad / (op.Sqrt(total) + eps), {"sum": total}


@updated.register
def _rmsprop(optimizer: RMSprop, now: Now) -> Updated:
    rate, decay, eps, alpha, momentum = now.hyper
    grad = _decayed(now, decay)
    new = 1 - now.numbers["alpha"]
    after = dict(now.slots)
    after["square"] = spread = alpha * after["square"] + new * grad * grad
    if optimizer.centered:
        after["mean"] = mean = alpha * after["mean"] + new * grad
        spread = spread - mean * mean
    step = grad / (op.Sqrt(spread) + eps)
    if now.numbers["momentum"]:
        after["momentum"] = step = momentum * after["momentum"] + step
    return now.p - rate * step, after


@updated.register
def _lamb(optimizer: Lamb, now: Now) -> Updated:
    p, (rate, beta1, beta2, eps, decay, corrected1, corrected2) = now.p, now.hyper
    m, v = _means(now, now.g, beta1, beta2)
    step = (m / corrected1) / (op.Sqrt(v / corrected2) + eps) + decay * p
    weights, steps = (op.Sqrt(op.ReduceSumSquare(x, keepdims=0)) for x in (p, step))
    some = (weights > 0) & (steps > 0)
    ratio = op.Where(some, weights / op.Where(some, steps, 1.0), 1.0)
    return p - rate * ratio * step, {"m": m, "v": v}


def _means(now: Now, grad: Tensor, beta1: Any, beta2: Any) -> tuple[Tensor, Tensor]:
    """Running means of gradients and of their squares; 1 - beta is rounded once."""
    new1, new2 = (1 - beta for beta in now.numbers["betas"])
    return beta1 * now.slots["m"] + new1 * grad, beta2 * now.slots["v"] + new2 * grad * grad


def _decayed(now: Now, decay: Any) -> Tensor:
    """The gradient with weight decay."""
    return now.g + decay * now.p if now.numbers["weight_decay"] else now.g
