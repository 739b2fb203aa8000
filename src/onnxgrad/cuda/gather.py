"""GatherGrad on CUDA: the indices are sorted, then every row of dX is summed and written once, in a fixed order.

A row that many indices name would keep one program busy while the rest of the GPU waits. So rows named more than
`long` times are summed in pieces, each by a program of its own, and the pieces are added up in a last small kernel.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.indices import BadIndex, keys_offset, sorted_runs
from onnxgrad.cuda.core.launch import ceil_div, counting_type, launch, power_of_two, sums_dtype, to_type

WIDE = 256  # elements of a row from which on a program takes one row of dX, or a part of it
COMBINED = 64  # pieces added up at once
ENOUGH_PROGRAMS = 4096
ENOUGH_ELEMENTS = 1 << 22  # of dX, worked on at the same time
ENOUGH_PIECES = 4096  # programs for them: most find no long run and are gone at once, yet each takes its time
WATCHED = 8  # chunks that one program looks at for a run that begins there: most have none
MANY = 1 << 16  # indices
SPARSE_IF = 2  # rows to an index, or more: then zeroing first is quicker, for half types


class Tiles(NamedTuple):
    """How dX is cut up: a program writes `blocks` tiles of `rows` × `columns`, one below the other.

    `sparse`: few rows are named, so all of dX is zeroed first, and tiles are of those rows alone.
    """

    sparse: bool
    rows: int
    columns: int
    blocks: int
    unroll: int  # rows of dY read at once for each row of dX
    depth: int  # and for a piece of a long run
    long: int  # times a row is named before it is summed in pieces of as many
    warps: int


def choose_tiles(size: int, count: int, inner: int, outer: int, itemsize: int) -> Tiles:
    """Measured on an H200; bench/cuda shows what it gives."""
    if inner >= WIDE:
        columns = min(1024, power_of_two(inner))
        rows = 1 if count >= size else max(1, 2048 // columns)
        long = 128 if count >= MANY else 32  # short pieces where there are too few long ones to fill the GPU
        return Tiles(False, rows, columns, 1, 4 if columns > 512 else 2, max(1, 4096 // columns), long, 4)
    columns = min(power_of_two(inner * outer), max(4, power_of_two(inner)))
    sparse = itemsize == 2 and SPARSE_IF * count <= size
    lines, elements, unroll, warps = (count, 2048, 1, 4) if sparse else (size, 4096, 2, 8)
    rows = min(power_of_two(lines), max(1, elements // columns))
    # The same few lines of dY are read for all rows of dX: one program finds them in its first-level cache.
    tiles = ceil_div(lines, rows) * ceil_div(inner * outer, columns)
    blocks = min(ceil_div(lines, rows), max(1, tiles * elements // ENOUGH_ELEMENTS))
    return Tiles(sparse, rows, columns, blocks, unroll, min(32, max(1, 2048 // columns)), 32, warps)


def gather_grad(
    shape: Any, indices: torch.Tensor, dY: torch.Tensor, dX: torch.Tensor, axis: int, bad: BadIndex
) -> None:
    axis %= dX.ndim
    size, count = dX.shape[axis], indices.numel()
    bad.about(indices, size)
    if dX.numel() == 0 or count == 0:
        bad.check(indices, -size, size)
        dX.zero_()
        return
    sum_by_index(indices, dY, dX, math.prod(dX.shape[:axis]), size, math.prod(dX.shape[axis + 1 :]), bad)


def sum_by_index(
    indices: torch.Tensor, dY: torch.Tensor, dX: torch.Tensor, outer: int, size: int, inner: int, bad: BadIndex
) -> None:
    """dX[o, indices[k]] = Σ dY[o, k], rows of `inner` elements each."""
    count = indices.numel()
    keys, order, bounds = sorted_runs(indices, size, bad)
    tiles = choose_tiles(size, count, inner, outer, dX.element_size())
    wide = inner >= WIDE
    # Narrow rows of several batches lie side by side in a tile; a wide one is in one batch only.
    across = outer * ceil_div(inner, tiles.columns) if wide else ceil_div(outer * inner, tiles.columns)
    down = ceil_div(count if tiles.sparse else size, tiles.rows * tiles.blocks)
    chunks = ceil_div(count, tiles.long) if count > tiles.long else 0
    pieces = torch.empty((chunks, 2, outer * inner), dtype=sums_dtype(dX.dtype), device=dX.device)
    if tiles.sparse:
        dX.zero_()
    kind = counting_type(dY.numel(), dX.numel(), pieces.numel(), size)
    groups = min(across, max(1, ceil_div(ENOUGH_PIECES, max(1, chunks))))
    launch(
        _sum_rows,
        across * down + groups * chunks,
        *(dY, keys, order, bounds, dX, pieces),
        *(size, count, inner, outer, across, chunks, groups, tiles.blocks),
        wide, tiles.sparse, tiles.rows, tiles.columns, tiles.unroll, tiles.depth, tiles.long, kind,
        num_warps=tiles.warps,
    )  # fmt: skip
    if chunks == 0:
        return
    width = min(32, power_of_two(inner if wide else outer * inner))
    across = outer * ceil_div(inner, width) if wide else ceil_div(outer * inner, width)
    watchers = ceil_div(chunks, WATCHED)
    groups = min(across, max(1, ceil_div(ENOUGH_PROGRAMS, watchers)))
    launch(
        _add_pieces,
        groups * watchers,
        *(keys, bounds, dX, pieces),
        *(size, count, inner, outer, across, groups),
        wide, width, COMBINED, WATCHED, tiles.long, kind,
    )  # fmt: skip


@triton.jit
def _columns(block, across, inner, outer, WIDE: tl.constexpr, COLUMNS: tl.constexpr):
    """Batch and place within a row of each column of a block, and which of them exist."""
    if WIDE:
        blocks = across // outer
        batch = block // blocks
        place = block % blocks * COLUMNS + tl.arange(0, COLUMNS)
        exists = place < inner
    else:
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        batch = column // inner
        place = column % inner
        exists = column < outer * inner
    return batch, place, exists


@triton.jit
def _run(keys, bounds, position, size, KIND: tl.constexpr):
    """The key at a position, and where its run starts and ends."""
    key = tl.load(keys + position).to(KIND) - keys_offset(keys)
    return key, tl.load(bounds + key).to(KIND), tl.load(bounds + size + 1 + key).to(KIND)


@triton.jit
def _sum_rows(
    dY, keys, order, bounds, dX, pieces,
    size, count, inner, outer, across, chunks, groups, blocks,
    WIDE: tl.constexpr, SPARSE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr, DEPTH: tl.constexpr, LONG: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The first programs sum the pieces of long runs, the others the rows that are named LONG times or less."""
    program = tl.program_id(0).to(KIND)
    if program < chunks * groups:
        _sum_chunk(
            dY, keys, order, bounds, pieces, program // groups, program % groups, groups, size, count, inner, outer,
            across, WIDE, DEPTH, COLUMNS, LONG, KIND,
        )  # fmt: skip
    else:
        program -= chunks * groups
        batch, place, exists = _columns(program % across, across, inner, outer, WIDE, COLUMNS)
        terms = dY + batch * count * inner + place
        result = dX + batch * size * inner + place
        sums = pieces.dtype.element_ty
        for block in range(blocks):
            line = (program // across * blocks + block) * ROWS + tl.arange(0, ROWS)
            row, start, end = _lines(keys, bounds, line, size, count, SPARSE, KIND)
            short = (row < size) & (end - start <= LONG)
            _sum_short(terms, order, result, exists, row, start, end, short, inner, sums, ROWS, COLUMNS, UNROLL, KIND)


@triton.jit
def _lines(keys, bounds, line, size, count, SPARSE: tl.constexpr, KIND: tl.constexpr):
    """Rows of dX and their runs: all of them in turn, or those named, where the line is the position of their run."""
    if SPARSE:
        row = tl.load(keys + line, line < count, other=0).to(KIND) - keys_offset(keys)
        before = tl.load(keys + line - 1, (line > 0) & (line < count), other=0).to(KIND) - keys_offset(keys)
        row = tl.where((line < count) & ((line == 0) | (row != before)), row, size)
        start = line
    else:
        row = line
        start = tl.load(bounds + row, row < size, other=0).to(KIND)
    return row, start, tl.load(bounds + size + 1 + row, row < size, other=0).to(KIND)


@triton.jit
def _sum_chunk(
    dY, keys, order, bounds, pieces, chunk, group, groups, size, count, inner, outer, across,
    WIDE: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, LONG: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Of LONG positions, the pieces that belong to longer runs, for every `groups`-th block of columns."""
    first = chunk * LONG
    last = tl.minimum(first + LONG, count) - 1
    sums = pieces.dtype.element_ty
    # A run longer than a chunk holds its first or its last position, so there are two pieces at most.
    for side in tl.static_range(2):
        _, start, end = _run(keys, bounds, last if side else first, size, KIND)
        if (end - start > LONG) & ((side == 0) | (start > first)):
            stop = tl.minimum(end, last + 1)
            for block in range(group, across, groups):
                batch, place, exists = _columns(block, across, inner, outer, WIDE, COLUMNS)
                terms = dY + batch * count * inner + place
                total = tl.zeros((DEPTH, COLUMNS), sums)
                for position in range(tl.maximum(start, first), stop, DEPTH):
                    row = position + tl.arange(0, DEPTH)
                    source = tl.load(order + row, row < stop, other=0).to(KIND)
                    taken = (row < stop)[:, None] & exists[None, :]
                    total += tl.load(terms[None, :] + source[:, None] * inner, taken, other=0).to(sums)
                piece = pieces + (chunk * 2 + side) * outer * inner + batch * inner + place
                tl.store(piece, tl.sum(total, 0), exists)


@triton.jit
def _sum_short(
    terms, order, result, exists, row, start, end, short, inner, SUMS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Rows of dX with short runs, each written once: zeros where the run is empty."""
    most = tl.max(tl.where(short, end - start, 0), 0)
    total = tl.zeros((ROWS, COLUMNS), SUMS)
    for step in range(0, most, UNROLL):
        for ahead in tl.static_range(UNROLL):  # loads that do not wait for each other
            position = start + step + ahead
            taken = short & (position < end)
            source = tl.load(order + position, taken, other=0).to(KIND)
            taken = taken[:, None] & exists[None, :]
            total += tl.load(terms[None, :] + source[:, None] * inner, taken, other=0).to(SUMS)
    at = result[None, :] + row[:, None] * inner
    tl.store(at, to_type(total, result.dtype.element_ty), short[:, None] & exists[None, :])


@triton.jit
def _add_pieces(
    keys, bounds, dX, pieces,
    size, count, inner, outer, across, groups,
    WIDE: tl.constexpr, COLUMNS: tl.constexpr, COMBINED: tl.constexpr, WATCHED: tl.constexpr, LONG: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """The programs that watch the chunk where a long run begins add up all of its pieces."""
    program = tl.program_id(0).to(KIND)
    watched = program // groups * WATCHED + tl.arange(0, WATCHED)
    inside = watched * LONG < count
    for side in tl.static_range(2):
        # A look at all of them at once, since it takes as long as one.
        position = tl.where(side == 0, watched * LONG, tl.minimum(watched * LONG + LONG, count) - 1)
        key = tl.load(keys + position, inside, other=0).to(KIND) - keys_offset(keys)
        start = tl.load(bounds + key, inside, other=0).to(KIND)
        end = tl.load(bounds + size + 1 + key, inside, other=0).to(KIND)
        begins = inside & (end - start > LONG) & ((start == watched * LONG) if side == 0 else (start > watched * LONG))
        if tl.max(begins.to(tl.int32), 0) > 0:
            for k in range(WATCHED):
                chunk = program // groups * WATCHED + k
                if tl.max((begins & (watched == chunk)).to(tl.int32), 0) > 0:
                    _add_run(
                        keys, bounds, dX, pieces, chunk, side, program % groups, size, count, inner, outer, across,
                        groups, WIDE, COLUMNS, COMBINED, LONG, KIND,
                    )  # fmt: skip


@triton.jit
def _add_run(
    keys, bounds, dX, pieces, chunk, side: tl.constexpr, group, size, count, inner, outer, across, groups,
    WIDE: tl.constexpr, COLUMNS: tl.constexpr, COMBINED: tl.constexpr, LONG: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Adds up the pieces of the run that begins on one side of a chunk, for every `groups`-th block of columns."""
    stride = outer * inner
    position = tl.minimum(chunk * LONG + LONG, count) - 1 if side else chunk * LONG
    key, _, end = _run(keys, bounds, position, size, KIND)
    final = (end - 1) // LONG
    for block in range(group, across, groups):
        batch, place, exists = _columns(block, across, inner, outer, WIDE, COLUMNS)
        # The first piece lies in this chunk, on this side; every other one is the first of its chunk.
        at = pieces + batch * inner + place
        total = tl.load(at + (chunk * 2 + side) * stride, exists, other=0)
        many = tl.zeros((COMBINED, COLUMNS), pieces.dtype.element_ty)
        for other in range(chunk + 1, final + 1, COMBINED):
            piece = other + tl.arange(0, COMBINED)
            taken = (piece <= final)[:, None] & exists[None, :]
            many += tl.load(at[None, :] + piece[:, None] * 2 * stride, taken, other=0)
        total += tl.sum(many, 0)
        tl.store(dX + batch * size * inner + key * inner + place, to_type(total, dX.dtype.element_ty), exists)
