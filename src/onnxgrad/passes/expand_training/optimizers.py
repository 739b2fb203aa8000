"""Optimizers, for one tensor or for sequences of them, and clipping by the norm of all gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.builder import builder_at_work, op
from onnxgrad.graph.cast import in_type, wide_type
from onnxgrad.graph.tensor import Number, Tensor
from onnxgrad.passes.expand_training.registry import expands, scalar, where
from onnxgrad.passes.expand_training.sequences import for_each, joined

FLOAT, DOUBLE = ir.DataType.FLOAT, ir.DataType.DOUBLE
TOO_SMALL = 1e-6  # what clipping adds to a norm


def _power(rate: float, step: Tensor) -> Tensor:
    """The rate to the power of the step, in float64."""
    base = builder_at_work().constant(rate, DOUBLE)
    return base ** in_type(scalar(step), DOUBLE)


def _moments(g: Tensor, m1: Tensor, m2: Tensor, alpha: float, beta: float) -> tuple[Tensor, Tensor]:
    return m1 * alpha + g * (1 - alpha), m2 * beta + g * (1 - beta) * g


def _done(signal: Tensor | None, like: Tensor) -> Tensor:
    """Whether there was an update, in the shape of `like`."""
    flag = builder_at_work().constant(True, ir.DataType.BOOL) if signal is None else scalar(signal)
    return op.Expand(flag, op.Shape(like))  # type: ignore[no-any-return]


def _update(
    function: Callable[..., Sequence[Tensor]], *sequences: Tensor, kept: Sequence[int], shared: Sequence[Tensor],
    signal: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """The sequences numbered `kept` after an update, if the signal says that there is one; float32 is the least."""

    def one(*given: Tensor) -> list[Tensor]:
        elements, numbers, flag = given[:count], given[count:last], given[last:]
        dtype = wide_type(*elements)
        new = function(*(in_type(t, dtype) for t in (*elements, *numbers)))
        pairs = [(elements[k], n) for k, n in zip(kept, new, strict=True)]
        return [where(flag[0] if flag else None, in_type(n, e.dtype), e) for e, n in pairs]

    count, last = len(sequences), len(sequences) + len(shared)
    return for_each(one, *sequences, shared=[*shared, *([] if signal is None else [scalar(signal)])])


@expands("AdamWOptimizer", in_place={1: 2, 2: 4, 3: 5})
def _adamw(
    lr: Tensor, step: Tensor, weights: Tensor, gradients: Tensor, momentums_1: Tensor, momentums_2: Tensor,
    update_signal: Tensor | None = None, *, alpha: float = 0.9, beta: float = 0.999, epsilon: float = 1e-8,
    weight_decay: float = 1e-2, correct_bias: int = 1, adam_mode: int = 0,
) -> list[Tensor]:  # fmt: skip
    if adam_mode not in (0, 1):
        raise ValueError(f"adam_mode is {adam_mode}, expected 0 (PyTorch's) or 1 (Hugging Face's)")
    # The powers are rounded before they are subtracted: after two steps that shows in the fifth digit.
    powers = [in_type(_power(rate, step), FLOAT) for rate in (alpha, beta)]
    corrections = [1 - p for p in powers] if correct_bias == 1 else [_one()] * 2

    def torchs(w: Tensor, g: Tensor, m1: Tensor, m2: Tensor, rate: Tensor, first: Tensor, second: Tensor) -> Any:
        m1, m2 = _moments(g, m1, m2, alpha, beta)
        decayed = w - w * rate * weight_decay if weight_decay else w
        return decayed - m1 * rate / ((op.Sqrt(m2 / second) + epsilon) * first), m1, m2

    def hugging_faces(w: Tensor, g: Tensor, m1: Tensor, m2: Tensor, rate: Tensor, corrected: Tensor) -> Any:
        m1, m2 = _moments(g, m1, m2, alpha, beta)
        moved = w - m1 * corrected / (op.Sqrt(m2) + epsilon)
        return moved - moved * (rate * weight_decay) if weight_decay else moved, m1, m2

    rate, (first, second) = scalar(lr), corrections
    shared = [rate, first, second] if adam_mode == 0 else [rate, rate * (op.Sqrt(second) / first)]
    sequences = weights, gradients, momentums_1, momentums_2
    function = torchs if adam_mode == 0 else hugging_faces
    return [
        _done(update_signal, step),
        *_update(function, *sequences, kept=(0, 2, 3), shared=shared, signal=update_signal),
    ]


def _one() -> Tensor:
    return builder_at_work().constant(1, FLOAT)


@expands("SGDOptimizerV2", in_place={1: 1})
def _sgd_of_all(lr: Tensor, weights: Tensor, gradients: Tensor, update_signal: Tensor | None = None) -> list[Tensor]:
    def step(w: Tensor, g: Tensor, rate: Tensor) -> list[Tensor]:
        return [w - g * rate]

    moved = _update(step, weights, gradients, kept=(0,), shared=[scalar(lr)], signal=update_signal)
    return [_done(update_signal, lr), *moved]


@expands("InplaceClipGradNorm")
def _clip(gradients: Tensor, *, max_norm: float = 1.0, norm_type: str = "fro") -> list[Tensor]:
    if norm_type != "fro":
        raise ValueError(f"norm_type is {norm_type!r}, expected 'fro'")

    def square(g: Tensor) -> list[Tensor]:
        return [op.Reshape(op.ReduceSumSquare(in_type(g, wide_type(g)), keepdims=0), [1])]

    (squares,) = for_each(square, gradients)
    norm = op.Sqrt(op.ReduceSum(joined(squares), keepdims=0))
    factor = op.Min(_number(max_norm, norm) / (norm + TOO_SMALL), 1)

    def scaled(g: Tensor, by: Tensor) -> list[Tensor]:
        return [in_type(in_type(g, by.dtype) * by, g.dtype)]

    return for_each(scaled, gradients, shared=[factor])


def _number(content: float, like: Tensor) -> Tensor:
    return builder_at_work().constant(content, like.dtype)


@expands("SGDOptimizer")
def _sgd(ETA: Tensor, W: Tensor, G: Tensor) -> list[Tensor]:
    dtype = wide_type(W, G)
    delta = -in_type(scalar(ETA), dtype) * in_type(G, dtype)
    return [in_type(in_type(W, dtype) + delta, W.dtype), in_type(delta, G.dtype)]


def _bias_correction(rate: float, step: Tensor, dtype: ir.DataType) -> Tensor:
    """1 - rate^step, and 1 before the first step."""
    correction = in_type(op.Where(scalar(step) > 0, 1 - _power(rate, step), 1.0), FLOAT)
    return in_type(correction, dtype)


def _divisor(loss_scale: Tensor | None, norm: Tensor | None, most: float, dtype: ir.DataType) -> Tensor | None:
    """What gradients are divided by: the scale of the loss, or what makes their norm the largest one allowed."""
    scale = None if loss_scale is None else in_type(scalar(loss_scale), dtype)
    if norm is None:
        return scale
    scale = builder_at_work().constant(1, dtype) if scale is None else scale
    wide = in_type(scalar(norm), dtype)
    return op.Where(wide > scale * most, wide / most, scale)  # type: ignore[no-any-return]


@expands("AdamOptimizer")
def _adam(
    R: Tensor, T: Tensor, weights: Tensor, gradients: Tensor, moment_1: Tensor, moment_2: Tensor,
    mixed_precision_weights: Tensor | None = None, loss_scale: Tensor | None = None,
    global_gradient_norm: Tensor | None = None, update_signal: Tensor | None = None, *, alpha: float = 0.9,
    beta: float = 0.999, epsilon: float = 1e-8, max_norm_clip: float = 1.0, do_bias_correction: int = 1,
    weight_decay_mode: int = 0, **more: Any,
) -> list[Tensor | None]:  # fmt: skip
    if weight_decay_mode not in (0, 1):
        raise ValueError(f"weight_decay_mode is {weight_decay_mode}, expected 0 (PyTorch's) or 1 (Hugging Face's)")
    decay = more.get("lambda", 0.0)  # which is a word of Python
    dtype = wide_type(weights)
    w, g, m1, m2, rate = (in_type(t, dtype) for t in (weights, gradients, moment_1, moment_2, scalar(R)))
    divisor = _divisor(loss_scale, global_gradient_norm, max_norm_clip, dtype)
    m1, m2 = _moments(g if divisor is None else g / divisor, m1, m2, alpha, beta)
    first, second = (_bias_correction(b, T, dtype) if do_bias_correction else _number(1, w) for b in (alpha, beta))
    if weight_decay_mode == 0:
        direction = m1 / first / (op.Sqrt(m2 / second) + epsilon)
        delta = -rate * (direction + w * decay if decay else direction)
    else:
        step = m1 * (rate * op.Sqrt(second) / first) / (op.Sqrt(m2) + epsilon)
        delta = -step - (w - step) * (rate * decay) if decay else -step
    new = w + delta
    pairs = (
        (T + 1, T), (m1, moment_1), (m2, moment_2), (new, weights), (delta, gradients), (new, mixed_precision_weights)
    )  # fmt: skip
    return [_taken_over(a, b, update_signal) for a, b in pairs]


def _taken_over(new: Tensor, old: Tensor | None, signal: Tensor | None) -> Tensor | None:
    """The new one in the type of the old one, if there is one, and if the signal says so."""
    return None if old is None else where(signal, in_type(new, old.dtype), old)


@expands("LambOptimizer")
def _lamb(
    update_signal: Tensor | None = None, loss_scale: Tensor | None = None, gradient_norm: Tensor | None = None,
    R: Tensor | None = None, step: Tensor | None = None, *tensors: Tensor | None, alpha: Sequence[float] = (),
    beta: Sequence[float] = (), epsilon: Sequence[float] = (), max_norm_clip: Sequence[float] = (),
    ratio_min: float = -np.inf, ratio_max: float = np.inf, do_bias_correction: int = 1, **more: Any,
) -> list[Tensor | None]:  # fmt: skip
    if R is None:
        raise ValueError("the input R, the learning rate, is missing")
    results: list[Tensor | None] = [None if step is None else _taken_over(step + 1, step, update_signal)]
    for k in range(0, len(tensors), 5):
        group = [*tensors[k : k + 5], None][:5]
        if any(t is None for t in group[:4]):
            raise ValueError(f"the {k // 5 + 1}. weight lacks its gradient or a moment")
        w, g, m1, m2, rounded = group
        assert w is not None and g is not None and m1 is not None and m2 is not None

        def setting(numbers: Sequence[float], default: float, at: int = k // 5) -> float:
            return numbers[at] if at < len(numbers) else float(np.float32(default))

        rates = setting(alpha, 0.9), setting(beta, 0.999)
        divisor = _divisor(loss_scale, gradient_norm, setting(max_norm_clip, 1.0), w.dtype)
        direction, *moments = _lamb_direction(
            w, g, m1, m2, divisor, rates, setting(more.get("lambda", ()), 0.0), setting(epsilon, 1e-6),
            step if do_bias_correction else None,
        )  # fmt: skip
        new, delta = _lamb_step(w, direction, in_type(scalar(R), w.dtype), ratio_min, ratio_max)
        pairs = (new, w), (delta, g), (moments[0], m1), (moments[1], m2), (new, rounded)
        results += [_taken_over(a, b, update_signal) for a, b in pairs]
    return results


def _finite(x: Tensor) -> Tensor:
    bad: Tensor = op.IsNaN(x) | op.IsInf(x)
    return ~bad


def _lamb_direction(
    w: Tensor, g: Tensor, m1: Tensor, m2: Tensor, divisor: Tensor | None, rates: tuple[float, float], decay: float,
    epsilon: float, step: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Where a weight is to move, rounded as the gradient is, and the moments; an infinite direction changes nothing."""
    dtype = w.dtype
    before = in_type(m1, dtype), in_type(m2, dtype)
    slope = in_type(g, dtype)
    new = _moments(slope if divisor is None else slope / divisor, *before, *rates)
    first, second = new
    if step is not None:
        first, second = (m / _bias_correction(b, step, dtype) for m, b in zip(new, rates, strict=True))
    direction = first / (op.Sqrt(second) + epsilon)
    direction = direction + w * decay if decay else direction
    ok = _finite(direction)
    rounded = in_type(in_type(op.Where(ok, direction, 0), g.dtype), dtype)
    return rounded, op.Where(ok, new[0], before[0]), op.Where(ok, new[1], before[1])


def _lamb_step(w: Tensor, direction: Tensor, rate: Tensor, least: float, most: float) -> tuple[Tensor, Tensor]:
    """The new weight and the difference: the rate is that of the norms of weight and direction, within bounds."""
    squares = [op.ReduceSumSquare(x, keepdims=0) for x in (w, direction)]
    ratio: Tensor = op.Sqrt(squares[0] / squares[1])
    bounds: list[Number] = [b if np.isfinite(b) else None for b in (least, most)]  # type: ignore[misc]
    ratio = op.Clip(ratio, *bounds) if bounds != [None, None] else ratio
    either = squares[0].equals(0) | squares[1].equals(0)
    delta = -direction * op.Where(either, rate, rate * ratio)
    new = w + delta
    ok = _finite(new)
    return op.Where(ok, new, w), op.Where(ok, delta, 0)
