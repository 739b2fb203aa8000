"""LSTMTraining and LSTMGrad on CUDA: large products by cuBLAS, all steps of a direction in one launch.

Half types are computed in float32.
"""

from collections.abc import Sequence

import torch

from onnxgrad.cuda.core.grid import choose_tiling
from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.cuda.core.launch import bits_of, sums_dtype
from onnxgrad.cuda.core.lstm_steps import backward_steps, forward_steps
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
from onnxgrad.ops.families.recurrent import settings
from onnxgrad.ops.lstm import DEFAULTS


def lstm_training(
    X: torch.Tensor,
    W: torch.Tensor,
    R: torch.Tensor,
    B: torch.Tensor | None,
    SL: torch.Tensor | None,
    Ht0: torch.Tensor | None,
    Ct0: torch.Tensor | None,
    P: torch.Tensor | None,
    HAll: torch.Tensor,
    HFinal: torch.Tensor | None,
    CFinal: torch.Tensor | None,
    CAll: torch.Tensor,
    IOFC: torch.Tensor,
    hidden_size: int | None,
    input_forget: int,
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
    check_step(4, N, H)
    work = sums_dtype(X.dtype)
    inputs = X.to(work).reshape(S * N, X.shape[2])
    for d, (backwards, (f, g, h)) in enumerate(directions):
        states = torch.zeros((2, N, H), dtype=work, device=X.device)
        cells = torch.zeros((N, H), dtype=work, device=X.device)
        if Ht0 is not None:
            states[0] = Ht0[d]
        if Ct0 is not None:
            cells.copy_(Ct0[d])
        if S and N and H:
            tiling = choose_tiling(N, H, 4, work.itemsize, X.device)
            launch_steps(
                forward_steps, tiling, inputs_of_gates(inputs, W, B, d, work), R[d].to(work).contiguous(),
                None if P is None else P[d].to(work), SL, states, cells, counter(X), HAll[:, d], CAll[:, d], IOFC[:, d],
                S, N, H, D * N * H, *parameters(f, g, h), bits_of(clip or 0.0),
                f.name, g.name, h.name, bool(input_forget), backwards,
                clip is not None, SL is not None, P is not None, precision(work),
            )  # fmt: skip
        if HFinal is not None:
            HFinal[d] = states[S % 2]
        if CFinal is not None:
            CFinal[d] = cells


def lstm_grad(
    X: torch.Tensor,
    W: torch.Tensor,
    R: torch.Tensor,
    SL: torch.Tensor | None,
    Ht0: torch.Tensor | None,
    Ct0: torch.Tensor | None,
    HAll: torch.Tensor,
    CAll: torch.Tensor,
    IOFC: torch.Tensor,
    dHAll: torch.Tensor | None,
    dHFinal: torch.Tensor | None,
    dCFinal: torch.Tensor | None,
    B: torch.Tensor | None,
    P: torch.Tensor | None,
    dX: torch.Tensor | None,
    dW: torch.Tensor | None,
    dR: torch.Tensor | None,
    dB: torch.Tensor | None,
    dH0: torch.Tensor | None,
    dC0: torch.Tensor | None,
    dP: torch.Tensor | None,
    hidden_size: int | None,
    input_forget: int,
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
    check_step(4, N, H)
    work = sums_dtype(X.dtype)
    alive = None if SL is None else torch.arange(S, device=X.device)[:, None] < SL[None, :]
    inputs = only_where(alive, X.to(work)).reshape(S * N, X.shape[2])
    total = None
    for d, (backwards, (f, g, h)) in enumerate(directions):
        gradient, to_cells = torch.zeros((2, N, H), dtype=work, device=X.device)
        for final, start in ((dHFinal, gradient), (dCFinal, to_cells)):
            if final is not None:
                start.copy_(final[d])
        deltas = torch.empty((S * N, 4 * H), dtype=work, device=X.device)
        state = states_before(HAll[:, d], Ht0, d, SL, alive, backwards, work).reshape(S * N, H)
        cell = states_before(CAll[:, d], Ct0, d, SL, alive, backwards, work).reshape(S * N, H)
        peepholes = None if P is None else P[d].to(work)
        new_cell = only_where(alive, CAll[:, d].to(work)).reshape(S * N, H)
        if S and N and H:
            weights = R[d].to(work)
            within = None
            if clip is not None:
                before = inputs_of_gates(inputs, W, B, d, work)
                with tf32():
                    before.addmm_(state, weights.T)
                if peepholes is not None:
                    of_i, of_o, of_f = peepholes.unflatten(0, (3, H))
                    before[:, :H] += of_i * cell
                    before[:, H : 2 * H] += of_o * new_cell
                    before[:, 2 * H : 3 * H] += of_f * cell
                within = (before.abs() <= clip).to(work)
            tiling = choose_tiling(N, H, 4, work.itemsize, X.device)
            launch_steps(
                backward_steps, tiling, IOFC[:, d], CAll[:, d], None if dHAll is None else dHAll[:, d], cell,
                weights.T.contiguous(), peepholes, within, SL, gradient, to_cells, deltas, counter(X),
                S, N, H, D * N * H, *parameters(f, g, h),
                f.name, g.name, h.name, bool(input_forget), backwards,
                clip is not None, SL is not None, P is not None, dHAll is not None, precision(work),
            )  # fmt: skip
        total = add_direction(deltas, inputs, W, d, total, dX, dW, dB)
        if dR is not None:
            with tf32():
                dR[d] = torch.mm(deltas.T, state)
        if dP is not None:
            for k, cells in enumerate((cell, new_cell, cell)):
                dP[d, k * H : (k + 1) * H] = (deltas[:, k * H : (k + 1) * H] * cells).sum(0)
        if dH0 is not None:
            dH0[d] = gradient
        if dC0 is not None:
            dC0[d] = to_cells
    if dX is not None and total is not None:
        dX.copy_(total.reshape(dX.shape))
