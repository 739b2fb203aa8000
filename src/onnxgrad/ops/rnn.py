"""RNNGrad: the gradient of ONNX's RNN, whose states are all that it needs."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxgrad.op import op
from onnxgrad.ops.families.recurrent import (
    check_lengths,
    check_shapes,
    expect,
    lengths_of,
    previous,
    settings,
    times,
)
from onnxgrad.schema import OWN, Dim, Known
from onnxgrad.tensor_types import Array, Lengths, T, accumulator

DEFAULTS = ("Tanh",)


def _grad_shapes(
    X: Known,
    W: Known,
    R: Known,
    B: Known | None,
    SL: Known | None,
    Ht0: Known | None,
    HAll: Known,
    dHAll: Known | None,
    dHFinal: Known | None,
    **attributes: Any,
) -> tuple[tuple[Dim, ...], ...]:
    steps, rows, inputs, directions, hidden = check_shapes(1, DEFAULTS, X, W, R, B, SL, attributes, Ht0=Ht0)
    expect("HAll", HAll, steps, directions, rows, hidden)
    expect("dHAll", dHAll, steps, directions, rows, hidden)
    expect("dHFinal", dHFinal, directions, rows, hidden)
    last = (directions, rows, hidden)
    weights = (directions, hidden, inputs), (directions, hidden, hidden), (directions, times(2, hidden))
    return (steps, rows, inputs), *weights, last


def _check_lengths(X: Array, W: Array, R: Array, B: Array | None, SL: Array | None, *rest: Any, **more: Any) -> None:
    check_lengths(X, SL)


@op(
    "RNNGrad",
    domain=OWN,
    outputs=("dX?", "dW?", "dR?", "dB?", "dH0?"),
    shape=_grad_shapes,
    check_values=_check_lengths,
)
def rnn_grad(
    X: T,
    W: T,
    R: T,
    B: T | None,
    SL: Lengths | None,
    Ht0: T | None,
    HAll: T,
    dHAll: T | None = None,
    dHFinal: T | None = None,
    *,
    hidden_size: int | None = None,
    direction: str = "forward",
    activations: Sequence[str] | None = None,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    clip: float | None = None,
    outputs: Sequence[str] | None = None,
) -> tuple[T | None, T | None, T | None, T | None, T | None]:
    """Gradient of ONNX's RNN: takes its inputs, every state HAll (its Y) and the gradients of Y and Y_h.

    X [S,N,I], W [D,H,I], R [D,H,H], B [D,2H] (zeros if absent; matters only with `clip`), SL [N] lengths (S if absent),
    Ht0 [D,N,H] first state (zeros if absent), HAll and dHAll [S,D,N,H], dHFinal [D,N,H] → dX, dW, dR, dB and dH0; the
    last two also when B or Ht0 is absent. An absent dHAll or dHFinal counts as zeros. Where the input of the
    activation was clipped, its gradient is 0. float16 and bfloat16 are computed in float32.
    """
    work = accumulator(X.dtype)
    given = settings(DEFAULTS, direction, activations, activation_alpha, activation_beta, clip)
    (S, N, _), (D, _, H) = X.shape, R.shape
    dX, dW, dR = np.zeros(X.shape, work), np.zeros(W.shape, work), np.zeros(R.shape, work)
    dB, dH0 = np.zeros((D, 2 * H), work), np.zeros((D, N, H), work)
    lengths = lengths_of(X, SL)
    for d, (backwards, (f,)) in enumerate(given.directions):
        first = np.zeros((N, H), work) if Ht0 is None else Ht0[d].astype(work)
        bias = np.zeros(H, work) if B is None else np.add(*np.split(B[d].astype(work), 2))
        G = np.zeros((N, H), work) if dHFinal is None else dHFinal[d].astype(work)
        for t in range(S) if backwards else reversed(range(S)):
            # Past a row's length there may be anything, NaN too, and nothing of it may get through.
            alive = (t < lengths)[:, None]
            x, y = np.where(alive, X[t].astype(work), 0), np.where(alive, HAll[t, d].astype(work), 0)
            state = np.where(alive, previous(HAll, first, lengths, t, d, backwards), 0)
            through = np.where(alive, G if dHAll is None else G + dHAll[t, d].astype(work), 0)
            δ = through * f.derivative(y)
            if clip is not None:
                δ *= np.abs(x @ W[d].astype(work).T + state @ R[d].astype(work).T + bias) <= clip
            δ = np.where(alive, δ, 0)
            dX[t] += δ @ W[d].astype(work)
            dW[d] += δ.T @ x
            dR[d] += δ.T @ state
            dB[d] += np.tile(δ.sum(0), 2)
            G = np.where(alive, δ @ R[d].astype(work), G)
        dH0[d] = G
    everything = {"dX": dX, "dW": dW, "dR": dR, "dB": dB, "dH0": dH0}
    names = everything if outputs is None else outputs
    return tuple(a.astype(X.dtype) if n in names else None for n, a in everything.items())  # type: ignore[return-value]
