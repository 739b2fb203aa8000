"""GRUTraining and GRUGrad: ONNX's GRU with what its gradient needs, and that gradient."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from onnxgrad.activations import Chosen, choose
from onnxgrad.arguments import length_error
from onnxgrad.op import op
from onnxgrad.ops_functions.gru import gru_grad_function, gru_training_function
from onnxgrad.schema import Dim, Known, agree
from onnxgrad.tensor_types import Array, Lengths, T, accumulator

DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


def _expect(name: str, given: Known | None, *dims: Dim) -> None:
    if given is not None and given.dims is not None and not agree(given.dims, dims):
        raise ValueError(f"{name} has shape {list(given.dims)}, expected {list(dims)}")


def _check_shapes(
    X: Known, W: Known, R: Known, B: Known | None, SL: Known | None, Ht0: Known | None, attributes: dict[str, Any]
) -> tuple[Dim, Dim, Dim, int, Dim]:
    """Steps, rows, inputs, directions and hidden size, as far as they are known; raises where they do not fit."""
    for name, given, letters in (("X", X, "[S,N,I]"), ("W", W, "[D,3H,I]"), ("R", R, "[D,3H,H]")):
        if given.dims is not None and len(given.dims) != 3:
            raise ValueError(f"{name} has shape {list(given.dims)}, expected three dimensions {letters}")
    if attributes["direction"] not in DIRECTIONS:
        raise ValueError(f"direction is {attributes['direction']!r}, expected one of {', '.join(DIRECTIONS)}")
    if attributes["linear_before_reset"] not in (0, 1):
        raise ValueError(f"linear_before_reset is {attributes['linear_before_reset']}, expected 0 or 1")
    clip = attributes["clip"]
    if clip is not None and not clip > 0:
        raise ValueError(f"clip is {clip}, expected more than 0, or nothing for no clipping")
    steps, rows, inputs = X.dims or (None, None, None)
    directions, hidden_size = len(DIRECTIONS[attributes["direction"]]), attributes["hidden_size"]
    hidden = R.dims[2] if R.dims is not None and R.dims[2] is not None else hidden_size
    if hidden_size is not None and not agree((hidden_size,), (hidden,)):
        raise ValueError(f"hidden_size is {hidden_size}, expected {hidden} as the last dimension of R")
    _expect("R", R, directions, _times(3, hidden), hidden)
    _expect("W", W, directions, _times(3, hidden), inputs)
    _expect("B", B, directions, _times(6, hidden))
    _expect("Ht0", Ht0, directions, rows, hidden)
    _expect("SL", SL, rows)
    chosen_activations(attributes)
    return steps, rows, inputs, directions, hidden


def _times(count: int, dim: Dim) -> Dim:
    return count * dim if isinstance(dim, int) else None


def _training_shapes(
    X: Known, W: Known, R: Known, B: Known | None, SL: Known | None, Ht0: Known | None, **attributes: Any
) -> tuple[tuple[Dim, ...], ...]:
    steps, rows, _, directions, hidden = _check_shapes(X, W, R, B, SL, Ht0, attributes)
    return (steps, directions, rows, hidden), (directions, rows, hidden), (steps, directions, rows, _times(3, hidden))


def _grad_shapes(
    X: Known,
    W: Known,
    R: Known,
    B: Known | None,
    SL: Known | None,
    Ht0: Known | None,
    HAll: Known,
    ZRH: Known,
    dHAll: Known | None,
    dHFinal: Known | None,
    **attributes: Any,
) -> tuple[tuple[Dim, ...], ...]:
    steps, rows, inputs, directions, hidden = _check_shapes(X, W, R, B, SL, Ht0, attributes)
    gates = _times(3, hidden)
    _expect("HAll", HAll, steps, directions, rows, hidden)
    _expect("ZRH", ZRH, steps, directions, rows, gates)
    _expect("dHAll", dHAll, steps, directions, rows, hidden)
    _expect("dHFinal", dHFinal, directions, rows, hidden)
    return (
        (steps, rows, inputs),
        (directions, gates, inputs),
        (directions, gates, hidden),
        (directions, _times(6, hidden)),
        (directions, rows, hidden),
    )


def _check_lengths(X: Array, W: Array, R: Array, B: Array | None, SL: Array | None, *rest: Any, **more: Any) -> None:
    if SL is not None and SL.size and (SL.min() < 0 or SL.max() > len(X)):
        worst = int(np.argmax((SL < 0) | (len(X) < SL)))
        raise length_error(worst, int(SL[worst]), len(X))


def chosen_activations(attributes: dict[str, Any]) -> list[Chosen]:
    """f (for the gates) and g (for the candidate) of each direction in turn."""
    return choose(
        attributes["activations"],
        attributes["activation_alpha"],
        attributes["activation_beta"],
        ("Sigmoid", "Tanh"),
        len(DIRECTIONS[attributes["direction"]]),
    )


def _lengths(X: Array, SL: Array | None) -> Array:
    return np.full(X.shape[1], X.shape[0]) if SL is None else SL


def _clamp(x: Array, clip: float | None) -> Array:
    return x if clip is None else np.clip(x, -clip, clip)


@op(
    "GRUTraining",
    outputs=("HAll", "HFinal?", "ZRH"),
    shape=_training_shapes,
    check_values=_check_lengths,
    function=gru_training_function,
)
def gru_training(
    X: T,
    W: T,
    R: T,
    B: T | None = None,
    SL: Lengths | None = None,
    Ht0: T | None = None,
    *,
    hidden_size: int | None = None,
    linear_before_reset: int = 0,
    direction: str = "forward",
    activations: Sequence[str] | None = None,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    clip: float | None = None,
) -> tuple[T, T, T]:
    """ONNX's GRU that also gives what GRUGrad needs: every state HAll, the last one HFinal, and the gates ZRH.

    X [S,N,I], W [D,3H,I], R [D,3H,H], B [D,6H] (zeros if absent), SL [N] lengths (S if absent), Ht0 [D,N,H] first
    state (zeros if absent) → HAll [S,D,N,H], HFinal [D,N,H], ZRH [S,D,N,3H]: the gates z, r and the candidate h
    after their activations. Past its length a row's HAll and ZRH are 0 and its state stays. float16 and bfloat16 are
    computed in float32.
    """
    work = accumulator(X.dtype)
    chosen = choose(activations, activation_alpha, activation_beta, ("Sigmoid", "Tanh"), R.shape[0])
    (S, N, _), (D, _, H) = X.shape, R.shape
    HAll, HFinal, ZRH = np.zeros((S, D, N, H), work), np.zeros((D, N, H), work), np.zeros((S, D, N, 3 * H), work)
    for d, backwards in enumerate(DIRECTIONS[direction]):
        f, g = chosen[2 * d : 2 * d + 2]
        state = np.zeros((N, H), work) if Ht0 is None else Ht0[d].astype(work)
        for t in reversed(range(S)) if backwards else range(S):
            inner = _preactivations(X[t], W[d], R[d], B, d, state, f, clip, linear_before_reset)
            z, r, h = (act(_clamp(x, clip)) for act, x in zip((f, f, g), inner, strict=True))
            alive = (t < _lengths(X, SL))[:, None]
            new = (1 - z) * h + z * state
            HAll[t, d] = np.where(alive, new, 0)
            ZRH[t, d] = np.where(alive, np.concatenate([z, r, h], axis=1), 0)
            state = np.where(alive, new, state)
        HFinal[d] = state
    return HAll.astype(X.dtype), HFinal.astype(X.dtype), ZRH.astype(X.dtype)


def _preactivations(
    x: Array,
    W: Array,
    R: Array,
    B: Array | None,
    d: int,
    state: Array,
    f: Chosen,
    clip: float | None,
    linear_before_reset: int,
) -> Iterator[Array]:
    """What the activations of z, r and h are applied to, in this order."""
    work = accumulator(x.dtype)
    Wz, Wr, Wh = np.split(W.astype(work), 3)
    Rz, Rr, Rh = np.split(R.astype(work), 3)
    bias = np.zeros(6 * state.shape[1], work) if B is None else B[d].astype(work)
    Wbz, Wbr, Wbh, Rbz, Rbr, Rbh = np.split(bias, 6)
    x = x.astype(work)
    yield x @ Wz.T + state @ Rz.T + Wbz + Rbz
    before_r = x @ Wr.T + state @ Rr.T + Wbr + Rbr
    yield before_r
    r = f(_clamp(before_r, clip))
    if linear_before_reset:
        yield x @ Wh.T + r * (state @ Rh.T + Rbh) + Wbh
    else:
        yield x @ Wh.T + (r * state) @ Rh.T + Wbh + Rbh


@op(
    "GRUGrad",
    outputs=("dX?", "dW?", "dR?", "dB?", "dH0?"),
    shape=_grad_shapes,
    check_values=_check_lengths,
    function=gru_grad_function,
)
def gru_grad(
    X: T,
    W: T,
    R: T,
    B: T | None,
    SL: Lengths | None,
    Ht0: T | None,
    HAll: T,
    ZRH: T,
    dHAll: T | None = None,
    dHFinal: T | None = None,
    *,
    hidden_size: int | None = None,
    linear_before_reset: int = 0,
    direction: str = "forward",
    activations: Sequence[str] | None = None,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    clip: float | None = None,
    outputs: Sequence[str] | None = None,
) -> tuple[T | None, T | None, T | None, T | None, T | None]:
    """Gradient of GRUTraining: takes its inputs, its HAll and ZRH and the gradients of HAll and HFinal.

    Gives dX, dW, dR, dB and dH0; dB and dH0 also when B or Ht0 is absent. An absent dHAll or dHFinal counts as
    zeros. Where `clip` cut a gate's input off, nothing flows through it. float16 and bfloat16 are computed in float32.
    """
    work = accumulator(X.dtype)
    chosen = choose(activations, activation_alpha, activation_beta, ("Sigmoid", "Tanh"), R.shape[0])
    (S, N, _), (D, _, H) = X.shape, R.shape
    dX, dW, dR = np.zeros(X.shape, work), np.zeros(W.shape, work), np.zeros(R.shape, work)
    dB, dH0 = np.zeros((D, 6 * H), work), np.zeros((D, N, H), work)
    lengths = _lengths(X, SL)
    for d, backwards in enumerate(DIRECTIONS[direction]):
        f, g = chosen[2 * d : 2 * d + 2]
        first = np.zeros((N, H), work) if Ht0 is None else Ht0[d].astype(work)
        Rh = R[d, 2 * H :].astype(work)
        Rbh = np.zeros(H, work) if B is None else B[d, 5 * H :].astype(work)
        G = np.zeros((N, H), work) if dHFinal is None else dHFinal[d].astype(work)
        for t in range(S) if backwards else reversed(range(S)):
            # Past a row's length there may be anything, NaN too, and nothing of it may get through.
            alive = (t < lengths)[:, None]
            x = np.where(alive, X[t].astype(work), 0)
            z, r, h = np.split(np.where(alive, ZRH[t, d].astype(work), 0), 3, axis=1)
            state = np.where(alive, _previous(HAll, first, lengths, t, d, backwards), 0)
            through = G if dHAll is None else G + dHAll[t, d].astype(work)
            through = np.where(alive, through, 0)
            within = [np.ones_like(z)] * 3
            if clip is not None:
                inner = _preactivations(x.astype(X.dtype), W[d], R[d], B, d, state, f, clip, linear_before_reset)
                within = [(np.abs(x) <= clip).astype(work) for x in inner]
            δz = through * (state - h) * f.slope(z) * within[0]
            δh = through * (1 - z) * g.slope(h) * within[2]
            dr = δh * (state @ Rh.T + Rbh) if linear_before_reset else (δh @ Rh) * state
            δr = dr * f.slope(r) * within[1]
            # What reaches the previous state through Rh: of the product r∘Hp, or of Hp under r.
            δhr = δh * r if linear_before_reset else δh
            δ = np.where(alive, np.concatenate([δz, δr, δh], axis=1), 0)
            δR = np.where(alive, np.concatenate([δz, δr, δhr], axis=1), 0)
            dX[t] += δ @ W[d].astype(work)
            dW[d] += δ.T @ x
            dR[d, : 2 * H] += δR[:, : 2 * H].T @ state
            dR[d, 2 * H :] += δR[:, 2 * H :].T @ (state if linear_before_reset else r * state)
            dB[d] += np.concatenate([δ.sum(0), δR.sum(0)])
            back = through * z + δR[:, : 2 * H] @ R[d, : 2 * H].astype(work)
            back += δR[:, 2 * H :] @ Rh * (1 if linear_before_reset else r)
            G = np.where(alive, back, G)
        dH0[d] = G
    everything = {"dX": dX, "dW": dW, "dR": dR, "dB": dB, "dH0": dH0}
    names = everything if outputs is None else outputs
    return tuple(a.astype(X.dtype) if n in names else None for n, a in everything.items())  # type: ignore[return-value]


def _previous(HAll: Array, first: Array, lengths: Array, t: int, d: int, backwards: bool) -> Array:
    """The state each row had before step t."""
    if not backwards:
        return first if t == 0 else HAll[t - 1, d].astype(first.dtype)
    if t + 1 == len(HAll):
        return first
    return np.where((t + 1 < lengths)[:, None], HAll[t + 1, d].astype(first.dtype), first)
