"""SliceGrad on CUDA: every element of dX is written once, as zero or as the element of dY that belongs there."""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.cuda.core.launch import ceil_div, counting_type, launch, power_of_two
from onnxgrad.ops.slice import Range, merged_ranges

# Only the size of an element matters: it is moved, never computed with.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
TILE_BYTES = 1 << 12
WARPS = 4
COPIED, SPREAD, SWAPPED = 0, 1, 2  # how a word of dX is made of dY


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
    dims = merged_ranges(tuple(dX.shape), starts, ends, axes, steps)
    width = dX.element_size()
    read, written, how = WORDS[min(8, width)], WORDS[min(8, width)], COPIED
    shift = 0
    dim, last = dims[-1]
    if width == 16:  # two words of 8 bytes each
        dims = [*dims, (2, Range(0, 1, 2))] if last.step != 1 else [*dims[:-1], _doubled(*dims[-1])]
    elif dX.data_ptr() % 8 or dY.data_ptr() % 8:
        pass
    elif width < 8 and last.step == 2 and 2 * last.length == dim:
        # Every other element: one of dY and one zero make a word of twice the size, and nothing is left to pick.
        written, how, shift = WORDS[2 * width], SPREAD, 8 * width * last.start
        dims = [*dims[:-1], (dim // 2, Range(0, 1, dim // 2))]
    elif width == 2 and last == Range(dim - 1, -1, dim) and dim % 2 == 0:
        # Backwards: two neighbours are read at once, and change places.
        read, written, how = WORDS[4], WORDS[4], SWAPPED
        dims = [*dims[:-1], (dim // 2, Range(dim // 2 - 1, -1, dim // 2))]
    *outer, (dim, last) = dims
    rows = math.prod(length for length, _ in outer)
    room = TILE_BYTES // written.itemsize
    columns = min(room, power_of_two(dim))
    height = max(1, min(power_of_two(rows), room // columns))
    across = ceil_div(dim, columns)
    # Steps that occur often are known when compiling; any other one is a number like the rest.
    launch(
        _lay,
        across * ceil_div(rows, height),
        dY.view(-1).view(read),
        dX.view(-1).view(written),
        tuple(length for length, _ in outer),
        tuple(taken.start for _, taken in outer),
        tuple(taken.step for _, taken in outer),
        tuple(taken.length for _, taken in outer),
        *(rows, across, dim, last.start, last.step, last.length),
        *(shift, 256**width - 1 if how == SPREAD else 0),
        last.step if last.step in (1, -1) else 0, len(outer), height, columns, how, counting_type(dX.numel()),
        num_warps=WARPS,
    )  # fmt: skip


def _doubled(dim: int, taken: Range) -> tuple[int, Range]:
    return 2 * dim, Range(2 * taken.start, 1, 2 * taken.length)


@triton.jit
def _lay(
    dY, dX, dims, starts, steps, lengths,
    rows, across, dim, start, step, length, shift, mask,
    STEP: tl.constexpr, OUTER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HOW: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(KIND)
    row = (program // across) * ROWS + tl.arange(0, ROWS)
    column = (program % across) * COLUMNS + tl.arange(0, COLUMNS)
    # The row of dY that belongs to each row of dX, if there is one: coordinate by coordinate, from the last.
    rest, source, stride = row, row * 0, 1 + 0 * program
    taken = row < rows
    for k in tl.static_range(OUTER):
        away = rest % dims[OUTER - 1 - k] - starts[OUTER - 1 - k]
        nth = away // steps[OUTER - 1 - k]
        taken &= (nth * steps[OUTER - 1 - k] == away) & (nth >= 0) & (nth < lengths[OUTER - 1 - k])
        source += nth * stride
        stride *= lengths[OUTER - 1 - k]
        rest = rest // dims[OUTER - 1 - k]
    if STEP == 1:
        place = column - start
        hit = (place >= 0) & (place < length)
    elif STEP == -1:
        place = start - column
        hit = (place >= 0) & (place < length)
    else:
        place = (column - start) // step
        hit = (place * step == column - start) & (place >= 0) & (place < length)
    found = taken[:, None] & (hit & (column < dim))[None, :]
    value = tl.load(dY + (source * length)[:, None] + place[None, :], found, other=0)
    if HOW == 1:
        value = (value.to(dX.dtype.element_ty) & mask) << shift  # of a negative number, the bits above are not zeros
    elif HOW == 2:
        value = ((value >> 16) & 0xFFFF) | (value << 16)
    tl.store(dX + (row * dim)[:, None] + column[None, :], value, (row < rows)[:, None] & (column < dim)[None, :])
