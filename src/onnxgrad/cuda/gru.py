"""GRUTraining and GRUGrad on CUDA: large products by cuBLAS, all steps of a direction in one launch.

As cuDNN does, products of float32 use TF32 as long as torch.backends.cudnn.allow_tf32 says so, which is its default.
Half types are computed in float32.
"""

from collections.abc import Sequence

import torch

from onnxgrad.cuda.core.grid import choose_tiling
from onnxgrad.cuda.core.gru_backward import backward_steps
from onnxgrad.cuda.core.gru_forward import forward_steps
from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.cuda.core.launch import bits_of, sums_dtype
from onnxgrad.cuda.core.recurrent import (
    add_direction,
    check_lengths,
    check_step,
    counter,
    launch_steps,
    only_where,
    parameters,
    precision,
    states_before,
    tf32,
)
from onnxgrad.ops.families.recurrent import settings
from onnxgrad.ops.gru import DEFAULTS


def gru_training(
    X: torch.Tensor,
    W: torch.Tensor,
    R: torch.Tensor,
    B: torch.Tensor | None,
    SL: torch.Tensor | None,
    Ht0: torch.Tensor | None,
    HAll: torch.Tensor,
    HFinal: torch.Tensor | None,
    ZRH: torch.Tensor,
    hidden_size: int | None,
    linear_before_reset: int,
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
    check_step(3, N, H)
    work = sums_dtype(X.dtype)
    inputs = X.to(work).reshape(S * N, X.shape[2])
    for d, (backwards, (f, g)) in enumerate(directions):
        states = torch.zeros((2, N, H), dtype=work, device=X.device)
        if Ht0 is not None:
            states[0] = Ht0[d]
        if S and N and H:
            weights = R[d].to(work).contiguous()
            tiling = choose_tiling(N, H, 3, work.itemsize, X.device)
            scratch = states if linear_before_reset else torch.empty_like(states)
            launch_steps(
                forward_steps, tiling, _before(inputs, W[d], B, d, H, linear_before_reset, work), weights,
                None if B is None else B[d, 5 * H :].to(work), SL, states, scratch,
                counter(X), HAll[:, d], ZRH[:, d],
                S, N, H, D * N * H, *parameters(f, g), bits_of(clip or 0.0),
                f.name, g.name, bool(linear_before_reset), backwards,
                clip is not None, SL is not None, B is not None, precision(work),
            )  # fmt: skip
        if HFinal is not None:
            HFinal[d] = states[S % 2]


def gru_grad(
    X: torch.Tensor,
    W: torch.Tensor,
    R: torch.Tensor,
    B: torch.Tensor | None,
    SL: torch.Tensor | None,
    Ht0: torch.Tensor | None,
    HAll: torch.Tensor,
    ZRH: torch.Tensor,
    dHAll: torch.Tensor | None,
    dHFinal: torch.Tensor | None,
    dX: torch.Tensor | None,
    dW: torch.Tensor | None,
    dR: torch.Tensor | None,
    dB: torch.Tensor | None,
    dH0: torch.Tensor | None,
    hidden_size: int | None,
    linear_before_reset: int,
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
    check_step(3, N, H)
    work = sums_dtype(X.dtype)
    alive = None if SL is None else torch.arange(S, device=X.device)[:, None] < SL[None, :]
    inputs = only_where(alive, X.to(work)).reshape(S * N, X.shape[2])
    total = None
    for d, (backwards, (f, g)) in enumerate(directions):
        gradient = torch.zeros((N, H), dtype=work, device=X.device)
        if dHFinal is not None:
            gradient.copy_(dHFinal[d])
        deltas = torch.empty((S * N, 3 * H), dtype=work, device=X.device)
        previous = states_before(HAll[:, d], Ht0, d, SL, alive, backwards, work).reshape(S * N, H)
        weights = R[d].to(work)
        reset = torch.empty_like(previous)
        if S and N and H:
            with tf32():
                if linear_before_reset:
                    torch.mm(previous, weights[2 * H :].T, out=reset)
                    if B is not None:
                        reset += B[d, 5 * H :].to(work)
                within = None
                if clip is not None:
                    before = _before(inputs, W[d], B, d, H, linear_before_reset, work)
                    gate = ZRH[:, d, :, H : 2 * H].to(work).reshape(S * N, H)
                    within = _within(before, previous, weights, gate, reset, linear_before_reset, clip)
            tiling = choose_tiling(N, H, 3, work.itemsize, X.device)
            launch_steps(
                backward_steps, tiling, ZRH[:, d], None if dHAll is None else dHAll[:, d], previous,
                weights.T.contiguous(), within, SL, gradient, deltas, reset, counter(X),
                S, N, H, D * N * H, *parameters(f, g),
                f.name, g.name, bool(linear_before_reset), backwards,
                clip is not None, SL is not None, dHAll is not None, precision(work),
            )  # fmt: skip
        total = add_direction(deltas, inputs, W, d, total, dX, dW, dB)
        if dR is not None:
            with tf32():
                dR[d, : 2 * H] = torch.mm(deltas[:, : 2 * H].T, previous)
                left, right = (reset, previous) if linear_before_reset else (deltas[:, 2 * H :], reset)
                dR[d, 2 * H :] = torch.mm(left.T, right)
        if dB is not None and linear_before_reset:
            dB[d, 5 * H :] = reset.sum(0)
        if dH0 is not None:
            dH0[d] = gradient
    if dX is not None and total is not None:
        dX.copy_(total.reshape(dX.shape))


def _before(
    inputs: torch.Tensor,
    W: torch.Tensor,
    B: torch.Tensor | None,
    d: int,
    hidden: int,
    linear_before_reset: int,
    work: torch.dtype,
) -> torch.Tensor:
    """X · Wᵀ and the biases: both of z and r; of h the one outside the reset gate, or both."""
    with tf32():
        if B is None:
            return torch.mm(inputs, W.to(work).T)
        bias = B[d].to(work)
        both = bias[: 3 * hidden].clone()
        end = 2 * hidden if linear_before_reset else 3 * hidden
        both[:end] += bias[3 * hidden : 3 * hidden + end]
        return torch.addmm(both, inputs, W.to(work).T)


def _within(
    before: torch.Tensor,
    previous: torch.Tensor,
    weights: torch.Tensor,
    gate: torch.Tensor,
    reset: torch.Tensor,
    linear_before_reset: int,
    clip: float,
) -> torch.Tensor:
    """1 where clip leaves the input of a gate as it is, else 0."""
    hidden = weights.shape[1]
    before[:, : 2 * hidden].addmm_(previous, weights[: 2 * hidden].T)
    if linear_before_reset:
        before[:, 2 * hidden :] += gate * reset
    else:
        before[:, 2 * hidden :].addmm_(gate * previous, weights[2 * hidden :].T)
    return (before.abs() <= clip).to(before.dtype)
