"""Clipping and the optimizers' updates as nodes of a graph, in the arithmetic of cpu/core/optimizers.py."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad.graph.builder import op
from onnxgrad.graph.tensor import Tensor
from onnxgrad.train.optim import SGD, Adagrad, Adam, Lamb, Optimizer, RMSprop

Slots = Mapping[str, Tensor]
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
def updated(
    optimizer: Optimizer, p: Tensor, g: Tensor, slots: Slots, hyper: Sequence[Any], numbers: Mapping[str, Any],
    is_first: Tensor,
) -> Updated:  # fmt: skip
    """A parameter and its slots after an update; `hyper` are the numbers of optimizer.hyper(), in the parameter's type.

    `numbers` are the optimizer's settings for this parameter, `is_first` whether it is the first update.
    """
    raise NotImplementedError


def can_be_written(optimizer: Optimizer) -> bool:
    """Whether there is a form for graphs."""
    return updated.dispatch(type(optimizer)) is not updated.dispatch(Optimizer)


@updated.register
def _sgd(
    optimizer: SGD, p: Tensor, g: Tensor, slots: Slots, hyper: Sequence[Any], numbers: Mapping[str, Any],
    is_first: Tensor,
) -> Updated:  # fmt: skip
    rate, decay, momentum, keep, _ = hyper
    grad = _decayed(g, p, decay, numbers)
    if not numbers["momentum"]:
        return p - rate * grad, dict(slots)
    moved = op.Where(is_first, grad, momentum * slots["momentum"] + keep * grad)
    step = grad + momentum * moved if numbers["nesterov"] else moved
    return p - rate * step, {"momentum": moved}


@updated.register
def _adam(
    optimizer: Adam, p: Tensor, g: Tensor, slots: Slots, hyper: Sequence[Any], numbers: Mapping[str, Any],
    is_first: Tensor,
) -> Updated:  # fmt: skip
    """Both forms of AdamW, too."""
    _, beta1, beta2, eps, l2, before, after, rate = hyper
    grad = _decayed(g, p, l2, numbers) if type(optimizer) is Adam else g
    m, v = _means(slots, grad, numbers, beta1, beta2)
    now = p * before - rate * m / (op.Sqrt(v) + eps)
    if isinstance(after, Tensor):
        now = now - after * now
    return now, {"m": m, "v": v}


@updated.register
def _adagrad(
    optimizer: Adagrad, p: Tensor, g: Tensor, slots: Slots, hyper: Sequence[Any], numbers: Mapping[str, Any],
    is_first: Tensor,
) -> Updated:  # fmt: skip
    rate, decay, eps = hyper
    grad = _decayed(g, p, decay, numbers)
    total = slots["sum"] + grad * grad
    return p - rate * grad / (op.Sqrt(total) + eps), {"sum": total}


@updated.register
def _rmsprop(
    optimizer: RMSprop, p: Tensor, g: Tensor, slots: Slots, hyper: Sequence[Any], numbers: Mapping[str, Any],
    is_first: Tensor,
) -> Updated:  # fmt: skip
    rate, decay, eps, alpha, momentum = hyper
    grad = _decayed(g, p, decay, numbers)
    new = 1 - numbers["alpha"]
    after = dict(slots)
    after["square"] = spread = alpha * slots["square"] + new * grad * grad
    if optimizer.centered:
        after["mean"] = mean = alpha * slots["mean"] + new * grad
        spread = spread - mean * mean
    step = grad / (op.Sqrt(spread) + eps)
    if numbers["momentum"]:
        after["momentum"] = step = momentum * slots["momentum"] + step
    return p - rate * step, after


@updated.register
def _lamb(
    optimizer: Lamb, p: Tensor, g: Tensor, slots: Slots, hyper: Sequence[Any], numbers: Mapping[str, Any],
    is_first: Tensor,
) -> Updated:  # fmt: skip
    rate, beta1, beta2, eps, decay, corrected1, corrected2 = hyper
    m, v = _means(slots, g, numbers, beta1, beta2)
    step = (m / corrected1) / (op.Sqrt(v / corrected2) + eps) + decay * p
    weights, steps = (op.Sqrt(op.ReduceSumSquare(x, keepdims=0)) for x in (p, step))
    some = (weights > 0) & (steps > 0)
    ratio = op.Where(some, weights / op.Where(some, steps, 1.0), 1.0)
    return p - rate * ratio * step, {"m": m, "v": v}


def _means(slots: Slots, g: Tensor, numbers: Mapping[str, Any], beta1: Any, beta2: Any) -> tuple[Tensor, Tensor]:
    """Running means of gradients and of their squares; 1 - beta is rounded once."""
    new1, new2 = (1 - beta for beta in numbers["betas"])
    return beta1 * slots["m"] + new1 * g, beta2 * slots["v"] + new2 * g * g


def _decayed(g: Tensor, p: Tensor, decay: Any, numbers: Mapping[str, Any]) -> Tensor:
    return g + decay * p if numbers["weight_decay"] else g
