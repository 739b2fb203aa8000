"""GRU, LSTM and RNN: their shared attributes, the shapes of their inputs, and the lengths of rows."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from onnxgrad.arguments import length_error
from onnxgrad.ops.families.activations import Chosen, choose
from onnxgrad.schema import Dim, Known, agree
from onnxgrad.tensor_types import Array

ATTRIBUTES = ("direction", "activations", "activation_alpha", "activation_beta", "clip")  # of all three operators
DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


class Direction(NamedTuple):
    """One direction of a recurrent operator."""

    backwards: bool  # whether it takes the last step first
    activations: tuple[Chosen, ...]  # as many as the operator has defaults


class Settings(NamedTuple):
    """The ATTRIBUTES, checked."""

    directions: tuple[Direction, ...]
    clip: float | None  # None: no clipping


def settings(
    defaults: Sequence[str],
    direction: str = "forward",
    activations: Sequence[str] | None = None,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    clip: float | None = None,
) -> Settings:
    """The ATTRIBUTES of an operator whose activations are `defaults` unless it names others; raises for bad ones."""
    lists = (None if v is None else tuple(v) for v in (activations, activation_alpha, activation_beta))
    return _settings(tuple(defaults), direction, *lists, clip)


@functools.lru_cache  # every call of an operator asks twice, for its shapes and for its kernel
def _settings(
    defaults: tuple[str, ...],
    direction: str,
    activations: tuple[str, ...] | None,
    activation_alpha: tuple[float, ...] | None,
    activation_beta: tuple[float, ...] | None,
    clip: float | None,
) -> Settings:
    if direction not in DIRECTIONS:
        raise ValueError(f"direction is {direction!r}, expected one of {', '.join(DIRECTIONS)}")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip is {clip}, expected more than 0, or nothing for no clipping")
    every, count = DIRECTIONS[direction], len(defaults)
    chosen = choose(activations, activation_alpha, activation_beta, defaults, len(every))
    directions = (Direction(back, tuple(chosen[d * count : (d + 1) * count])) for d, back in enumerate(every))
    return Settings(tuple(directions), None if clip == float("inf") else clip)


class Sizes(NamedTuple):
    """The dimensions of a recurrent operator, as far as they are known."""

    steps: Dim
    rows: Dim
    inputs: Dim
    directions: int
    hidden: Dim


def expect(name: str, given: Known | None, *dims: Dim) -> None:
    """Raises if an input that is there cannot have this shape."""
    if given is not None and given.dims is not None and not agree(given.dims, dims):
        raise ValueError(f"{name} has shape {list(given.dims)}, expected {list(dims)}")


def times(count: int, dim: Dim) -> Dim:
    """A multiple of a dimension, if that is a number."""
    return count * dim if isinstance(dim, int) else None


def check_shapes(
    gates: int,
    defaults: Sequence[str],
    X: Known,
    W: Known,
    R: Known,
    B: Known | None,
    SL: Known | None,
    attributes: dict[str, Any],
    **states: Known | None,
) -> Sizes:
    """The sizes, as far as they are known; raises where inputs or attributes do not fit. `states` are first states."""
    count = "" if gates == 1 else gates
    for name, known, letters in (("X", X, "[S,N,I]"), ("W", W, f"[D,{count}H,I]"), ("R", R, f"[D,{count}H,H]")):
        if known.dims is not None and len(known.dims) != 3:
            raise ValueError(f"{name} has shape {list(known.dims)}, expected three dimensions {letters}")
    given = settings(defaults, *(attributes[name] for name in ATTRIBUTES))
    for name in ("linear_before_reset", "input_forget"):
        if attributes.get(name, 0) not in (0, 1):
            raise ValueError(f"{name} is {attributes[name]}, expected 0 or 1")
    steps, rows, inputs = X.dims or (None, None, None)
    directions, hidden_size = len(given.directions), attributes["hidden_size"]
    hidden = R.dims[2] if R.dims is not None and R.dims[2] is not None else hidden_size
    if hidden_size is not None and not agree((hidden_size,), (hidden,)):
        raise ValueError(f"hidden_size is {hidden_size}, expected {hidden} as the last dimension of R")
    expect("R", R, directions, times(gates, hidden), hidden)
    expect("W", W, directions, times(gates, hidden), inputs)
    expect("B", B, directions, times(2 * gates, hidden))
    for name, state in states.items():
        expect(name, state, directions, rows, hidden)
    expect("SL", SL, rows)
    return Sizes(steps, rows, inputs, directions, hidden)


def check_lengths(X: Array, SL: Array | None) -> None:
    """Raises for a length outside 0 to the number of steps."""
    if SL is not None and SL.size and (SL.min() < 0 or SL.max() > len(X)):
        worst = int(np.argmax((SL < 0) | (len(X) < SL)))
        raise length_error(worst, int(SL[worst]), len(X))


def lengths_of(X: Array, SL: Array | None) -> Array:
    """How many steps each row has."""
    return np.full(X.shape[1], X.shape[0]) if SL is None else SL


def clamp(x: Array, clip: float | None) -> Array:
    """Clips to ±clip."""
    return x if clip is None else np.clip(x, -clip, clip)


def previous(states: Array, first: Array, lengths: Array, t: int, d: int, backwards: bool) -> Array:
    """The state each row had before step t, of all states [S,D,N,H] and the first one [N,H]."""
    if not backwards:
        return first if t == 0 else states[t - 1, d].astype(first.dtype)
    if t + 1 == len(states):
        return first
    return np.where((t + 1 < lengths)[:, None], states[t + 1, d].astype(first.dtype), first)
