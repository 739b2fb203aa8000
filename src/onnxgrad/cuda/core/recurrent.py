"""What GRU, LSTM and RNN share on CUDA: all steps of a direction in one launch, and the large products by cuBLAS.

As cuDNN does, products of float32 use TF32 as long as torch.backends.cudnn.allow_tf32 says so, which is its default.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.grid import STAGES, Tiling
from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.cuda.core.launch import bits_of, launch
from onnxgrad.ops.families.activations import Chosen

MOST_IN_A_STEP = 2**31  # elements of the gates, counted in 32 bits


def parameters(*activations: Chosen) -> tuple[int, ...]:
    """Alphas and betas as kernels take them."""
    return tuple(bits_of(number) for f in activations for number in (f.alpha, f.beta))


def check_lengths(SL: torch.Tensor | None, steps: int, bad: BadIndex) -> None:
    if SL is not None:
        bad.about_lengths(SL, steps)


def check_step(gates: int, batch: int, hidden: int) -> None:
    if gates * batch * hidden >= MOST_IN_A_STEP:
        raise ValueError(
            f"the gates of one step have {gates * batch * hidden} elements, expected fewer than 2^31 on CUDA"
        )


def counter(like: torch.Tensor) -> torch.Tensor:
    """The counter by which the programs of one launch wait for each other."""
    return torch.zeros(1, dtype=torch.int32, device=like.device)


def launch_steps(kernel: Any, tiling: Tiling, *args: Any) -> None:
    launch(
        kernel, tiling.programs, *args, tiling.rows, tiling.columns, tiling.depth, tiling.programs,
        num_warps=tiling.warps, num_stages=STAGES, launch_cooperative_grid=tiling.programs > 1,
    )  # fmt: skip


def precision(work: torch.dtype) -> str:
    return "tf32" if work == torch.float32 and torch.backends.cudnn.allow_tf32 else "ieee"


@contextlib.contextmanager
def tf32() -> Iterator[None]:
    """cuBLAS under cuDNN's setting for recurrent operators, whatever other products use."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def inputs_of_gates(
    inputs: torch.Tensor, W: torch.Tensor, B: torch.Tensor | None, d: int, work: torch.dtype
) -> torch.Tensor:
    """[S·N, gates · H]: X · Wᵀ and both biases."""
    with tf32():
        if B is None:
            return torch.mm(inputs, W[d].to(work).T)
        return torch.addmm(B[d].to(work).unflatten(0, (2, -1)).sum(0), inputs, W[d].to(work).T)


def add_direction(
    deltas: torch.Tensor,
    inputs: torch.Tensor,
    W: torch.Tensor,
    d: int,
    total: torch.Tensor | None,
    dX: torch.Tensor | None,
    dW: torch.Tensor | None,
    dB: torch.Tensor | None,
) -> torch.Tensor | None:
    """The total of dX, if that is wanted, with what the gates' gradients of a direction give; its dW and dB.

    Both biases have the same gradient.
    """
    with tf32():
        if dX is not None:
            own = torch.mm(deltas, W[d].to(deltas.dtype))
            total = own if total is None else total.add_(own)
        if dW is not None:
            dW[d] = torch.mm(deltas.T, inputs)
    if dB is not None:
        dB[d].unflatten(0, (2, -1))[:] = deltas.sum(0)
    return total


def only_where(alive: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
    """Zeros past a row's length, where there may be NaN, whose product with 0 is NaN."""
    return values if alive is None else torch.where(alive[:, :, None], values, 0)


def states_before(
    HAll: torch.Tensor,
    Ht0: torch.Tensor | None,
    d: int,
    SL: torch.Tensor | None,
    alive: torch.Tensor | None,
    backwards: bool,
    work: torch.dtype,
) -> torch.Tensor:
    """[S, N, H]: the state each row had before each step."""
    steps = HAll.shape[0]
    states = torch.empty(HAll.shape, dtype=work, device=HAll.device)
    first = torch.zeros(HAll.shape[1:], dtype=work, device=HAll.device) if Ht0 is None else Ht0[d].to(work)
    if steps == 0:
        return states
    if not backwards:
        states[0] = first
        states[1:] = HAll[:-1]
    else:
        states[-1] = first
        states[:-1] = HAll[1:]
        if SL is not None:
            last = torch.arange(1, steps + 1, device=SL.device)[:, None] >= SL[None, :]
            states = torch.where(last[:, :, None], first, states)
    return only_where(alive, states)


@triton.jit
def product(
    a, a_row, b, b_row, row, column, rows, columns, depth,
    total, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """total + Σ a[row, k] · b[column, k]."""
    # Other programs have written a since this one last read it: only the second-level cache is sure to know.
    for k in range(0, depth, DEPTH):
        place = k + tl.arange(0, DEPTH)
        left = tl.load(
            a + row[:, None] * a_row + place[None, :],
            (row < rows)[:, None] & (place < depth)[None, :],
            other=0,
            cache_modifier=".cg",
        )
        right = tl.load(
            b + column[None, :] * b_row + place[:, None],
            (column < columns)[None, :] & (place < depth)[:, None],
            other=0,
        )
        total = tl.dot(left, right, total, input_precision=PRECISION, out_dtype=total.dtype)
    return total


@triton.jit
def reaches(t, lengths, row, batch, HAS_LENGTHS: tl.constexpr):
    """Whether each row's sequence has a step t."""
    return t < tl.load(lengths + row, row < batch, other=0) if HAS_LENGTHS else row < batch


@triton.jit
def clamped(x, clip, CLIPS: tl.constexpr):
    return tl.where(x != x, x, tl.minimum(tl.maximum(x, -clip), clip)) if CLIPS else x
