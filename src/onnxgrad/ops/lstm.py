"""LSTMTraining and LSTMGrad: ONNX's LSTM, which also keeps its cells and gates, and its gradient."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxgrad.op import op
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

DEFAULTS = ("Sigmoid", "Tanh", "Tanh")  # f, of the gates, g, of the candidate, and h, of the cell


def _check_shapes(
    X: Known,
    W: Known,
    R: Known,
    B: Known | None,
    SL: Known | None,
    Ht0: Known | None,
    Ct0: Known | None,
    P: Known | None,
    attributes: dict[str, Any],
) -> Sizes:
    sizes = check_shapes(4, DEFAULTS, X, W, R, B, SL, attributes, Ht0=Ht0, Ct0=Ct0)
    expect("P", P, sizes.directions, times(3, sizes.hidden))
    return sizes


def _training_shapes(
    X: Known,
    W: Known,
    R: Known,
    B: Known | None,
    SL: Known | None,
    Ht0: Known | None,
    Ct0: Known | None,
    P: Known | None,
    **attributes: Any,
) -> tuple[tuple[Dim, ...], ...]:
    steps, rows, _, directions, hidden = _check_shapes(X, W, R, B, SL, Ht0, Ct0, P, attributes)
    every, last = (steps, directions, rows, hidden), (directions, rows, hidden)
    return every, last, last, every, (steps, directions, rows, times(4, hidden))


def _grad_shapes(
    X: Known,
    W: Known,
    R: Known,
    SL: Known | None,
    Ht0: Known | None,
    Ct0: Known | None,
    HAll: Known,
    CAll: Known,
    IOFC: Known,
    dHAll: Known | None,
    dHFinal: Known | None,
    dCFinal: Known | None,
    B: Known | None,
    P: Known | None,
    **attributes: Any,
) -> tuple[tuple[Dim, ...], ...]:
    steps, rows, inputs, directions, hidden = _check_shapes(X, W, R, B, SL, Ht0, Ct0, P, attributes)
    gates = times(4, hidden)
    for name, given in {"HAll": HAll, "CAll": CAll, "dHAll": dHAll}.items():
        expect(name, given, steps, directions, rows, hidden)
    expect("IOFC", IOFC, steps, directions, rows, gates)
    for name, final in {"dHFinal": dHFinal, "dCFinal": dCFinal}.items():
        expect(name, final, directions, rows, hidden)
    return (
        (steps, rows, inputs),
        (directions, gates, inputs),
        (directions, gates, hidden),
        (directions, times(8, hidden)),
        (directions, rows, hidden),
        (directions, rows, hidden),
        (directions, times(3, hidden)),
    )


def _check_training(X: Array, W: Array, R: Array, B: Array | None, SL: Array | None, *rest: Any, **more: Any) -> None:
    check_lengths(X, SL)


def _check_grad(X: Array, W: Array, R: Array, SL: Array | None, *rest: Any, **more: Any) -> None:
    check_lengths(X, SL)


@op(
    "LSTMTraining",
    outputs=("HAll", "HFinal?", "CFinal?", "CAll", "IOFC"),
    shape=_training_shapes,
    check_values=_check_training,
)
def lstm_training(
    X: T,
    W: T,
    R: T,
    B: T | None = None,
    SL: Lengths | None = None,
    Ht0: T | None = None,
    Ct0: T | None = None,
    P: T | None = None,
    *,
    hidden_size: int | None = None,
    input_forget: int = 0,
    direction: str = "forward",
    activations: Sequence[str] | None = None,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    clip: float | None = None,
) -> tuple[T, T, T, T, T]:
    """ONNX's LSTM that also gives every cell CAll and the gates IOFC, which LSTMGrad needs beside every state HAll.

    X [S,N,I], W [D,4H,I], R [D,4H,H], B [D,8H] (zeros if absent), SL [N] lengths (S if absent), Ht0 and Ct0 [D,N,H]
    first state and cell (zeros if absent), P [D,3H] peepholes of i, o, f (none if absent) → HAll and CAll [S,D,N,H],
    HFinal and CFinal [D,N,H], IOFC [S,D,N,4H]: the gates i, o, f and the candidate c after their activations. Past
    its length a row's HAll, CAll and IOFC are 0 and its state and cell stay. With `input_forget` f is 1 - i. `clip`
    limits the inputs of the activations of i, o, f and c. float16 and bfloat16 are computed in float32.
    """
    work = accumulator(X.dtype)
    given = settings(DEFAULTS, direction, activations, activation_alpha, activation_beta, clip)
    (S, N, _), (D, _, H) = X.shape, R.shape
    HAll, CAll = np.zeros((S, D, N, H), work), np.zeros((S, D, N, H), work)
    HFinal, CFinal, IOFC = np.zeros((D, N, H), work), np.zeros((D, N, H), work), np.zeros((S, D, N, 4 * H), work)
    lengths = lengths_of(X, SL)
    for d, (backwards, (f, g, h)) in enumerate(given.directions):
        state, cell = (np.zeros((N, H), work) if v is None else v[d].astype(work) for v in (Ht0, Ct0))
        Pi, Po, Pf = _peepholes(P, d, H, work)
        for t in reversed(range(S)) if backwards else range(S):
            before_i, before_o, before_f, before_c = _before_peepholes(X[t], W[d], R[d], B, d, state)
            gate_i = f(clamp(before_i + Pi * cell, clip))
            gate_f = 1 - gate_i if input_forget else f(clamp(before_f + Pf * cell, clip))
            candidate = g(clamp(before_c, clip))
            new_cell = gate_f * cell + gate_i * candidate
            gate_o = f(clamp(before_o + Po * new_cell, clip))
            new_state = gate_o * h(new_cell)
            alive = (t < lengths)[:, None]
            HAll[t, d], CAll[t, d] = np.where(alive, new_state, 0), np.where(alive, new_cell, 0)
            IOFC[t, d] = np.where(alive, np.concatenate([gate_i, gate_o, gate_f, candidate], axis=1), 0)
            state, cell = np.where(alive, new_state, state), np.where(alive, new_cell, cell)
        HFinal[d], CFinal[d] = state, cell
    HAll, HFinal, CFinal, CAll, IOFC = (a.astype(X.dtype) for a in (HAll, HFinal, CFinal, CAll, IOFC))
    return HAll, HFinal, CFinal, CAll, IOFC


def _peepholes(P: Array | None, d: int, H: int, work: np.dtype[Any]) -> list[Array]:
    """Of i, o and f."""
    return np.split(np.zeros(3 * H, work) if P is None else P[d].astype(work), 3)


def _before_peepholes(x: Array, W: Array, R: Array, B: Array | None, d: int, state: Array) -> list[Array]:
    """The inputs of the activations of i, o, f and c, without the peepholes."""
    work = state.dtype
    bias = np.zeros(4 * state.shape[1], work) if B is None else np.add(*np.split(B[d].astype(work), 2))
    return np.split(x.astype(work) @ W.astype(work).T + state @ R.astype(work).T + bias, 4, axis=1)


@op(
    "LSTMGrad",
    outputs=("dX?", "dW?", "dR?", "dB?", "dH0?", "dC0?", "dP?"),
    shape=_grad_shapes,
    check_values=_check_grad,
)
def lstm_grad(
    X: T,
    W: T,
    R: T,
    SL: Lengths | None,
    Ht0: T | None,
    Ct0: T | None,
    HAll: T,
    CAll: T,
    IOFC: T,
    dHAll: T | None = None,
    dHFinal: T | None = None,
    dCFinal: T | None = None,
    B: T | None = None,
    P: T | None = None,
    *,
    hidden_size: int | None = None,
    input_forget: int = 0,
    direction: str = "forward",
    activations: Sequence[str] | None = None,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    clip: float | None = None,
    outputs: Sequence[str] | None = None,
) -> tuple[T | None, T | None, T | None, T | None, T | None, T | None, T | None]:
    """Gradient of LSTMTraining: takes its inputs, its HAll, CAll and IOFC and the gradients of HAll, HFinal and CFinal.

    Gives dX, dW, dR, dB, dH0, dC0 and dP; the last four also when B, Ht0, Ct0 or P is absent. An absent dHAll, dHFinal
    or dCFinal counts as zeros. B and P come last, since onnxruntime-training's LSTMGrad has neither: B matters only
    with `clip`; without P cells get no gradient through peepholes, as there. Where a gate's input was clipped, its
    gradient is 0. float16 and bfloat16 are computed in float32.
    """
    work = accumulator(X.dtype)
    given = settings(DEFAULTS, direction, activations, activation_alpha, activation_beta, clip)
    (S, N, _), (D, _, H) = X.shape, R.shape
    dX, dW, dR = np.zeros(X.shape, work), np.zeros(W.shape, work), np.zeros(R.shape, work)
    dB, dP = np.zeros((D, 8 * H), work), np.zeros((D, 3 * H), work)
    dH0, dC0 = np.zeros((D, N, H), work), np.zeros((D, N, H), work)
    lengths = lengths_of(X, SL)
    for d, (backwards, (f, g, h)) in enumerate(given.directions):
        first, first_cell = (np.zeros((N, H), work) if v is None else v[d].astype(work) for v in (Ht0, Ct0))
        Pi, Po, Pf = _peepholes(P, d, H, work)
        G, Gc = (np.zeros((N, H), work) if v is None else v[d].astype(work) for v in (dHFinal, dCFinal))
        for t in range(S) if backwards else reversed(range(S)):
            # Past a row's length there may be anything, NaN too, and nothing of it may get through.
            alive = (t < lengths)[:, None]
            x, new_cell = np.where(alive, X[t].astype(work), 0), np.where(alive, CAll[t, d].astype(work), 0)
            state = np.where(alive, previous(HAll, first, lengths, t, d, backwards), 0)
            cell = np.where(alive, previous(CAll, first_cell, lengths, t, d, backwards), 0)
            gate_i, gate_o, gate_f, candidate = np.split(np.where(alive, IOFC[t, d].astype(work), 0), 4, axis=1)
            through = np.where(alive, G if dHAll is None else G + dHAll[t, d].astype(work), 0)
            within = [np.ones_like(gate_i)] * 4
            if clip is not None:
                inner = _before_peepholes(x.astype(X.dtype), W[d], R[d], B, d, state)
                peeping = (Pi * cell, Po * new_cell, Pf * cell, 0)
                within = [(np.abs(a + p) <= clip).astype(work) for a, p in zip(inner, peeping, strict=True)]
            shown = h(new_cell)
            δo = through * shown * f.derivative(gate_o) * within[1]
            to_cell = np.where(alive, Gc, 0) + through * gate_o * h.derivative(shown) + δo * Po
            δi = to_cell * (candidate - cell if input_forget else candidate) * f.derivative(gate_i) * within[0]
            δf = np.zeros_like(δi) if input_forget else to_cell * cell * f.derivative(gate_f) * within[2]
            δc = to_cell * gate_i * g.derivative(candidate) * within[3]
            δi, δo, δf, δc = (np.where(alive, δ, 0) for δ in (δi, δo, δf, δc))
            δ = np.concatenate([δi, δo, δf, δc], axis=1)
            dX[t] += δ @ W[d].astype(work)
            dW[d] += δ.T @ x
            dR[d] += δ.T @ state
            dB[d] += np.tile(δ.sum(0), 2)
            dP[d] += np.concatenate([δi * cell, δo * new_cell, δf * cell], axis=1).sum(0)
            G = np.where(alive, δ @ R[d].astype(work), G)
            Gc = np.where(alive, to_cell * gate_f + δi * Pi + δf * Pf, Gc)
        dH0[d], dC0[d] = G, Gc
    everything = {"dX": dX, "dW": dW, "dR": dR, "dB": dB, "dH0": dH0, "dC0": dC0, "dP": dP}
    names = everything if outputs is None else outputs
    return tuple(a.astype(X.dtype) if n in names else None for n, a in everything.items())  # type: ignore[return-value]
