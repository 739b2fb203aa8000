"""Products of float32 matrices on Intel's AMX, which multiplies tiles of bfloat16 numbers, by the scheme bf16x6.

A float32 number is the exact sum of three bfloat16 numbers, its bf16x3 split, so a product is the sum of nine products.
AMX computes the six larger ones, each added up in float32; the other three are below 2⁻²⁶ of the result, less than
float32 rounds off. So the results are as good as those of float32 arithmetic, at twice its speed: 340 against 165
GFLOP/s on a core of a Xeon that has no other work. If the core's other thread is busy, AMX takes more than twice as
long, and vector instructions do not: then both are as fast.
"""

import ctypes
import functools
import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from onnxgrad.cpu.core.jit import machine_code
from onnxgrad.cpu.core.levels import has_feature
from onnxgrad.cpu.core.matmul.amx_packing import (
    BLOCK_WORDS,
    SIDE,
    STEP,
    TILE_WORDS,
    TilePacker,
    pointer,
    rows_of_tiles,
)
from onnxgrad.cpu.core.vectors import INT8, INT32, INT64

SLOW = 4  # blocks that are multiplied while slow packing packs one
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


@functools.cache
def has_amx() -> bool:
    """Whether the processor has AMX, the system lets this process use it, and the user wants it."""
    if os.environ.get("ONNXGRAD_AMX") == "0":
        return False
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    if not all(map(has_feature, ("avx512f", "amx-tile", "amx-bf16"))):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


class _Tiles:
    """Writes tile instructions: tiles 0 to 3 hold sums, 4 and 5 are of the left matrix, 6 and 7 of the right one."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self._builder, self._vectors = builder, rows_of_tiles(builder)

    def call(self, name: str, tiles: list[int], *others: Any) -> None:
        self._vectors.intrinsic(ir.VoidType(), f"llvm.x86.{name}", *map(INT8, tiles), *others)

    def pair(self, first: int, base: Any, term: int) -> None:
        """Loads the two tiles of a term."""
        for half in range(2):
            place = self._builder.gep(base, [INT64((2 * term + half) * TILE_WORDS * 4)])
            self.call("tileloadd64", [first + half], place, INT64(SIDE * 4))

    def multiply(self, total: int) -> None:
        self.call("tdpbf16ps", [total, 4 + total // 2, 6 + total % 2])

    def sums(self, name: str, base: Any, row_bytes: Any) -> None:
        """Loads or stores the sums, from or to 32 × 32 numbers."""
        for total in range(4):
            down = self._builder.mul(row_bytes, INT64(total // 2 * SIDE))
            offset = self._builder.add(down, INT64(total % 2 * SIDE * 4))
            self.call(name, [total], self._builder.gep(base, [offset]), row_bytes)

    def is_finite(self, base: Any, row_bytes: Any) -> Any:
        """Whether all of 32 × 32 numbers are."""
        b, v = self._builder, self._vectors
        with b.goto_entry_block():
            watched = [b.alloca(v.type) for _ in range(2)]
        for watch in watched:
            b.store(v.zeros, watch)
        with cgutils.for_range(b, INT64(2 * SIDE), intp=INT64) as loop:
            for half, watch in enumerate(watched):
                number = v.load(v.at(base, b.add(b.mul(loop.index, row_bytes), INT64(half * SIDE * 4))))
                b.store(v.fma(number, v.zeros, b.load(watch)), watch)  # NaN, once one is not finite
        total = b.fadd(*(b.load(watch) for watch in watched))
        is_number = b.bitcast(b.fcmp_ordered("ord", total, total), ir.IntType(SIDE))
        return b.icmp_signed("==", is_number, ir.IntType(SIDE)(-1))


# Terms of left and right in each of the six products, the small ones first; from one to the next only one side changes.
ORDER = ((0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0))
Work = Callable[[], None]


class _PanelWriter:
    """Writes the product of two panels: c[i, j] = first[i, j] + Σ_k left[i, k] · right[k, j]."""

    def __init__(self, builder: ir.IRBuilder, left: Any, right: Any, c: Any, row: Any) -> None:
        self.builder, self._tiles = builder, _Tiles(builder)
        self._left, self._right, self._c = (pointer(builder, INT8, address) for address in (left, right, c))
        self._row_bytes = builder.mul(row, INT64(4))

    def begin(self, first: Any, first_row: Any, has_first: Any) -> None:
        with self.builder.if_else(has_first) as (onto, anew):
            with onto:
                row_bytes = self.builder.mul(first_row, INT64(4))
                self._tiles.sums("tileloadd64", pointer(self.builder, INT8, first), row_bytes)
            with anew:
                for total in range(4):
                    self._tiles.call("tilezero", [total])

    def block(self, number: Any, others: Sequence[Work] = ()) -> None:
        """Adds the product of a block, and writes other work in between, where it costs least."""
        offset = self.builder.mul(number, INT64(BLOCK_WORDS * 4))
        bases = self.builder.gep(self._left, [offset]), self.builder.gep(self._right, [offset])
        now: list[int | None] = [None, None]
        done = written = 0
        for terms in ORDER:
            for side, term in enumerate(terms):
                if now[side] != term:
                    self._tiles.pair(4 + 2 * side, bases[side], term)
                    now[side] = term
            for total in range(4):
                self._tiles.multiply(total)
                done += 1
                upto = len(others) * done // (4 * len(ORDER))
                for write in others[written:upto]:
                    write()
                written = upto

    def end(self, is_checked: Any) -> Any:
        """Writes c; whether all of it is finite, or not to be checked."""
        self._tiles.sums("tilestored64", self._c, self._row_bytes)
        found = cgutils.alloca_once_value(self.builder, cgutils.true_bit)
        with self.builder.if_then(is_checked):
            self.builder.store(self._tiles.is_finite(self._c, self._row_bytes), found)
        return self.builder.load(found)


@machine_code
def multiply_panels(typing_context: Any, product: Any) -> Any:
    """c = first + left · right for panels, given by addresses.

    `product` is left, right, the number of blocks, c, how many numbers its rows are apart, first, how many its rows are
    apart, whether there is a first, and whether to check c. `first` may be c itself, or one row again and again if its
    rows are 0 apart; without it sums begin with 0. If c is checked, this gives whether all of it is finite, which takes
    as long as a block. Call it between `amx_begin` and `amx_end`. Packed panels begin on a cache line: it takes four
    times as long if not.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        from_left, from_right, count, to, to_row, *begin, checks = cgutils.unpack_tuple(builder, values[0])
        panels = _PanelWriter(builder, from_left, from_right, to, to_row)
        panels.begin(*begin)
        with cgutils.for_range(builder, count, intp=INT64) as loop:
            panels.block(loop.index)
        return panels.end(checks)

    return types.boolean(product), generate


