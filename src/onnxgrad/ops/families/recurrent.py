"""What recurrent operators share: directions, what their inputs' shapes must be, and lengths of rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxgrad.arguments import length_error
from onnxgrad.ops.families.activations import Chosen, choose
from onnxgrad.schema import Dim, Known, agree
from onnxgrad.tensor_types import Array

DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
Sizes = tuple[Dim, Dim, Dim, int, Dim]  # steps, rows, inputs, directions, hidden size


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
    """What is known of the sizes; raises where inputs or attributes do not fit. `states` are first states, by name."""
    count = "" if gates == 1 else gates
    for name, given, letters in (("X", X, "[S,N,I]"), ("W", W, f"[D,{count}H,I]"), ("R", R, f"[D,{count}H,H]")):
        if given.dims is not None and len(given.dims) != 3:
            raise ValueError(f"{name} has shape {list(given.dims)}, expected three dimensions {letters}")
    if attributes["direction"] not in DIRECTIONS:
        raise ValueError(f"direction is {attributes['direction']!r}, expected one of {', '.join(DIRECTIONS)}")
    for name in ("linear_before_reset", "input_forget"):
        if attributes.get(name, 0) not in (0, 1):
            raise ValueError(f"{name} is {attributes[name]}, expected 0 or 1")
    clip = attributes["clip"]
    if clip is not None and not clip > 0:
        raise ValueError(f"clip is {clip}, expected more than 0, or nothing for no clipping")
    steps, rows, inputs = X.dims or (None, None, None)
    directions, hidden_size = len(DIRECTIONS[attributes["direction"]]), attributes["hidden_size"]
    hidden = R.dims[2] if R.dims is not None and R.dims[2] is not None else hidden_size
    if hidden_size is not None and not agree((hidden_size,), (hidden,)):
        raise ValueError(f"hidden_size is {hidden_size}, expected {hidden} as the last dimension of R")
    expect("R", R, directions, times(gates, hidden), hidden)
    expect("W", W, directions, times(gates, hidden), inputs)
    expect("B", B, directions, times(2 * gates, hidden))
    for name, state in states.items():
        expect(name, state, directions, rows, hidden)
    expect("SL", SL, rows)
    activations_of(attributes, defaults)
    return steps, rows, inputs, directions, hidden


def activations_of(attributes: dict[str, Any], defaults: Sequence[str]) -> list[Chosen]:
    """The activations of each direction in turn."""
    return choose(
        attributes["activations"],
        attributes["activation_alpha"],
        attributes["activation_beta"],
        defaults,
        len(DIRECTIONS[attributes["direction"]]),
    )


def check_lengths(X: Array, SL: Array | None) -> None:
    """Raises for a length that is no number of steps."""
    if SL is not None and SL.size and (SL.min() < 0 or SL.max() > len(X)):
        worst = int(np.argmax((SL < 0) | (len(X) < SL)))
        raise length_error(worst, int(SL[worst]), len(X))


def lengths_of(X: Array, SL: Array | None) -> Array:
    """How many steps each row has."""
    return np.full(X.shape[1], X.shape[0]) if SL is None else SL


def clamp(x: Array, clip: float | None) -> Array:
    """Cuts off at ±clip."""
    return x if clip is None else np.clip(x, -clip, clip)


def previous(states: Array, first: Array, lengths: Array, t: int, d: int, backwards: bool) -> Array:
    """The state each row had before step t, of all states [S,D,N,H] and the first one [N,H]."""
    if not backwards:
        return first if t == 0 else states[t - 1, d].astype(first.dtype)
    if t + 1 == len(states):
        return first
    return np.where((t + 1 < lengths)[:, None], states[t + 1, d].astype(first.dtype), first)
