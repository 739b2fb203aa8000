"""RNNGrad on CUDA: large products by cuBLAS, all steps of a direction in one launch.

Half types are computed in float32.
"""

from collections.abc import Sequence

import torch

from onnxgrad.cuda.core.grid import choose_tiling
from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.cuda.core.launch import sums_dtype
from onnxgrad.cuda.core.recurrent import (
    add_direction,
    check_lengths,
    check_step,
    counter,
    inputs_of_gates,
    launch_steps,
    only_where,
    parameters,
    precision,
    states_before,
    tf32,
)
from onnxgrad.cuda.core.rnn_steps import backward_steps
from onnxgrad.ops.families.recurrent import settings
from onnxgrad.ops.rnn import DEFAULTS


def rnn_grad(
    X: torch.Tensor,
    W: torch.Tensor,
    R: torch.Tensor,
    B: torch.Tensor | None,
    SL: torch.Tensor | None,
    Ht0: torch.Tensor | None,
    HAll: torch.Tensor,
    dHAll: torch.Tensor | None,
    dHFinal: torch.Tensor | None,
    dX: torch.Tensor | None,
    dW: torch.Tensor | None,
    dR: torch.Tensor | None,
    dB: torch.Tensor | None,
    dH0: torch.Tensor | None,
    hidden_size: int | None,
    direction: str,
    activations: Sequence[str] | None,
    activation_alpha: Sequence[float] | None,
    activation_beta: Sequence[float] | None,
    clip: float | None,
    bad: BadIndex,
) -> None:
    (S, N, _), (D, _, H) = X.shape, R.shape
    directions, clip = settings(DEFAULTS, direction, activations, activation_alpha, activation_beta, clip)
    check_lengths(SL, S, bad)
    check_step(1, N, H)
    work = sums_dtype(X.dtype)
    alive = None if SL is None else torch.arange(S, device=X.device)[:, None] < SL[None, :]
    inputs = only_where(alive, X.to(work)).reshape(S * N, X.shape[2])
    total = None
    for d, (backwards, (f,)) in enumerate(directions):
        gradient = torch.zeros((N, H), dtype=work, device=X.device)
        if dHFinal is not None:
            gradient.copy_(dHFinal[d])
        deltas = torch.empty((S * N, H), dtype=work, device=X.device)
        state = states_before(HAll[:, d], Ht0, d, SL, alive, backwards, work).reshape(S * N, H)
        if S and N and H:
            weights = R[d].to(work)
            within = None
            if clip is not None:
                before = inputs_of_gates(inputs, W, B, d, work)
                with tf32():
                    before.addmm_(state, weights.T)
                within = (before.abs() <= clip).to(work)
            tiling = choose_tiling(N, H, 1, work.itemsize, X.device)
            launch_steps(
                backward_steps, tiling, HAll[:, d], None if dHAll is None else dHAll[:, d], weights.T.contiguous(),
                within, SL, gradient, deltas, counter(X),
                S, N, H, D * N * H, *parameters(f),
                f.name, backwards,
                clip is not None, SL is not None, dHAll is not None, precision(work),
            )  # fmt: skip
        total = add_direction(deltas, inputs, W, d, total, dX, dW, dB)
        if dR is not None:
            with tf32():
                dR[d] = torch.mm(deltas.T, state)
        if dH0 is not None:
            dH0[d] = gradient
    if dX is not None and total is not None:
        dX.copy_(total.reshape(dX.shape))
