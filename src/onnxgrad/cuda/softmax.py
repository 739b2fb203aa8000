"""SoftmaxGrad_13 and LogSoftmaxGrad_13 on CUDA: a program takes some lines along the axis, side by side.

A line that fits into one tile is read once; a longer one twice, tile after tile.
"""

import math

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.activations import exp
from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.cuda.core.launch import ceil_div, counting_type, launch, power_of_two, to_type

TILE = 4096  # elements, at most
NEIGHBOURS = 64  # lines of one program where they lie side by side in memory: 256 bytes of float32
WARPS = 4


def softmax_grad_13(dY: torch.Tensor, Y: torch.Tensor, dX: torch.Tensor, axis: int, bad: BadIndex) -> None:
    _run(dY, Y, dX, axis, False)


def log_softmax_grad_13(dY: torch.Tensor, Y: torch.Tensor, dX: torch.Tensor, axis: int, bad: BadIndex) -> None:
    _run(dY, Y, dX, axis, True)


def _run(dY: torch.Tensor, Y: torch.Tensor, dX: torch.Tensor, axis: int, is_log: bool) -> None:
    if dX.numel() == 0:
        return
    axis %= dX.ndim
    size, inner = dX.shape[axis], math.prod(dX.shape[axis + 1 :])
    lines = dX.numel() // size
    side_by_side = 1 if inner == 1 else min(NEIGHBOURS, power_of_two(inner))
    length = min(power_of_two(size), TILE // side_by_side)
    # Short lines go through together, so that a tile is worth a program.
    height = side_by_side * max(1, min(power_of_two(lines), TILE // 4) // (side_by_side * length))
    launch(
        _lines, ceil_div(lines, height), dY.view(-1), Y.view(-1), dX.view(-1), lines, size, inner,
        height, length, size <= length, is_log, counting_type(dX.numel()),
        tl.float64 if dX.dtype == torch.float64 else tl.float32,
        num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def _lines(
    dY, Y, dX, lines, size, inner,
    LINES: tl.constexpr, LENGTH: tl.constexpr, ONE_TILE: tl.constexpr, IS_LOG: tl.constexpr, KIND: tl.constexpr,
    WORK: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(KIND) * LINES + tl.arange(0, LINES)
    first = (line // inner) * (size * inner) + line % inner
    step = tl.arange(0, LENGTH).to(KIND)
    total = tl.zeros([LINES], WORK)
    for start in range(0, size, LENGTH):
        here = (line < lines)[:, None] & (start + step < size)[None, :]
        at = first[:, None] + ((start + step) * inner)[None, :]
        g = tl.load(dY + at, here, other=0).to(WORK)
        y = tl.load(Y + at, here, other=0).to(WORK)
        total += tl.sum(g if IS_LOG else g * y, 1)
        if ONE_TILE:
            result = g - exp(y) * total[:, None] if IS_LOG else y * (g - total[:, None])
            tl.store(dX + at, to_type(result, dX.dtype.element_ty), here)
    if not ONE_TILE:
        for start in range(0, size, LENGTH):
            here = (line < lines)[:, None] & (start + step < size)[None, :]
            at = first[:, None] + ((start + step) * inner)[None, :]
            g = tl.load(dY + at, here, other=0).to(WORK)
            y = tl.load(Y + at, here, other=0).to(WORK)
            result = g - exp(y) * total[:, None] if IS_LOG else y * (g - total[:, None])
            tl.store(dX + at, to_type(result, dX.dtype.element_ty), here)
