"""GRUTraining and GRUGrad on the CPU: half types are widened to float32 on the way in and rounded on the way out."""

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
from onnxgrad.cpu.core.recurrent.gru_backward import gru_backward
from onnxgrad.cpu.core.recurrent.gru_forward import gru_forward
from onnxgrad.cpu.core.threads import launch
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
    results = tuple(working_copy(a, X.dtype) for a in outputs)
    launch(
        gru_forward,
        input_of(X, X.dtype),
        inputs_of(X.dtype, W, R, B),
        lengths_of(X, SL),
        input_of(Ht0, X.dtype),
        results,
        activations_of(given),
        linear_before_reset,
        backwards_of(given),
        sizes_of(X, R),
        execution_of(X),
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
    results = tuple(working_copy(a, X.dtype) for a in outputs)
    launch(
        gru_backward,
        input_of(X, X.dtype),
        inputs_of(X.dtype, W, R, B),
        lengths_of(X, SL),
        inputs_of(X.dtype, Ht0, HAll, ZRH, dHAll, dHFinal),
        results,
        workspace((X.shape[0] * X.shape[1] * 3 * R.shape[2],), accumulator(X.dtype)),
        workspace((X.shape[0] * X.shape[1] * R.shape[2],), accumulator(X.dtype)),
        activations_of(given),
        linear_before_reset,
        backwards_of(given),
        sizes_of(X, R),
        execution_of(X),
        bytes_touched=X.nbytes + R.nbytes + ZRH.nbytes,
    )
    for array, result in zip(outputs, results, strict=True):
        narrow(result, array)
