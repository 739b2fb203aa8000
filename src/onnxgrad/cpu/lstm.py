"""LSTMTraining and LSTMGrad on the CPU: half types are widened to float32 on the way in and rounded on the way out."""

from collections.abc import Sequence

from onnxgrad.cpu.core.convert import input_of, narrow, working_copy
from onnxgrad.cpu.core.memory import workspace
from onnxgrad.cpu.core.recurrent.arguments import (
    activations_of,
    backwards_of,
    execution_of,
    inputs_of,
    lengths_of,
    sizes_of,
)
from onnxgrad.cpu.core.recurrent.lstm_backward import lstm_backward
from onnxgrad.cpu.core.recurrent.lstm_forward import lstm_forward
from onnxgrad.cpu.core.threads import launch
from onnxgrad.ops.families.recurrent import settings
from onnxgrad.ops.lstm import DEFAULTS
from onnxgrad.tensor_types import Array, accumulator


def lstm_training(
    X: Array,
    W: Array,
    R: Array,
    B: Array | None,
    SL: Array | None,
    Ht0: Array | None,
    Ct0: Array | None,
    P: Array | None,
    HAll: Array,
    HFinal: Array,
    CFinal: Array,
    CAll: Array,
    IOFC: Array,
    hidden_size: int | None,
    input_forget: int,
    direction: str,
    activations: Sequence[str] | None,
    activation_alpha: Sequence[float] | None,
    activation_beta: Sequence[float] | None,
    clip: float | None,
) -> None:
    given = settings(DEFAULTS, direction, activations, activation_alpha, activation_beta, clip)
    outputs = (HAll, HFinal, CFinal, CAll, IOFC)
    results = tuple(working_copy(a, X.dtype) for a in outputs)
    launch(
        lstm_forward,
        input_of(X, X.dtype),
        inputs_of(X.dtype, W, R, B),
        input_of(P, X.dtype),
        lengths_of(X, SL),
        input_of(Ht0, X.dtype),
        input_of(Ct0, X.dtype),
        results,
        activations_of(given),
        input_forget,
        backwards_of(given),
        sizes_of(X, R),
        execution_of(X),
        bytes_touched=X.nbytes + R.nbytes + IOFC.nbytes,
    )
    for array, result in zip(outputs, results, strict=True):
        narrow(result, array)


def lstm_grad(
    X: Array,
    W: Array,
    R: Array,
    SL: Array | None,
    Ht0: Array | None,
    Ct0: Array | None,
    HAll: Array,
    CAll: Array,
    IOFC: Array,
    dHAll: Array | None,
    dHFinal: Array | None,
    dCFinal: Array | None,
    B: Array | None,
    P: Array | None,
    dX: Array | None,
    dW: Array | None,
    dR: Array | None,
    dB: Array | None,
    dH0: Array | None,
    dC0: Array | None,
    dP: Array | None,
    hidden_size: int | None,
    input_forget: int,
    direction: str,
    activations: Sequence[str] | None,
    activation_alpha: Sequence[float] | None,
    activation_beta: Sequence[float] | None,
    clip: float | None,
) -> None:
    given = settings(DEFAULTS, direction, activations, activation_alpha, activation_beta, clip)
    outputs = (dX, dW, dR, dB, dH0, dC0, dP)
    results = tuple(working_copy(a, X.dtype) for a in outputs)
    launch(
        lstm_backward,
        input_of(X, X.dtype),
        inputs_of(X.dtype, W, R, B),
        input_of(P, X.dtype),
        lengths_of(X, SL),
        inputs_of(X.dtype, Ht0, Ct0, HAll, CAll, IOFC, dHAll, dHFinal, dCFinal),
        results[:5],
        *results[5:],
        workspace((X.shape[0] * X.shape[1] * 4 * R.shape[2],), accumulator(X.dtype)),
        activations_of(given),
        input_forget,
        backwards_of(given),
        sizes_of(X, R),
        execution_of(X),
        bytes_touched=X.nbytes + R.nbytes + IOFC.nbytes,
    )
    for array, result in zip(outputs, results, strict=True):
        narrow(result, array)
