"""Indices on the GPU: negative ones counted from the end, bad ones found and kept out, all of them sorted."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from onnxgrad.arguments import index_error, label_error, length_error
from onnxgrad.cuda.core.launch import ceil_div, launch

NONE_BAD = 2**63 - 1
BLOCK = 1024


class BadIndex:
    """Where the first bad index is, as kernels see it, and what a caller is told of it."""

    def __init__(self, device: torch.device, wanted: bool) -> None:
        """`wanted`: whether anybody is going to ask; if not, nothing is recorded and nothing read back."""
        self._device, self._wanted = device, wanted
        self._position: torch.Tensor | None = None
        self._describe: Callable[[int], Exception] | None = None

    @property
    def position(self) -> torch.Tensor | None:
        """What kernels lower to the first bad position; made when first asked for, since most kernels never do."""
        if self._wanted and self._position is None:
            if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return None
            self._position = torch.full((1,), NONE_BAD, dtype=torch.int64, device=self._device)
        return self._position

    def about(self, indices: torch.Tensor, size: int) -> None:
        """Says what the kernels look at: indices along an axis of `size` elements."""

        def describe(position: int) -> Exception:
            return index_error(indices.shape, position, int(indices.view(-1)[position].item()), size)

        self._describe = describe

    def about_lengths(self, SL: torch.Tensor, steps: int) -> None:
        """The same for the lengths of sequences, which are checked at once."""

        def describe(position: int) -> Exception:
            return length_error(position, int(SL[position].item()), steps)

        self._describe = describe
        self.check(SL, 0, steps + 1)

    def about_labels(self, label: torch.Tensor, classes: int, ignore_index: int) -> None:
        """The same for labels of classes."""

        def describe(position: int) -> Exception:
            value = int(label.view(-1)[position].item())
            return label_error(label.shape, position, value, classes, ignore_index)

        self._describe = describe

    def check(self, values: torch.Tensor, lowest: int, end: int) -> None:
        """Records the first value outside [lowest, end-1], where no kernel looks at them anyway."""
        if self.position is not None and values.numel():
            programs = ceil_div(values.numel(), BLOCK)
            launch(_check, programs, values, self.position, values.numel(), lowest, end, BLOCK)

    def error(self) -> Exception | None:
        """What to raise, if anything; waits for the GPU."""
        if self._position is None or self._describe is None:
            return None
        position = int(self._position.item())
        return None if position == NONE_BAD else self._describe(position)


def sorted_runs(indices: torch.Tensor, size: int, bad: BadIndex) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(keys, order, bounds): the indices in ascending order, where each one stood, and each row's run among them.

    Equal indices keep their order. bounds[0, i] … bounds[1, i] - 1 is the run of row i; bad indices come last, as row
    `size`, whose run is left empty. Keys have the fewest bits that will do, since sorting takes time for each; those
    of 16 bits are moved down by 2¹⁵, to fit a signed type.
    """
    count = indices.numel()
    dtype = torch.int16 if size < 2**16 else torch.int32 if size < 2**31 else torch.int64
    keys = torch.empty(count, dtype=dtype, device=indices.device)
    positions = torch.int32 if count < 2**31 else torch.int64
    bounds = torch.empty((2, size + 1), dtype=positions, device=indices.device)
    programs = ceil_div(max(count, 2 * (size + 1)), BLOCK)
    launch(_make_keys, programs, indices, keys, bounds, bad.position, count, size, BLOCK, bad.position is not None)
    keys, order = torch.sort(keys, stable=True)
    launch(_find_runs, ceil_div(count, BLOCK), keys, bounds, count, size, BLOCK)
    return keys, order, bounds


@triton.jit
def keys_offset(keys):
    """What was added to each key."""
    return -32768 if keys.dtype.element_ty == tl.int16 else 0


@triton.jit
def _make_keys(indices, keys, bounds, bad, count, size, BLOCK: tl.constexpr, CHECK: tl.constexpr):
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    given = tl.load(indices + position, position < count, other=0).to(tl.int64)
    row = tl.where(given < 0, given + size, given)
    good = (row >= 0) & (row < size)
    if CHECK:
        worst = tl.min(tl.where((position < count) & ~good, position, 9223372036854775807), 0)
        if worst < 9223372036854775807:
            tl.atomic_min(bad, worst)
    row = tl.where(good, row, size) + keys_offset(keys)
    tl.store(keys + position, row.to(keys.dtype.element_ty), position < count)
    tl.store(bounds + position, position.to(bounds.dtype.element_ty) * 0, position < 2 * (size + 1))


@triton.jit
def _find_runs(keys, bounds, count, size, BLOCK: tl.constexpr):
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < count
    key = tl.load(keys + position, inside, other=0).to(tl.int64) - keys_offset(keys)
    before = tl.load(keys + position - 1, inside & (position > 0), other=0).to(tl.int64) - keys_offset(keys)
    after = tl.load(keys + position + 1, position + 1 < count, other=0).to(tl.int64) - keys_offset(keys)
    starts = inside & (key < size) & ((position == 0) | (before != key))
    ends = inside & (key < size) & ((position + 1 == count) | (after != key))
    tl.store(bounds + key, position.to(bounds.dtype.element_ty), starts)
    tl.store(bounds + size + 1 + key, (position + 1).to(bounds.dtype.element_ty), ends)


@triton.jit
def _check(values, bad, count, lowest, end, BLOCK: tl.constexpr):
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    given = tl.load(values + position, position < count, other=0).to(tl.int64)
    outside = (position < count) & ((given < lowest) | (given >= end))
    worst = tl.min(tl.where(outside, position, 9223372036854775807), 0)
    if worst < 9223372036854775807:
        tl.atomic_min(bad, worst)
