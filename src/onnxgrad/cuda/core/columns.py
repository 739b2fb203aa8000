"""Sums down the columns of a matrix: programs add up blocks of rows, others these sums, always in the same order."""

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.launch import ceil_div, counting_type, launch, sums_dtype, to_type

WIDTH = 64  # columns of one program: 256 bytes of float32
HEIGHT = 32  # rows that it reads at once
BLOCKS = 64  # of rows, at most
WARPS = 4


def add_up_columns(
    Y_grad: torch.Tensor,
    rows: int,
    scale_grad: torch.Tensor | None,
    bias_grad: torch.Tensor | None,
    normalized: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    centred: bool = False,
) -> None:
    """The gradient of a bias that was added to each of `rows` rows, and of a scale that they were multiplied with.

    What was multiplied is (X - mean) · inv_std_var, `normalized` as these three, of which the last two are numbers for
    each row; without `centred` the mean is not subtracted.
    """
    results = [result.view(-1) for result in (scale_grad, bias_grad) if result is not None]
    if rows == 0:
        for result in results:
            result.zero_()
    if rows == 0 or not results:
        return
    size, dtype = results[0].numel(), sums_dtype(Y_grad.dtype)
    kinds = counting_type(Y_grad.numel()), tl.float64 if dtype == torch.float64 else tl.float32
    per_block = max(HEIGHT, ceil_div(rows, BLOCKS))
    blocks, across = ceil_div(rows, per_block), ceil_div(size, WIDTH)
    sums = torch.empty(len(results) * blocks * size, dtype=dtype, device=Y_grad.device)
    launch(
        _columns, blocks * across, Y_grad, *(normalized or (Y_grad,) * 3), sums, rows, size, per_block, across, blocks,
        HEIGHT, WIDTH, centred, scale_grad is not None, bias_grad is not None, *kinds,
        num_warps=WARPS,
    )  # fmt: skip
    for part, result in zip(sums.chunk(len(results)), results, strict=True):
        launch(_total, across, part, result, blocks, size, HEIGHT, WIDTH, *kinds, num_warps=WARPS)


@triton.jit
def _columns(
    Y_grad, X, mean, inv_std_var, sums, rows, size, per_block, across, blocks,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CENTRED: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(KIND) // across
    column = tl.program_id(0).to(KIND) % across * WIDTH + tl.arange(0, WIDTH)
    scaled = tl.zeros([WIDTH], WORK)
    plain = tl.zeros([WIDTH], WORK)
    first = block * per_block
    end = tl.minimum(first + per_block, rows)
    for start in range(first, end, HEIGHT):
        row = start + tl.arange(0, HEIGHT)
        here = (row < end)[:, None] & (column < size)[None, :]
        at = row[:, None] * size + column[None, :]
        g = tl.load(Y_grad + at, here, other=0).to(WORK)
        if HAS_BIAS:
            plain += tl.sum(g, 0)
        if HAS_SCALE:
            x = tl.load(X + at, here, other=0).to(WORK)
            if CENTRED:
                x -= tl.load(mean + row, row < end, other=0).to(WORK)[:, None]
            scaled += tl.sum(g * (x * tl.load(inv_std_var + row, row < end, other=0).to(WORK)[:, None]), 0)
    at = block * size + column
    if HAS_SCALE:
        tl.store(sums + at, scaled, column < size)
        at += blocks * size
    if HAS_BIAS:
        tl.store(sums + at, plain, column < size)


@triton.jit
def _total(
    sums, result, blocks, size, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, WORK: tl.constexpr
):
    column = tl.program_id(0).to(KIND) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], WORK)
    for start in range(0, blocks, HEIGHT):
        block = start + tl.arange(0, HEIGHT).to(KIND)
        here = (block < blocks)[:, None] & (column < size)[None, :]
        total += tl.sum(tl.load(sums + block[:, None] * size + column[None, :], here, other=0), 0)
    tl.store(result + column, to_type(total, result.dtype.element_ty), column < size)
