"""LSTMTraining and LSTMGrad on the CPU: half types are widened to float32 on the way in and rounded on the way out."""

from collections.abc import Sequence

from onnxgrad.cpu.core.convert import narrow
from onnxgrad.cpu.core.matmul.microkernel import gemm_address
from onnxgrad.cpu.core.memory import workspace
from onnxgrad.cpu.core.recurrent.arguments import (
    backwards_of,
    codes_of,
    input_of,
    lengths_of,
    rows_per_block,
    working_copy,
)
from onnxgrad.cpu.core.recurrent.lstm_backward import lstm_backward
from onnxgrad.cpu.core.recurrent.lstm_forward import lstm_forward
from onnxgrad.cpu.core.threads import get_num_threads, launch
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
    results = [working_copy(a, X.dtype) for a in outputs]
    launch(
        lstm_forward,
        *(input_of(a, X.dtype) for a in (X, W, R, B)),
        lengths_of(X, SL),
        *(input_of(a, X.dtype) for a in (Ht0, Ct0, P)),
        *results,
        *codes_of(given),
        input_forget,
        given.clip or 0.0,
        backwards_of(given),
        (*X.shape, R.shape[2], R.shape[0]),
        rows_per_block(X.shape[1]),
        gemm_address(accumulator(X.dtype)),
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
    results = [working_copy(a, X.dtype) for a in outputs]
    steps, rows, inputs = X.shape
    launch(
        lstm_backward,
        *(input_of(a, X.dtype) for a in (X, W, R)),
        lengths_of(X, SL),
        *(input_of(a, X.dtype) for a in (Ht0, Ct0, HAll, CAll, IOFC, dHAll, dHFinal, dCFinal, B, P)),
        *results,
        workspace((steps * rows * 4 * R.shape[2],), accumulator(X.dtype)),
        tuple(a is not None for a in outputs),
        *codes_of(given),
        input_forget,
        given.clip or 0.0,
        backwards_of(given),
        (steps, rows, inputs, R.shape[2], R.shape[0]),
        rows_per_block(rows),
        get_num_threads(),
        gemm_address(accumulator(X.dtype)),
        bytes_touched=X.nbytes + R.nbytes + IOFC.nbytes,
    )
    for array, result in zip(outputs, results, strict=True):
        if array is not None:
            narrow(result, array)
