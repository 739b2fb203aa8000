"""Sums down the columns of a matrix, always in the same order; of many rows, first those of blocks of them."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.launch import ceil_div, counting_type, launch, sums_dtype, to_type

WARPS = 16
TILE = WARPS * 32 * 8  # numbers: 16 bytes of a half type for each thread
LOADS = 4  # of tiles, before the first of them is added up
NARROW = 16  # columns of one program: 32 bytes of a half type, the least that memory gives at once
MIDDLE = 32  # of more columns than MOST_NARROW,
MOST_NARROW = 2048
WIDE = 64  # and where there are programs enough
PROGRAMS = 264  # two for each multiprocessor of an H200
MOST_ROWS = 8192  # of one block: a second launch takes as long as reading them


def add_up_columns(matrix: torch.Tensor, rows: int, results: Sequence[torch.Tensor]) -> None:
    """The sums of one or two results' columns, which stand beside each other in each of `rows` rows."""
    columns = sum(result.numel() for result in results)
    if rows == 0:
        for result in results:
            result.zero_()
    if rows == 0 or columns == 0:
        return
    width, blocks = _shares(rows, columns)
    sums = results
    if blocks > 1:
        sums = [torch.empty(blocks * columns, dtype=sums_dtype(matrix.dtype), device=matrix.device)]
    height, split = TILE // width, results[0].numel() if blocks == 1 else columns
    launch(
        _columns, blocks * ceil_div(columns, width), matrix, sums[0], sums[-1], rows, columns, split, blocks,
        LOADS, height, width, split < columns, counting_type(rows * columns),
        tl.float64 if sums_dtype(matrix.dtype) == torch.float64 else tl.float32,
        num_warps=WARPS,
    )  # fmt: skip
    if blocks > 1:
        add_up_columns(sums[0], blocks, results)


def _shares(rows: int, columns: int) -> tuple[int, int]:
    """The columns of a program, and in how many blocks of rows they are added up."""
    across = ceil_div(columns, WIDE)
    blocks = 1 if rows <= MOST_ROWS else max(1, PROGRAMS // across)
    if blocks * across >= PROGRAMS // 2:
        return WIDE, blocks
    return NARROW if columns <= MOST_NARROW else MIDDLE, blocks


@triton.jit
def _columns(
    matrix, first, second, rows, columns, split, blocks,
    LOADS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, KIND: tl.constexpr,
    WORK: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, WIDTH)
    block = tl.program_id(0).to(KIND) // across
    column = tl.program_id(0).to(KIND) % across * WIDTH + tl.arange(0, WIDTH)
    step = tl.arange(0, LOADS * HEIGHT)
    total = tl.zeros([HEIGHT, WIDTH], WORK)
    for start in range(block * LOADS * HEIGHT, rows, blocks * LOADS * HEIGHT):
        row = start + step
        here = (row < rows)[:, None] & (column < columns)[None, :]
        numbers = tl.load(matrix + (row[:, None] * columns + column[None, :]), here, other=0).to(WORK)
        total += tl.sum(tl.reshape(numbers, [LOADS, HEIGHT, WIDTH]), 0)
    result = to_type(tl.sum(total, 0), first.dtype.element_ty)
    tl.store(first + block * columns + column, result, column < split)
    if SPLITS:
        tl.store(second + (column - split), result, (column >= split) & (column < columns))
