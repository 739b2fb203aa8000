"""What the definition of each operator gives in float64, and how far a right kernel may be from it."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tests.checks import (
    DEVIATIONS,
    NUDGES,
    PRECISION,
    REFERENCE,
    VALUE_ROUNDINGS,
    Expected,
    Precision,
    as_tuple,
    bound_of_sum,
    in_float64,
    result_dtype,
    result_dtypes,
    with_storage,
)


def exact(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """Nothing is computed, only placed: every bit counts."""
    expected = as_tuple(op.definition(*args, **kwargs))
    return expected, (None,) * len(expected)


def sums(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """Every element is one sum; the definition itself counts the terms and adds up their absolute values."""

    def of(change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        wide = [in_float64(a) for a in args]
        return op.definition(*[change(w) if w is not a else a for w, a in zip(wide, args, strict=True)], **kwargs)

    precision = PRECISION[result_dtype(op, args, kwargs)]
    args = tuple(a.astype(a.dtype.newbyteorder("="), copy=True) if in_float64(a) is not a else a for a in args)
    expected, terms, absolute = of(lambda x: x), of(np.ones_like), of(lambda x: np.where(np.isfinite(x), np.abs(x), 0))
    bound = bound_of_sum(precision, terms, absolute) + bound_of_sum(REFERENCE, terms, absolute)
    return (expected,), (with_storage(precision, expected, bound),)


def products(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """Every element is one sum of products, or of numbers; the definition itself counts its terms, as in `_sums`."""

    def of(change: Callable[[np.ndarray], np.ndarray]) -> tuple[Any, ...]:
        return as_tuple(
            op.definition(*(None if a is None else change(in_float64(np.asarray(a))) for a in args), **kwargs)
        )

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


def recurrence(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """What nudging the inputs by the rounding of the longest sum does, measured."""
    precision = PRECISION[result_dtype(op, args, kwargs)]
    (S, N, inputs), (D, gates, hidden) = args[0].shape, args[2].shape
    nudge = precision.unit * np.sqrt(max(inputs + 2 * hidden, D * gates, S * N))
    return by_nudges(op.definition, args, kwargs, [PRECISION[t] for t in result_dtypes(op, args, kwargs)], nudge)


def by_nudges(
    definition: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    precisions: Sequence[Precision],
    nudge: float,
) -> Expected:
    """What the definition gives, and what nudging its inputs by that part of theirs does to it, measured."""
    wide = [in_float64(a) for a in args]
    expected = as_tuple(definition(*wide, **kwargs))
    rng = np.random.default_rng(0)
    squares: list[Any] = [0.0] * len(expected)
    for _ in range(NUDGES):
        nudged = [
            w * (1 + nudge * rng.choice([-1, 1], w.shape)) if isinstance(w, np.ndarray) and w.dtype.kind == "f" else w
            for w in wide
        ]
        for k, (e, n) in enumerate(zip(expected, as_tuple(definition(*nudged, **kwargs)), strict=True)):
            squares[k] = None if e is None else squares[k] + np.square(n - e)
    bounds: list[Any] = []
    for e, square, precision in zip(expected, squares, precisions, strict=True):
        if e is None:
            bounds.append(None)
            continue
        typical = np.mean(square / NUDGES) if e.size else 0.0  # a few draws may spare an element by chance
        deviation = np.sqrt(square / NUDGES + typical)
        bounds.append(with_storage(precision, e, DEVIATIONS * deviation + VALUE_ROUNDINGS * precision.unit * np.abs(e)))
    return expected, tuple(bounds)


def reads(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], roundings: float, terms: float, scale: float
) -> Expected:
    """Of dY and an image read at places, the third input: what moving these by roundings does, and those of the sums.

    `terms` is how many a sum has at most; none is larger than the largest of dY and of the image, times `scale`.
    """
    precision = PRECISION[result_dtype(op, args, kwargs)]
    dY, X, places = (in_float64(np.asarray(a)) for a in args[:3])
    results = op.definition(dY, X, places, *args[3:], **kwargs)
    rng = np.random.default_rng(0)
    size = roundings * precision.unit * (1 + np.abs(places))
    nudged = [places + size * rng.choice([-1, 1], places.shape) for _ in range(NUDGES)]
    moved = [op.definition(dY, X, there, *args[3:], **kwargs) for there in nudged]
    largest_g, largest_x = (np.abs(a[np.isfinite(a)]).max(initial=0) for a in (dY, X))
    largest = largest_g * max(1, largest_x) * scale
    bounds = []
    for k, result in enumerate(results):
        if result is None:
            bounds.append(None)
            continue
        square = np.mean([np.square(m[k] - result) for m in moved], axis=0)
        deviation = np.sqrt(square + np.mean(square))
        bound = DEVIATIONS * deviation + bound_of_sum(precision, np.sqrt(terms), np.abs(result) + largest)
        bounds.append(with_storage(precision, result, bound))
    return results, tuple(bounds)


def pools(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """Sums over windows, of numbers that come as they are or, for averages, divided; a lone one as it is is exact."""
    precision = PRECISION[result_dtype(op, args, kwargs)]
    dY, *others = (in_float64(a) for a in args)
    absolute = np.where(np.isfinite(dY), np.abs(dY), 0)
    expected, absolute, terms = (op.definition(g, *others, **kwargs) for g in (dY, absolute, np.ones_like(dY)))
    if op.name == "AveragePoolGrad":
        terms = np.full_like(terms, math.prod(kwargs["kernel_shape"]) + VALUE_ROUNDINGS)
    return (expected,), (with_storage(precision, expected, bound_of_sum(precision, terms, absolute)),)


def derivatives(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    """A gradient times a derivative, which is a few roundings off its largest term: of most activations about 1."""
    precision = PRECISION[result_dtype(op, args, kwargs)]
    g, x, *_ = wide = [in_float64(np.asarray(a)) for a in args]
    largest = g * {"SigmoidGrad": np.abs(x) + x * x, "TanhGrad": 1 + x * x}.get(op.name, 1.0)
    bound = VALUE_ROUNDINGS * precision.unit * np.where(np.isfinite(largest), np.abs(largest), 0)
    expected = op.definition(*wide, **kwargs)
    return (expected,), (with_storage(precision, expected, bound),)
