"""GRUTraining and GRUGrad on the CPU: half types are widened to float32 on the way in and rounded on the way out."""

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
from onnxgrad.cpu.core.recurrent.gru_backward import gru_backward
from onnxgrad.cpu.core.recurrent.gru_forward import gru_forward
from onnxgrad.cpu.core.threads import get_num_threads, launch
from onnxgrad.ops.families.recurrent import settings
from onnxgrad.ops.gru import DEFAULTS
from onnxgrad.tensor_types import Array, accumulator


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
    given = settings(DEFAULTS, direction, activations, activation_alpha, activation_beta, clip)
    outputs = (HAll, HFinal, ZRH)
    results = [working_copy(a, X.dtype) for a in outputs]
    launch(
        gru_forward,
        *(input_of(a, X.dtype) for a in (X, W, R, B)),
        lengths_of(X, SL),
        input_of(Ht0, X.dtype),
        *results,
        *codes_of(given),
        linear_before_reset,
        given.clip or 0.0,
        backwards_of(given),
        (*X.shape, R.shape[2], R.shape[0]),
        rows_per_block(X.shape[1]),
        gemm_address(accumulator(X.dtype)),
        bytes_touched=X.nbytes + R.nbytes + ZRH.nbytes,
    )
    for array, result in zip(outputs, results, strict=True):
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
    given = settings(DEFAULTS, direction, activations, activation_alpha, activation_beta, clip)
    outputs = (dX, dW, dR, dB, dH0)
    results = [working_copy(a, X.dtype) for a in outputs]
    launch(
        gru_backward,
        *(input_of(a, X.dtype) for a in (X, W, R, B)),
        lengths_of(X, SL),
        *(input_of(a, X.dtype) for a in (Ht0, HAll, ZRH, dHAll, dHFinal)),
        *results,
        *_workspace(X, R),
        tuple(a is not None for a in outputs),
        *codes_of(given),
        linear_before_reset,
        given.clip or 0.0,
        backwards_of(given),
        (*X.shape, R.shape[2], R.shape[0]),
        rows_per_block(X.shape[1]),
        get_num_threads(),
        gemm_address(accumulator(X.dtype)),
        bytes_touched=X.nbytes + R.nbytes + ZRH.nbytes,
    )
    for array, result in zip(outputs, results, strict=True):
        if array is not None:
            narrow(result, array)


def _workspace(X: Array, R: Array) -> tuple[Array, Array]:
    """The two buffers of gru_backward, for all steps and rows of one direction."""
    rows, hidden, dtype = X.shape[0] * X.shape[1], R.shape[2], accumulator(X.dtype)
    return workspace((rows * 3 * hidden,), dtype), workspace((rows * hidden,), dtype)