@machine_code
def multiply_and_pack(
    typing_context: Any, is_left: Any, is_along: Any, is_slow: Any, product: Any, packing: Any
) -> Any:
    """`multiply_panels`, overlapped with `pack_tile` for a panel that is needed later.

    AMX works on its own; meanwhile vector instructions pack. `packing` is source, how far apart, factor, where to, as
    `pack_tile` has them, and how many whole blocks to pack: with `is_slow` one for every SLOW blocks that are
    multiplied, which takes less of their time, else one for each.
    """
    is_of_left, along, slow = (bool(choice.literal_value) for choice in (is_left, is_along, is_slow))

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        from_left, from_right, count, to, to_row, *begin, checks = cgutils.unpack_tuple(builder, values[3])
        from_, distance, scale, to_packed, packs = cgutils.unpack_tuple(builder, values[4])
        panels = _PanelWriter(builder, from_left, from_right, to, to_row)
        packer = TilePacker(builder, is_of_left, along, distance, scale, slow)
        buffers = [packer.buffer() if packer.transposes else None for _ in range(2)]
        # From one half of the panel, and from one block, to the next.
        next_half = builder.mul(distance, INT64(SIDE)) if along else INT64(SIDE)
        next_block = INT64(STEP) if along else builder.mul(distance, INT64(STEP))

        def places(block: Any, half: Any) -> tuple[Any, Any]:
            """Where half a block comes from, and where it goes."""
            numbers = builder.add(builder.mul(block, next_block), builder.mul(half, next_half))
            words = builder.add(builder.mul(block, INT64(BLOCK_WORDS)), builder.mul(half, INT64(TILE_WORDS)))
            source, target = pointer(builder, ir.FloatType(), from_), pointer(builder, INT32, to_packed)
            return builder.gep(source, [numbers]), builder.gep(target, [words])

        def all_of(block: Any) -> list[Work]:
            transposes: list[Work] = []
            rows: list[Work] = []
            for half, buffer in enumerate(buffers):
                source, target = places(block, INT64(half))
                if packer.transposes:
                    of_halves = [functools.partial(packer.transpose, source, INT64(of_k), buffer) for of_k in range(2)]
                    transposes += of_halves
                rows += [functools.partial(packer.row, source, INT64(r), buffer, target) for r in range(SIDE)]
            return _spread(transposes, 8) + rows

        def quarter_of(number: Any) -> list[Work]:
            half, odd = builder.and_(builder.lshr(number, INT64(1)), INT64(1)), builder.and_(number, INT64(1))
            source, target = places(builder.lshr(number, INT64(2)), half)

            def transpose() -> None:
                with builder.if_then(builder.icmp_signed("==", odd, INT64(0))):
                    for of_k in range(2):
                        packer.transpose(source, INT64(of_k), buffers[0])

            first = builder.mul(odd, INT64(SIDE // 2))
            rows: list[Work] = [
                functools.partial(packer.row, source, builder.add(first, INT64(r)), buffers[0], target)
                for r in range(SIDE // 2)
            ]
            return _spread([transpose] if packer.transposes else [], 8) + rows

        panels.begin(*begin)
        together = builder.mul(packs, INT64(SLOW if slow else 1))
        with cgutils.for_range(builder, together, intp=INT64) as loop:
            panels.block(loop.index, quarter_of(loop.index) if slow else all_of(loop.index))
        with cgutils.for_range_slice(builder, together, count, INT64(1), intp=INT64) as (number, _):
            panels.block(number)
        return panels.end(checks)

    return types.boolean(is_left, is_along, is_slow, product, packing), generate


def _spread(works: list[Work], times: int) -> list[Work]:
    """Each of them takes as long as so many others: with nothing to do in place of these."""
    return [step for work in works for step in (work, *[lambda: None] * (times - 1))]


@machine_code
def amx_begin(typing_context: Any) -> Any:
    """Configures AMX for this thread: eight tiles of 16 rows of 64 bytes."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        columns = b"".join(n.to_bytes(2, "little") for n in [64] * 8 + [0] * 8)
        layout = bytes([1, *[0] * 15]) + columns + bytes([SIDE] * 8 + [0] * 8)
        place = cgutils.alloca_once_value(builder, ir.Constant(ir.ArrayType(INT8, 64), bytearray(layout)))
        _Tiles(builder).call("ldtilecfg", [], builder.bitcast(place, INT8.as_pointer()))
        return context.get_dummy_value()

    return types.void(), generate


@machine_code
def amx_end(typing_context: Any) -> Any:
    """Releases the tiles: a system that switches threads need not save their kilobytes."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        _Tiles(builder).call("tilerelease", [])
        return context.get_dummy_value()

    return types.void(), generate
