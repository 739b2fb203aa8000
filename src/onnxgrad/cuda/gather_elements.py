"""GatherElementsGrad on CUDA, in two ways: a deterministic one, and a faster one whose sums depend on chance.

Additions of floating-point numbers give different bits in different orders, and atomic ones come in any order. So the
deterministic kernel adds integers: a program takes some lines of dX, scales their terms by one power of two, such that
all of them are whole numbers, adds those atomically, and scales the sums back. Terms too far apart in size for 64 bits
are added in several such windows, from the large to the small. Besides being the same every time, the sums are exact
before they are rounded to the result's type. float64 has too many bits for this, and is sorted as in GatherGrad.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.cuda.core.launch import INTERPRETED, ceil_div, counting_type, launch, power_of_two, to_type
from onnxgrad.cuda.gather import sum_by_index

TILE = 1024  # elements of dY under one program that adds atomically
SLAB_BYTES = 1 << 22  # of dX under the additions of one time, so that they happen in the second-level cache
SIDE_BY_SIDE = 4  # lines that lie side by side in memory, summed by one program
EXACT_TILE = {1: (4096, 16), SIDE_BY_SIDE: (8192, 8)}  # elements of dY at a time, and warps, by lines side by side
WORKSPACE_BYTES = 1 << 28
PROGRAMS_PER_PROCESSOR = 4


class Lines(NamedTuple):
    """The indices as rows of columns, and where in dX each row begins."""

    lengths: tuple[int, ...]  # of the dimensions that rows are counted over
    steps: tuple[int, ...]  # in dX, for each of them; 0 for the axis itself, whose place the index takes
    rows: int
    columns: int
    axis_step: int
    axis_is_last: bool


def gather_elements_grad(
    dY: torch.Tensor,
    shape: Any,
    indices: torch.Tensor,
    dX: torch.Tensor,
    axis: int,
    bad: BadIndex,
    deterministic: bool = True,
) -> None:
    axis %= dX.ndim
    size = dX.shape[axis]
    bad.about(indices, size)
    if dX.numel() == 0 or indices.numel() == 0:
        bad.check(indices, -size, size)
        dX.zero_()
        return
    lines = _lines(indices.shape, dX.shape, axis)
    if not deterministic:
        sums = dX if dX.element_size() > 2 else torch.empty(dX.shape, dtype=torch.float32, device=dX.device)
        sums.zero_()
        _launch_over(lines, size, dY, indices, sums, bad, add=True)
        if sums is not dX:
            dX.copy_(sums)
    elif dX.dtype == torch.float64:
        targets = torch.empty(indices.numel(), dtype=torch.int64, device=dX.device)
        _launch_over(lines, size, targets, indices, dX, bad, add=False)
        sum_by_index(targets, dY, dX, 1, dX.numel(), 1, BadIndex(dX.device, wanted=False))
    else:
        _add_exactly(dY, indices, dX, axis, bad)


def _lines(taken: Sequence[int], whole: Sequence[int], axis: int) -> Lines:
    """Neighbouring dimensions are joined where indices cover that of dX."""
    steps = [math.prod(whole[k + 1 :]) for k in range(len(whole))]
    joined: list[tuple[int, int, int, bool]] = []  # length in indices, length in dX, step in dX, is the axis
    for k, (q, s) in enumerate(zip(taken, whole, strict=True)):
        if joined and k not in (axis, axis + 1) and q == s:
            before = joined[-1]
            joined[-1] = (before[0] * q, before[1] * s, steps[k], False)
        else:
            joined.append((q, s, steps[k], k == axis))
    *outer, last = joined
    lengths = tuple(q for q, _, _, _ in outer)
    return Lines(
        lengths,
        tuple(0 if is_axis else step for _, _, step, is_axis in outer),
        math.prod(lengths),
        last[0],
        steps[axis],
        last[3],
    )


def _launch_over(
    lines: Lines, size: int, y: torch.Tensor, indices: torch.Tensor, x: torch.Tensor, bad: BadIndex, add: bool
) -> None:
    """Adds the terms y to x, or finds their places there, over tiles of the indices."""
    columns = min(power_of_two(lines.columns), 1024)
    if not lines.axis_is_last:
        columns = min(columns, max(32, power_of_two(SLAB_BYTES // (4 * size) + 1) // 2))
    height = max(1, min(power_of_two(lines.rows), TILE // columns))
    down, across = ceil_div(lines.rows, height), ceil_div(lines.columns, columns)
    launch(
        _spread,
        down * across,
        *(y, indices, x, bad.position, lines.lengths, lines.steps),
        *(lines.rows, lines.columns, down, size, lines.axis_step, x.numel()),
        len(lines.lengths), lines.axis_is_last, height, columns, bad.position is not None,
        counting_type(indices.numel(), x.numel()), add,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _record(bad, outside, position):
    worst = tl.min(tl.min(tl.where(outside, position.to(tl.int64), 9223372036854775807), 1), 0)
    if worst < 9223372036854775807:
        tl.atomic_min(bad, worst)


@triton.jit
def _spread(
    y, indices, x, bad, lengths, steps, rows, columns, down, size, axis_step, total,
    OUTER: tl.constexpr, AXIS_IS_LAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHECK: tl.constexpr,
    KIND: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Adds each element of y to x atomically, or writes into y where in x it belongs, `total` for a bad index.

    Programs go along the axis first, so that the additions of one time fall into few lines of dX, and the cache.
    """
    program = tl.program_id(0).to(KIND)
    if AXIS_IS_LAST:
        across = tl.cdiv(columns, COLUMNS)
        row = (program // across) * ROWS + tl.arange(0, ROWS)
        column = (program % across) * COLUMNS + tl.arange(0, COLUMNS)
    else:
        row = (program % down) * ROWS + tl.arange(0, ROWS)
        column = (program // down) * COLUMNS + tl.arange(0, COLUMNS)
    rest, origin = row, row * 0
    for k in tl.static_range(OUTER):
        origin += rest % lengths[OUTER - 1 - k] * steps[OUTER - 1 - k]
        rest = rest // lengths[OUTER - 1 - k]
    exists = (row < rows)[:, None] & (column < columns)[None, :]
    position = (row * columns)[:, None] + column[None, :]
    index = tl.load(indices + position, exists, other=0).to(tl.int64)
    index = tl.where(index < 0, index + size, index)
    good = exists & (index >= 0) & (index < size)
    if CHECK:
        _record(bad, exists & ~good, position)
    target = origin[:, None] + index.to(KIND) * axis_step
    if not AXIS_IS_LAST:
        target += column[None, :]
    if ADD:
        term = tl.load(y + position, exists, other=0).to(x.dtype.element_ty)
        tl.atomic_add(x + target, term, good, sem="relaxed")
    else:
        tl.store(y + position, tl.where(good, target, total), exists)


def _add_exactly(dY: torch.Tensor, indices: torch.Tensor, dX: torch.Tensor, axis: int, bad: BadIndex) -> None:
    size, count = dX.shape[axis], indices.shape[axis]
    columns = indices.shape[-1] if axis < dX.ndim - 1 else 1
    side_by_side = min(SIDE_BY_SIDE, power_of_two(columns))
    across = ceil_div(columns, side_by_side)
    # Lines are counted over all dimensions but the axis; the last one in groups that lie side by side.
    others = [k for k in range(dX.ndim) if k != axis and k != dX.ndim - 1] if axis < dX.ndim - 1 else range(axis)
    lengths = tuple(indices.shape[k] for k in others)
    y_steps = tuple(math.prod(indices.shape[k + 1 :]) for k in others)
    x_steps = tuple(math.prod(dX.shape[k + 1 :]) for k in others)
    groups = math.prod(lengths) * across
    if any(q != s for k, (q, s) in enumerate(zip(indices.shape, dX.shape, strict=True)) if k != axis):
        dX.zero_()  # some of its lines are named by nobody
    processors = 1 if INTERPRETED else torch.cuda.get_device_properties(dX.device).multi_processor_count
    room = size * side_by_side
    programs = max(
        1,
        min(
            groups,
            PROGRAMS_PER_PROCESSOR * processors,
            WORKSPACE_BYTES // (8 * room) if groups > processors else groups,
        ),
    )
    sums = torch.zeros((programs, room), dtype=torch.int64, device=dX.device)
    parts = torch.empty((programs, room), dtype=torch.float64, device=dX.device)
    tile, warps = EXACT_TILE.get(side_by_side, EXACT_TILE[SIDE_BY_SIDE])
    height = tile // side_by_side
    window = 62 - count.bit_length()
    launch(
        _sum_groups,
        programs,
        *(dY, indices, dX, bad.position, sums, parts, lengths, y_steps, x_steps),
        *(groups, across, columns, count, size, math.prod(indices.shape[axis + 1 :]), math.prod(dX.shape[axis + 1 :])),
        window, programs, len(lengths), height, side_by_side, bad.position is not None,
        counting_type(indices.numel(), dX.numel(), sums.numel()),
        num_warps=warps,
    )  # fmt: skip


@triton.jit
def _power(exponent):
    """2 to the power of an exponent between -1022 and 1023, as float64."""
    return ((exponent + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _sum_groups(
    dY, indices, dX, bad, sums, parts, lengths, y_steps, x_steps,
    groups, across, columns, count, size, y_step, x_step, window, programs,
    OUTER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHECK: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Each program takes every `programs`-th group of lines; its part of `sums` is all zeros between them."""
    first = tl.program_id(0).to(KIND)
    sums += first * size * COLUMNS
    parts += first * size * COLUMNS
    step = tl.arange(0, ROWS).to(KIND)
    lane = tl.arange(0, COLUMNS)
    for group in range(first, groups, programs):
        column = group % across * COLUMNS + lane
        rest, y, x = group // across, group * 0, group * 0
        for k in tl.static_range(OUTER):
            y += rest % lengths[OUTER - 1 - k] * y_steps[OUTER - 1 - k]
            x += rest % lengths[OUTER - 1 - k] * x_steps[OUTER - 1 - k]
            rest = rest // lengths[OUTER - 1 - k]
        inside = (column < columns)[None, :]
        # The largest and the smallest exponent, as float32 has them; 255 is that of infinities and NaN.
        largest, smallest, special = 0, 255, 0
        for i in range(0, count, ROWS):
            place = y + (i + step)[:, None] * y_step + column[None, :]
            term = tl.load(dY + place, (i + step < count)[:, None] & inside, other=0).to(tl.float32)
            exponent = (term.to(tl.int32, bitcast=True) >> 23) & 255
            finite = exponent < 255
            exponent = tl.maximum(exponent, 1)
            largest = tl.maximum(largest, tl.max(tl.max(tl.where(finite & (term != 0), exponent, 0), 1), 0))
            smallest = tl.minimum(smallest, tl.min(tl.min(tl.where(finite & (term != 0), exponent, 255), 1), 0))
            special = tl.maximum(special, tl.max(tl.max(tl.where(finite, 0, 1), 1), 0))
        # A finite term is a multiple of 2^(smallest - 150) and less than 2^(largest - 126).
        windows = tl.maximum(1, tl.cdiv(largest - smallest + 24, window))
        for w in range(windows + special):
            scale = tl.minimum(126 - largest + window * (w + 1), 1000)
            above = _power(scale - window)
            for i in range(0, count, ROWS):
                exists = (i + step < count)[:, None] & inside
                place = y + (i + step)[:, None] * y_step + column[None, :]
                index = tl.load(indices + place, exists, other=0).to(tl.int64)
                index = tl.where(index < 0, index + size, index)
                good = exists & (index >= 0) & (index < size)
                index = index.to(KIND)
                if CHECK:
                    _record(bad, exists & ~good & (w == 0), place)
                term = tl.load(dY + place, exists, other=0).to(tl.float32)
                finite = ((term.to(tl.int32, bitcast=True) >> 23) & 255) < 255
                if w < windows:
                    wide = tl.where(finite, term, 0).to(tl.float64)
                    if w > 0:  # what the windows above have not taken
                        wide -= (wide * above).to(tl.int64).to(tl.float64) / above
                    whole = (wide * _power(scale)).to(tl.int64)
                    tl.atomic_add(sums + index * COLUMNS + lane[None, :], whole, good & (whole != 0), sem="relaxed")
                else:  # 1: an infinity, 2: a negative one, 4: NaN
                    kind = tl.where(term != term, 4, tl.where(term > 0, 1, 2)).to(tl.int64)
                    tl.atomic_or(sums + index * COLUMNS + lane[None, :], kind, good & ~finite, sem="relaxed")
            tl.debug_barrier()
            for i in range(0, size, ROWS):
                exists = (i + step < size)[:, None] & inside
                at = (i + step)[:, None] * COLUMNS + lane[None, :]
                # Atomic additions happen in the second-level cache: the first one may hold older numbers.
                whole = tl.load(sums + at, exists, other=0, cache_modifier=".cg")
                tl.debug_barrier()  # another thread may write the zero than read the number
                tl.store(sums + at, whole * 0, exists)
                total = whole.to(tl.float64) / _power(scale)
                if w > 0:
                    total = tl.load(parts + at, exists, other=0) + tl.where(w < windows, total, 0)
                if w == windows:
                    total = tl.where(whole == 1, float("inf"), tl.where(whole == 2, float("-inf"), total))
                    total = tl.where(whole > 2, float("nan"), total)
                if w < windows + special - 1:
                    tl.store(parts + at, total, exists)
                else:
                    out = dX + x + (i + step)[:, None] * x_step + column[None, :]
                    tl.store(out, to_type(total.to(tl.float32), dX.dtype.element_ty), exists)
            tl.debug_barrier()
