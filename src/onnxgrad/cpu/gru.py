"""GRUTraining and GRUGrad on the CPU: half types are widened to float32 on the way in and rounded on the way out."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxgrad.cpu.core.convert import narrow, widen
from onnxgrad.cpu.core.halves import flat
from onnxgrad.cpu.core.matmul.microkernel import ROWS, gemm_address
from onnxgrad.cpu.core.memory import workspace
from onnxgrad.cpu.core.recurrent.activations import CODES
from onnxgrad.cpu.core.recurrent.gru_backward import gru_backward
from onnxgrad.cpu.core.recurrent.gru_forward import gru_forward
from onnxgrad.cpu.core.threads import get_num_threads, launch
from onnxgrad.ops.gru import DIRECTIONS, chosen_activations
from onnxgrad.tensor_types import Array, accumulator

LARGEST_BLOCK = 64  # rows that walk through time together: more would push their states out of the cache


def gru_training(
    X: Array,
    W: Array,
    R: Array,
    B: Array | None,
    SL: Array | None,
    Ht0: Array | None,
    HAll: Array,
    HFinal: Array,
    ZRH: Array,
    hidden_size: int | None,
    linear_before_reset: int,
    direction: str,
    activations: Sequence[str] | None,
    activation_alpha: Sequence[float] | None,
    activation_beta: Sequence[float] | None,
    clip: float | None,
) -> None:
    codes, parameters = _activations(direction, activations, activation_alpha, activation_beta)
    results = [_working_copy(a) for a in (HAll, HFinal, ZRH)]
    launch(
        gru_forward,
        *(_input(a, X.dtype) for a in (X, W, R, B)),
        _lengths(X, SL),
        _input(Ht0, X.dtype),
        *results,
        codes,
        parameters,
        linear_before_reset,
        clip or 0.0,
        np.array(DIRECTIONS[direction]),
        (*X.shape, R.shape[2], R.shape[0]),
        _rows_per_block(X.shape[1]),
        gemm_address(accumulator(X.dtype)),
        bytes_touched=X.nbytes + R.nbytes + ZRH.nbytes,
    )
    for array, result in zip((HAll, HFinal, ZRH), results, strict=True):
        narrow(result, array)


def gru_grad(
    X: Array,
    W: Array,
    R: Array,
    B: Array | None,
    SL: Array | None,
    Ht0: Array | None,
    HAll: Array,
    ZRH: Array,
    dHAll: Array | None,
    dHFinal: Array | None,
    dX: Array | None,
    dW: Array | None,
    dR: Array | None,
    dB: Array | None,
    dH0: Array | None,
    hidden_size: int | None,
    linear_before_reset: int,
    direction: str,
    activations: Sequence[str] | None,
    activation_alpha: Sequence[float] | None,
    activation_beta: Sequence[float] | None,
    clip: float | None,
) -> None:
    codes, parameters = _activations(direction, activations, activation_alpha, activation_beta)
    outputs = (dX, dW, dR, dB, dH0)
    absent = np.empty(0, accumulator(X.dtype))
    results = [absent if a is None else _working_copy(a) for a in outputs]
    launch(
        gru_backward,
        *(_input(a, X.dtype) for a in (X, W, R, B)),
        _lengths(X, SL),
        *(_input(a, X.dtype) for a in (Ht0, HAll, ZRH, dHAll, dHFinal)),
        *results,
        *_workspace(X, R),
        tuple(a is not None for a in outputs),
        codes,
        parameters,
        linear_before_reset,
        clip or 0.0,
        np.array(DIRECTIONS[direction]),
        (*X.shape, R.shape[2], R.shape[0]),
        _rows_per_block(X.shape[1]),
        get_num_threads(),
        gemm_address(accumulator(X.dtype)),
        bytes_touched=X.nbytes + R.nbytes + ZRH.nbytes,
    )
    for array, result in zip(outputs, results, strict=True):
        if array is not None:
            narrow(result, array)


def _activations(
    direction: str, names: Sequence[str] | None, alphas: Sequence[float] | None, betas: Sequence[float] | None
) -> tuple[Array, Array]:
    """Codes and parameters of f and g, for each direction in turn."""
    attributes: dict[str, Any] = {"direction": direction, "activations": names}
    chosen = chosen_activations({**attributes, "activation_alpha": alphas, "activation_beta": betas})
    return np.array([CODES[c.name] for c in chosen]), np.array([(c.alpha, c.beta) for c in chosen])


def _workspace(X: Array, R: Array) -> tuple[Array, Array]:
    """The two buffers of gru_backward, for all steps and rows of one direction."""
    rows, hidden, dtype = X.shape[0] * X.shape[1], R.shape[2], accumulator(X.dtype)
    return workspace((rows * 3 * hidden,), dtype), workspace((rows * hidden,), dtype)


def _lengths(X: Array, SL: Array | None) -> Array:
    return np.full(X.shape[1], X.shape[0], np.int32) if SL is None else flat(SL)


def _input(array: Array | None, dtype: np.dtype[Any]) -> Array:
    return np.empty(0, accumulator(dtype)) if array is None else widen(array)


def _working_copy(array: Array) -> Array:
    """The array itself, flat, or float32 memory of its size if it holds half numbers."""
    return workspace((array.size,), np.float32) if array.itemsize == 2 else array.reshape(-1)


def _rows_per_block(rows: int) -> int:
    """Rows a thread takes at a time: whole tiles, evenly shared."""
    shared = -(-rows // get_num_threads())
    return min(LARGEST_BLOCK, max(ROWS, -(-shared // ROWS) * ROWS))
