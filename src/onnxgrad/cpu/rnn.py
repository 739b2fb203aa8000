"""RNNGrad on the CPU: half types are widened to float32 on the way in and rounded on the way out."""

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
from onnxgrad.cpu.core.recurrent.rnn_backward import rnn_backward
from onnxgrad.cpu.core.threads import launch
from onnxgrad.ops.families.recurrent import settings
from onnxgrad.ops.rnn import DEFAULTS
from onnxgrad.tensor_types import Array, accumulator


def rnn_grad(
    X: Array,
    W: Array,
    R: Array,
    B: Array | None,
    SL: Array | None,
    Ht0: Array | None,
    HAll: Array,
    dHAll: Array | None,
    dHFinal: Array | None,
    dX: Array | None,
    dW: Array | None,
    dR: Array | None,
    dB: Array | None,
    dH0: Array | None,
    hidden_size: int | None,
    direction: str,
    activations: Sequence[str] | None,
    activation_alpha: Sequence[float] | None,
    activation_beta: Sequence[float] | None,
    clip: float | None,
) -> None:
    outputs = (dX, dW, dR, dB, dH0)
    results = tuple(working_copy(a, X.dtype) for a in outputs)
    given = settings(DEFAULTS, direction, activations, activation_alpha, activation_beta, clip)
    launch(
        rnn_backward,
        input_of(X, X.dtype),
        inputs_of(X.dtype, W, R, B),
        lengths_of(X, SL),
        inputs_of(X.dtype, Ht0, HAll, dHAll, dHFinal),
        results,
        workspace((X.shape[0] * X.shape[1] * R.shape[2],), accumulator(X.dtype)),
        activations_of(given),
        backwards_of(given),
        sizes_of(X, R),
        execution_of(X),
        bytes_touched=X.nbytes + R.nbytes + HAll.nbytes,
    )
    for array, result in zip(outputs, results, strict=True):
        narrow(result, array)
