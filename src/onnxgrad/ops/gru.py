"""GRUTraining and GRUGrad: ONNX's GRU, which also keeps its gates, and its gradient."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from onnxgrad.op import op
from onnxgrad.ops.families.activations import Chosen
from onnxgrad.ops.families.recurrent import (
    Sizes,
    check_lengths,
    check_shapes,
    clamp,
    expect,
    lengths_of,
    previous,
    settings,
    times,
)
from onnxgrad.schema import Dim, Known
from onnxgrad.tensor_types import Array, Lengths, T, accumulator

DEFAULTS = ("Sigmoid", "Tanh")  # f, of the gates, and g, of the candidate


def _check_shapes(
    X: Known, W: Known, R: Known, B: Known | None, SL: Known | None, Ht0: Known | None, attributes: dict[str, Any]
) -> Sizes:
    return check_shapes(3, DEFAULTS, X, W, R, B, SL, attributes, Ht0=Ht0)


def _training_shapes(
    X: Known, W: Known, R: Known, B: Known | None, SL: Known | None, Ht0: Known | None, **attributes: Any
) -> tuple[tuple[Dim, ...], ...]:
    steps, rows, _, directions, hidden = _check_shapes(X, W, R, B, SL, Ht0, attributes)
    return (steps, directions, rows, hidden), (directions, rows, hidden), (steps, directions, rows, times(3, hidden))


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
    gates = times(3, hidden)
    expect("HAll", HAll, steps, directions, rows, hidden)
    expect("ZRH", ZRH, steps, directions, rows, gates)
    expect("dHAll", dHAll, steps, directions, rows, hidden)
    expect("dHFinal", dHFinal, directions, rows, hidden)
    return (
        (steps, rows, inputs),
        (directions, gates, inputs),
        (directions, gates, hidden),
        (directions, times(6, hidden)),
        (directions, rows, hidden),
    )


def _check_lengths(X: Array, W: Array, R: Array, B: Array | None, SL: Array | None, *rest: Any, **more: Any) -> None:
    check_lengths(X, SL)


@op(
    "GRUTraining",
    outputs=("HAll", "HFinal?", "ZRH"),
    shape=_training_shapes,
    check_values=_check_lengths,
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
    """ONNX's GRU that also gives the gates ZRH, which GRUGrad needs beside every state HAll.

    X [S,N,I], W [D,3H,I], R [D,3H,H], B [D,6H] (zeros if absent), SL [N] lengths (S if absent), Ht0 [D,N,H] first
    state (zeros if absent) → HAll [S,D,N,H], HFinal [D,N,H], ZRH [S,D,N,3H]: the gates z, r and the candidate h
    after their activations. Past its length a row's HAll and ZRH are 0 and its state stays. float16 and bfloat16 are
    computed in float32.
    """
    work = accumulator(X.dtype)
    given = settings(DEFAULTS, direction, activations, activation_alpha, activation_beta, clip)
    (S, N, _), (D, _, H) = X.shape, R.shape
    HAll, HFinal, ZRH = np.zeros((S, D, N, H), work), np.zeros((D, N, H), work), np.zeros((S, D, N, 3 * H), work)
    for d, (backwards, (f, g)) in enumerate(given.directions):
        state = np.zeros((N, H), work) if Ht0 is None else Ht0[d].astype(work)
        for t in reversed(range(S)) if backwards else range(S):
            inner = _preactivations(X[t], W[d], R[d], B, d, state, f, clip, linear_before_reset)
            z, r, h = (act(clamp(x, clip)) for act, x in zip((f, f, g), inner, strict=True))
            alive = (t < lengths_of(X, SL))[:, None]
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
    r: Array | None = None,
) -> Iterator[Array]:
    """The inputs of the activations of z, r and h, in this order; r is computed unless it is given."""
    work = accumulator(x.dtype)
    Wz, Wr, Wh = np.split(W.astype(work), 3)
    Rz, Rr, Rh = np.split(R.astype(work), 3)
    bias = np.zeros(6 * state.shape[1], work) if B is None else B[d].astype(work)
    Wbz, Wbr, Wbh, Rbz, Rbr, Rbh = np.split(bias, 6)
    x = x.astype(work)
    yield x @ Wz.T + state @ Rz.T + Wbz + Rbz
    before_r = x @ Wr.T + state @ Rr.T + Wbr + Rbr
    yield before_r
    r = f(clamp(before_r, clip)) if r is None else r
    if linear_before_reset:
        yield x @ Wh.T + r * (state @ Rh.T + Rbh) + Wbh
    else:
        yield x @ Wh.T + (r * state) @ Rh.T + Wbh + Rbh


@op(
    "GRUGrad",
    outputs=("dX?", "dW?", "dR?", "dB?", "dH0?"),
    shape=_grad_shapes,
    check_values=_check_lengths,
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
    zeros. Where a gate's input was clipped, its gradient is 0. float16 and bfloat16 are computed in float32.
    """
    work = accumulator(X.dtype)
    given = settings(DEFAULTS, direction, activations, activation_alpha, activation_beta, clip)
    (S, N, _), (D, _, H) = X.shape, R.shape
    dX, dW, dR = np.zeros(X.shape, work), np.zeros(W.shape, work), np.zeros(R.shape, work)
    dB, dH0 = np.zeros((D, 6 * H), work), np.zeros((D, N, H), work)
    lengths = lengths_of(X, SL)
    for d, (backwards, (f, g)) in enumerate(given.directions):
        first = np.zeros((N, H), work) if Ht0 is None else Ht0[d].astype(work)
        Rh = R[d, 2 * H :].astype(work)
        Rbh = np.zeros(H, work) if B is None else B[d, 5 * H :].astype(work)
        G = np.zeros((N, H), work) if dHFinal is None else dHFinal[d].astype(work)
        for t in range(S) if backwards else reversed(range(S)):
            # Past a row's length there may be anything, NaN too, and nothing of it may get through.
            alive = (t < lengths)[:, None]
            x = np.where(alive, X[t].astype(work), 0)
            z, r, h = np.split(np.where(alive, ZRH[t, d].astype(work), 0), 3, axis=1)
            state = np.where(alive, previous(HAll, first, lengths, t, d, backwards), 0)
            through = G if dHAll is None else G + dHAll[t, d].astype(work)
            through = np.where(alive, through, 0)
            within = [np.ones_like(z)] * 3
            if clip is not None:
                inner = _preactivations(x.astype(X.dtype), W[d], R[d], B, d, state, f, clip, linear_before_reset, r)
                within = [(np.abs(x) <= clip).astype(work) for x in inner]
            δz = through * (state - h) * f.derivative(z) * within[0]
            δh = through * (1 - z) * g.derivative(h) * within[2]
            dr = δh * (state @ Rh.T + Rbh) if linear_before_reset else (δh @ Rh) * state
            δr = dr * f.derivative(r) * within[1]
            # The gradient that reaches the previous state through Rh: of the product r∘Hp, or of Hp under r.
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
