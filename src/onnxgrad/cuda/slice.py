"""SliceGrad on CUDA: every element of dX is written once, as zero or as the element of dY that belongs there."""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.cuda.core.launch import launch, power_of_two
from onnxgrad.ops.slice import Range, merged_ranges

# Only the size of an element matters: it is moved, never computed with.
CARRIERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
TILE_BYTES = 1 << 14
WIDEST = 1 << 12  # columns of a tile


def slice_grad(
    dY: torch.Tensor,
    shape: Any,
    starts: Any,
    ends: Any,
    axes: Any,
    steps: Any,
    dX: torch.Tensor,
    bad: BadIndex,
) -> None:
    if dX.numel() == 0:
        return
    if dY.numel() == 0:
        dX.view(torch.uint8).zero_()
        return
    dims = merged_ranges(dX, starts, ends, axes, steps)
    if dX.element_size() == 16:  # two words of 8 bytes each
        dims = [*dims, (2, Range(0, 1, 2))] if dims[-1][1].step != 1 else [*dims[:-1], _doubled(*dims[-1])]
    carrier = CARRIERS[min(8, dX.element_size())]
    *outer, (dim, last) = dims
    rows = math.prod(length for length, _ in outer)
    columns = min(WIDEST, power_of_two(dim), TILE_BYTES // min(8, dX.element_size()))
    height = max(1, min(power_of_two(rows), TILE_BYTES // min(8, dX.element_size()) // columns))
    across = triton.cdiv(dim, columns)
    # Steps that occur often are known when compiling; any other one is a number like the rest.
    launch(
        _lay,
        across * triton.cdiv(rows, height),
        dY.view(carrier), dX.view(carrier),
        tuple(length for length, _ in outer),
        tuple(taken.start for _, taken in outer),
        tuple(taken.step for _, taken in outer),
        tuple(taken.length for _, taken in outer),
        rows, across, dim, last.start, last.step, last.length,
        last.step if last.step in (1, -1, 2) else 0, len(outer), height, columns,
        num_warps=8,
    )  # fmt: skip


def _doubled(dim: int, taken: Range) -> tuple[int, Range]:
    return 2 * dim, Range(2 * taken.start, 1, 2 * taken.length)


@triton.jit
def _lay(
    dY, dX, dims, starts, steps, lengths,
    rows, across, dim, start, step, length,
    STEP: tl.constexpr, OUTER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = (program // across) * ROWS + tl.arange(0, ROWS)
    column = (program % across) * COLUMNS + tl.arange(0, COLUMNS)
    # The row of dY that belongs to each row of dX, if there is one: coordinate by coordinate, from the last.
    rest, source, stride = row, row * 0, 1 + 0 * program
    taken = row < rows
    for k in tl.static_range(OUTER):
        d: tl.constexpr = OUTER - 1 - k
        away = rest % dims[d] - starts[d]
        nth = away // steps[d]
        taken &= (nth * steps[d] == away) & (nth >= 0) & (nth < lengths[d])
        source += nth * stride
        stride *= lengths[d]
        rest = rest // dims[d]
    if STEP == 1:
        nth = column - start
        hit = (nth >= 0) & (nth < length)
    elif STEP == -1:
        nth = start - column
        hit = (nth >= 0) & (nth < length)
    else:
        away = column - start
        if STEP == 2:
            nth = away >> 1
            hit = nth * 2 == away
        else:
            nth = away // step
            hit = nth * step == away
        hit = hit & (nth >= 0) & (nth < length)
    found = taken[:, None] & hit[None, :] & (column < dim)[None, :]
    value = tl.load(dY + (source * length)[:, None] + nth[None, :], found, other=0)
    tl.store(dX + (row * dim)[:, None] + column[None, :], value, (row < rows)[:, None] & (column < dim)[None, :])
