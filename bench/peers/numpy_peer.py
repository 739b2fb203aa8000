"""NumPy: what one would write with it alone, half types added up in float32 as the contract asks."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.peers import NUMPY, Array, Call, CannotRunError, HereSide, Inputs, OutputType, is_half


class NumpyPeer:
    """np.zeros with np.add.at or a slice assignment, and a GRU in batched matrix products."""

    name = NUMPY

    def version(self) -> str:
        return np.__version__

    def prepare(
        self, operator: str, inputs: Inputs, attributes: Mapping[str, Any], outputs: Sequence[OutputType]
    ) -> tuple[HereSide, list[Array | None]]:
        if operator not in FORMS:
            raise CannotRunError(f"NumPy has nothing like {operator}")
        call = FORMS[operator](**inputs, **attributes)
        result = call()
        return HereSide(call), list(result) if isinstance(result, tuple) else [result]

    def close(self) -> None:
        pass


def _work_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float32) if is_half(dtype) else dtype


def gather_grad(shape: Array, indices: Array, dY: Array, axis: int) -> Call:
    dims, where = tuple(shape.tolist()), (slice(None),) * axis + (indices,)

    def call() -> Array:
        dX = np.zeros(dims, _work_type(dY.dtype))
        np.add.at(dX, where, dY.astype(dX.dtype, copy=False))
        return dX.astype(dY.dtype, copy=False)

    return call


def gather_elements_grad(dY: Array, shape: Array, indices: Array, axis: int) -> Call:
    dims = tuple(shape.tolist())

    def call() -> Array:
        dX = np.zeros(dims, _work_type(dY.dtype))
        where: list[Any] = list(np.indices(indices.shape, sparse=True))
        where[axis] = indices
        np.add.at(dX, tuple(where), dY.astype(dX.dtype, copy=False))
        return dX.astype(dY.dtype, copy=False)

    return call


def slice_grad(dY: Array, shape: Array, starts: Array, ends: Array, axes: Array, steps: Array) -> Call:
    dims = tuple(shape.tolist())
    where = [slice(None)] * len(dims)
    for start, end, axis, step in zip(*(v.tolist() for v in (starts, ends, axes, steps)), strict=True):
        # Slice's end below -dimension means "through element 0", which Python writes as None.
        where[axis] = slice(start, None if end < -dims[axis] else end, step)

    def call() -> Array:
        dX = np.zeros(dims, dY.dtype)
        dX[tuple(where)] = dY
        return dX

    return call


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def gru_training(
    X: Array, W: Array, R: Array, B: Array, SL: None, Ht0: Array, hidden_size: int, linear_before_reset: int
) -> Call:
    given, H = (X, W, R, B, Ht0), hidden_size

    def call() -> tuple[Array, ...]:
        x, w, r_all, b, state = (a.astype(_work_type(X.dtype), copy=False) for a in given)
        (S, N), w, r_all, b, state = x.shape[:2], w[0], r_all[0], b[0], state[0]
        Rb = b[3 * H :]
        HAll, ZRH = np.empty((S, 1, N, H), x.dtype), np.empty((S, 1, N, 3 * H), x.dtype)
        from_x = (x.reshape(S * N, -1) @ w.T + b[: 3 * H]).reshape(S, N, 3 * H)
        for t in range(S):
            if linear_before_reset:
                from_state = state @ r_all.T + Rb
                zr = _sigmoid(from_x[t, :, : 2 * H] + from_state[:, : 2 * H])
                h = np.tanh(from_x[t, :, 2 * H :] + zr[:, H:] * from_state[:, 2 * H :])
            else:
                zr = _sigmoid(from_x[t, :, : 2 * H] + state @ r_all[: 2 * H].T + Rb[: 2 * H])
                h = np.tanh(from_x[t, :, 2 * H :] + (zr[:, H:] * state) @ r_all[2 * H :].T + Rb[2 * H :])
            state = h + zr[:, :H] * (state - h)
            HAll[t, 0], ZRH[t, 0, :, : 2 * H], ZRH[t, 0, :, 2 * H :] = state, zr, h
        return tuple(a.astype(X.dtype, copy=False) for a in (HAll, state[None], ZRH))

    return call


def gru_grad(
    X: Array,
    W: Array,
    R: Array,
    B: Array,
    SL: None,
    Ht0: Array,
    HAll: Array,
    ZRH: Array,
    dHAll: Array,
    dHFinal: Array,
    hidden_size: int,
    linear_before_reset: int,
) -> Call:
    given, H = (X, W, R, B, Ht0, HAll, ZRH, dHAll, dHFinal), hidden_size

    def call() -> tuple[Array, ...]:
        x, w, r_all, b, first, states, gates, dH, G = (a.astype(_work_type(X.dtype), copy=False) for a in given)
        (S, N), w, r_all, Rbh, G = x.shape[:2], w[0], r_all[0], b[0, 5 * H :], G[0]
        Rzr, Rh = r_all[: 2 * H], r_all[2 * H :]
        before = np.concatenate([first, states[:-1, 0]])
        z, r, h = np.split(gates[:, 0], 3, axis=2)
        # Everything that does not wait for G is one pass or one product over all steps.
        to_z, to_h, to_r = (before - h) * z * (1 - z), (1 - z) * (1 - h * h), r * (1 - r)
        to_r *= (before.reshape(S * N, H) @ Rh.T + Rbh).reshape(S, N, H) if linear_before_reset else before
        δ, δh_state = np.empty((S, N, 3 * H), x.dtype), np.empty((S, N, H), x.dtype)
        for t in reversed(range(S)):
            G = G + dH[t, 0]
            δh = G * to_h[t]
            δ[t, :, :H], δ[t, :, 2 * H :] = G * to_z[t], δh
            if linear_before_reset:
                δ[t, :, H : 2 * H], δh_state[t] = δh * to_r[t], δh * r[t]
                through_h = δh_state[t] @ Rh
            else:
                through_h = δh @ Rh
                δ[t, :, H : 2 * H] = through_h * to_r[t]
                through_h *= r[t]
            G = G * z[t] + δ[t, :, : 2 * H] @ Rzr + through_h
        δ, before, r = δ.reshape(S * N, 3 * H), before.reshape(S * N, H), r.reshape(S * N, H)
        last = δh_state.reshape(S * N, H) if linear_before_reset else δ[:, 2 * H :]
        dX, dW = (δ @ w).reshape(x.shape), δ.T @ x.reshape(S * N, -1)
        dRh = last.T @ (before if linear_before_reset else r * before)
        dR = np.concatenate([δ[:, : 2 * H].T @ before, dRh])
        dB = np.concatenate([δ.sum(0), δ[:, : 2 * H].sum(0), last.sum(0)])
        return tuple(a.astype(X.dtype, copy=False) for a in (dX, dW[None], dR[None], dB[None], G[None]))

    return call


FORMS = {
    "gather_grad": gather_grad,
    "gather_elements_grad": gather_elements_grad,
    "slice_grad": slice_grad,
    "gru_training": gru_training,
    "gru_grad": gru_grad,
}
