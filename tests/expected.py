"""What the definition of each operator gives in float64, and how far a right kernel may be from it."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from tests.checks import (
    DEVIATIONS,
    NUDGES,
    PRECISION,
    REFERENCE,
    VALUE_ROUNDINGS,
    Expected,
    as_tuple,
    bound_of_sum,
    in_float64,
    result_dtype,
    with_storage,
)


def _exact(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """Nothing is computed, only placed: every bit counts."""
    expected = as_tuple(op.definition(*args, **kwargs))
    return expected, (None,) * len(expected)


def _sums(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """Every element is one sum; the definition itself counts the terms and adds up their absolute values."""

    def of(change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        wide = [in_float64(a) for a in args]
        return op.definition(*[change(w) if w is not a else a for w, a in zip(wide, args, strict=True)], **kwargs)

    precision = PRECISION[result_dtype(op, args, kwargs)]
    args = tuple(a.astype(a.dtype.newbyteorder("="), copy=True) if in_float64(a) is not a else a for a in args)
    expected, terms, absolute = of(lambda x: x), of(np.ones_like), of(lambda x: np.where(np.isfinite(x), np.abs(x), 0))
    bound = bound_of_sum(precision, terms, absolute) + bound_of_sum(REFERENCE, terms, absolute)
    return (expected,), (with_storage(precision, expected, bound),)


def _products(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """Every element is one sum of products, or of numbers; the definition itself counts its terms, as in `_sums`."""

    def of(change: Callable[[np.ndarray], np.ndarray]) -> tuple[Any, ...]:
        return op.definition(*(change(in_float64(np.asarray(a))) for a in args), **kwargs)

    precision = PRECISION[result_dtype(op, args, kwargs)]
    expected, terms, absolute = of(lambda x: x), of(np.ones_like), of(lambda x: np.where(np.isfinite(x), np.abs(x), 0))
    bounds: list[Any] = []
    for e, t, a in zip(expected, terms, absolute, strict=True):
        if e is None:
            bounds.append(None)
            continue
        bound = bound_of_sum(precision, t + 1, a) + bound_of_sum(REFERENCE, t + 1, a)
        bounds.append(with_storage(precision, e, bound))
    return expected, tuple(bounds)


def _recurrence(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """What nudging the inputs by the rounding of the longest sum does, measured."""
    precision = PRECISION[result_dtype(op, args, kwargs)]
    (S, N, inputs), (D, gates, hidden) = args[0].shape, args[2].shape
    nudge = precision.unit * np.sqrt(max(inputs + 2 * hidden, D * gates, S * N))
    wide = [in_float64(a) for a in args]
    expected = as_tuple(op.definition(*wide, **kwargs))
    rng = np.random.default_rng(0)
    squares: list[Any] = [0.0] * len(expected)
    for _ in range(NUDGES):
        nudged = [
            w * (1 + nudge * rng.choice([-1, 1], w.shape)) if isinstance(w, np.ndarray) and w.dtype.kind == "f" else w
            for w in wide
        ]
        for k, (e, n) in enumerate(zip(expected, as_tuple(op.definition(*nudged, **kwargs)), strict=True)):
            squares[k] = None if e is None else squares[k] + np.square(n - e)
    bounds: list[Any] = []
    for e, square in zip(expected, squares, strict=True):
        if e is None:
            bounds.append(None)
            continue
        typical = np.mean(square / NUDGES) if e.size else 0.0  # a few draws may spare an element by chance
        deviation = np.sqrt(square / NUDGES + typical)
        bounds.append(with_storage(precision, e, DEVIATIONS * deviation + VALUE_ROUNDINGS * precision.unit * np.abs(e)))
    return expected, tuple(bounds)


def _softmax(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """A sum along the axis, times a probability that may be an exponential, and a difference."""
    precision = PRECISION[result_dtype(op, args, kwargs)]
    g, y = (in_float64(np.asarray(a)) for a in args)
    expected = op.definition(g, y, **kwargs)
    axis, is_log = kwargs.get("axis", -1), op.name.startswith("Log")
    probability = np.exp(y) if is_log else np.abs(y)
    direct = np.abs(g) if is_log else np.abs(g * y)
    absolute = np.sum(direct, axis, keepdims=True)
    terms = np.full_like(absolute, y.shape[axis])
    bound = (bound_of_sum(precision, terms, absolute) + VALUE_ROUNDINGS * precision.unit * absolute) * probability
    return (expected,), (with_storage(precision, expected, bound + VALUE_ROUNDINGS * precision.unit * direct),)


def _layer_normalization(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """Sums of rows and of columns, of products of a few rounded factors."""
    precision = PRECISION[result_dtype(op, args, kwargs)]
    g, x, scale, *mean, inv = wide = [in_float64(np.asarray(a)) for a in args]
    expected, first = as_tuple(op.definition(*wide, **kwargs)), kwargs.get("axis", -1) % x.ndim
    over, rows, few = tuple(range(first, x.ndim)), tuple(range(first)), VALUE_ROUNDINGS * precision.unit
    xhat, scaled, count = np.abs((x - sum(mean)) * inv), np.abs(g * scale), max(1, scale.size)

    def off(terms: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        absolute, many = np.sum(terms, axes, keepdims=True), math.prod(terms.shape[a] for a in axes)
        return bound_of_sum(precision, np.full_like(absolute, many), absolute) + few * absolute

    values = scaled + (np.sum(scaled, over, keepdims=True) + xhat * np.sum(scaled * xhat, over, keepdims=True)) / count
    of_x = np.abs(inv) * ((off(scaled, over) + xhat * off(scaled * xhat, over)) / count + few * values)
    bounds = of_x, *(off(terms, rows).reshape(scale.shape) for terms in (np.abs(g) * xhat, np.abs(g)))
    pairs = zip(expected, bounds, strict=False)
    return expected, tuple(None if e is None else with_storage(precision, e, b) for e, b in pairs)


def _cross_entropy(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """A probability, which is an exponential, minus 1 or not, times a number over a sum of weights in float64."""
    precision = PRECISION[result_dtype(op, args, kwargs)]
    wide = [in_float64(a) for a in args]
    expected = op.definition(*wide, **kwargs)
    nothing = [wide[0], np.full_like(wide[1], -np.inf), *wide[2:]]  # no probability leaves what is taken off
    absolute = np.abs(expected) + 2 * np.abs(op.definition(*nothing, **kwargs))
    bound = VALUE_ROUNDINGS * precision.unit * absolute + 2 * bound_of_sum(REFERENCE, args[2].size, absolute)
    return (expected,), (with_storage(precision, expected, bound),)


def _losses(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """Differences to the highest score and to a logarithm, of a sum of exponentials; losses add up in float64."""
    precision = PRECISION[result_dtype(op, args, kwargs)]
    bound = inspect.signature(op.body).bind(*(in_float64(a) for a in args), **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    scores, labels, weights = given["scores"], given["labels"], given["weights"]
    expected = op.definition(**given)
    if not scores.size:
        return expected, tuple(None if e is None else np.zeros_like(e) for e in expected)
    losses, log_prob = op.definition(**{**given, "reduction": "none", "outputs": None})
    with np.errstate(invalid="ignore"):
        apart = scores - np.max(scores, 1, keepdims=True)
    few = VALUE_ROUNDINGS * precision.unit
    sizes = [np.where(np.isfinite(x), np.abs(x), 0) for x in (apart, log_prob, losses)]
    off = bound_of_sum(precision, scores.shape[1], 1.0) + few * (1 + sizes[0] + sizes[1])
    ignored = labels == (-1 if given["ignore_index"] is None else given["ignore_index"])
    chosen = np.where(ignored, 0, labels)
    counts = np.where(ignored, 0, 1 if weights is None else weights[chosen])
    of_loss = np.take_along_axis(off, np.expand_dims(chosen, 1), 1)[:, 0] * np.abs(counts) + few * sizes[2]
    if given["reduction"] != "none":
        of_loss = np.sum(of_loss) + bound_of_sum(REFERENCE, losses.size, np.sum(sizes[2]))
    if given["reduction"] == "mean":
        of_loss = of_loss / (np.abs(np.sum(counts)) or 1)
    pairs = zip(expected, (of_loss, off), strict=True)
    return expected, tuple(None if e is None else with_storage(precision, e, b) for e, b in pairs)


def _pools(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """Sums over windows, of numbers that come as they are or, for averages, divided; a lone one as it is is exact."""
    precision = PRECISION[result_dtype(op, args, kwargs)]
    dY, *others = (in_float64(a) for a in args)
    absolute = np.where(np.isfinite(dY), np.abs(dY), 0)
    expected, absolute, terms = (op.definition(g, *others, **kwargs) for g in (dY, absolute, np.ones_like(dY)))
    if op.name == "AveragePoolGrad":
        terms = np.full_like(terms, math.prod(kwargs["kernel_shape"]) + VALUE_ROUNDINGS)
    return (expected,), (with_storage(precision, expected, bound_of_sum(precision, terms, absolute)),)


def _derivatives(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """A gradient times a derivative, which is a few roundings off its largest term: of most activations about 1."""
    precision = PRECISION[result_dtype(op, args, kwargs)]
    g, x, *_ = wide = [in_float64(np.asarray(a)) for a in args]
    largest = g * {"SigmoidGrad": np.abs(x) + x * x, "TanhGrad": 1 + x * x}.get(op.name, 1.0)
    bound = VALUE_ROUNDINGS * precision.unit * np.where(np.isfinite(largest), np.abs(largest), 0)
    expected = op.definition(*wide, **kwargs)
    return (expected,), (with_storage(precision, expected, bound),)


def _permuted_mat_mul(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """Every element is one sum of products, times a number, of parts whose roundings are at most one more."""
    precision = PRECISION[result_dtype(op, args, kwargs)]
    wide = [in_float64(a) for a in args]
    expected = op.definition(*wide, **kwargs)
    absolute = op.definition(*(None if a is None else np.where(np.isfinite(a), np.abs(a), 0) for a in wide), **kwargs)
    depth = args[0].shape[kwargs["permA"][-1] if kwargs.get("permA") else -1]
    bound = bound_of_sum(precision, np.full_like(absolute, depth + 4), np.abs(absolute))
    return (expected,), (with_storage(precision, expected, bound),)


EXPECTED: dict[str, Callable[..., Expected]] = {
    "ReluGrad": _exact,
    "LeakyReluGrad": _derivatives,
    "SigmoidGrad": _derivatives,
    "TanhGrad": _derivatives,
    "GeluGrad": _derivatives,
    "FastGeluGrad": _derivatives,
    "QuickGeluGrad": _derivatives,
    "BiasGeluGrad_dX": _derivatives,
    "BiasFastGeluGrad_dX": _derivatives,
    "DropoutGrad": _exact,
    "LayerNormalizationGrad": _layer_normalization,
    "SimplifiedLayerNormalizationGrad": _layer_normalization,
    "SoftmaxGrad_13": _softmax,
    "LogSoftmaxGrad_13": _softmax,
    "SoftmaxCrossEntropyLossInternal": _losses,
    "SoftmaxCrossEntropyLossGrad": _cross_entropy,
    "MaxPoolGrad": _pools,
    "AveragePoolGrad": _pools,
    "ConvGrad": _products,
    "PermutedMatMul": _permuted_mat_mul,
    "GatherGrad": _sums,
    "GatherElementsGrad": _sums,
    "BroadcastGradientArgs": _exact,
    "SliceGrad": _exact,
    "SeededDropout": _exact,
    "AllReduceSum": _exact,
    "GRUTraining": _recurrence,
    "GRUGrad": _recurrence,
    "LSTMTraining": _recurrence,
    "LSTMGrad": _recurrence,
    "RNNGrad": _recurrence,
}
