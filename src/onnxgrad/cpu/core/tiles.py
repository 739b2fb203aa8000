"""Products of float32 matrices on the tile units that some processors have for bfloat16 (Intel's AMX).

A float32 number is the exact sum of three bfloat16 numbers, so a product is one of nine products. The six larger ones
are computed, each added up in float32; the other three are below 2⁻²⁶ of the result, less than float32 rounds off. So
the results are as good as those of float32 arithmetic, at twice its speed: 340 against 165 GFLOP/s on a core of a Xeon
that has no other work. If the core's other thread is busy, tiles take more than twice as long, and vectors do not:
then both are as fast.

What is packed lies in blocks of STEP numbers along k. A block is one tile of each of the three parts for each 16 rows,
or columns, of a panel. The matrix on the left has k along a tile's rows, that on the right in pairs down its columns;
a pair is the k-th number of the first half of the block and the k-th of the second, which takes no shuffling.
"""

import contextlib
import ctypes
import functools
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils

from onnxgrad.cpu.core.jit import machine_code

STEP = 32  # numbers along k in a tile
SIDE = 16  # rows of a tile
PANEL = 2 * SIDE  # rows or columns that are multiplied at a time: 2 × 2 tiles hold sums
PARTS = 3
TILE_WORDS = SIDE * SIDE  # 32-bit words in a tile
BLOCK_WORDS = 2 * PARTS * TILE_WORDS  # in a block of a panel

INT8, INT32, INT64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
WORDS, FLOATS = ir.VectorType(INT32, SIDE), ir.VectorType(ir.FloatType(), SIDE)

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


@functools.cache
def have_tiles() -> bool:
    """Whether the processor has them, the system lets this process use them, and the user wants it."""
    if os.environ.get("ONNXGRAD_TILES") == "0":
        return False
    features = llvm.get_host_cpu_features()
    if sys.platform != "linux" or platform.machine() != "x86_64" or not features.get("avx512f"):
        return False
    if not (features.get("amx-tile") and features.get("amx-bf16")):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


class _Writer:
    """Writes vector instructions."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def intrinsic(self, result: Any, arguments: list[Any], name: str) -> Any:
        kind = ir.FunctionType(result, arguments)
        return cgutils.get_or_insert_function(self.builder.module, kind, name)

    def spread(self, word: int) -> Any:
        return ir.Constant(WORDS, [word] * SIDE)

    def everywhere(self, number: Any) -> Any:
        undefined = ir.Constant(FLOATS, ir.Undefined)
        first = self.builder.insert_element(undefined, number, INT32(0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(WORDS, [0] * SIDE))

    def at(self, kind: Any, address: Any) -> Any:
        return self.builder.inttoptr(address, kind.as_pointer())

    def load(self, kind: Any, base: Any, offset: Any) -> Any:
        place = self.builder.gep(base, [offset])
        return self.builder.load(self.builder.bitcast(place, kind.as_pointer()), align=4)

    def store(self, vector: Any, base: Any, offset: Any) -> None:
        place = self.builder.gep(base, [offset])
        self.builder.store(vector, self.builder.bitcast(place, vector.type.as_pointer()), align=4)

    def parts(self, number: Any) -> list[Any]:
        """Three vectors with bfloat16 numbers in the upper halves of their words, whose sum the float32 numbers are."""
        b = self.builder
        found = []
        for _ in range(PARTS - 1):
            bits = b.add(b.bitcast(number, WORDS), self.spread(0x8000))  # to the nearest
            found.append(b.and_(bits, self.spread(0xFFFF0000)))
            number = b.fsub(number, b.bitcast(found[-1], FLOATS))
        # Of what is left the lower halves are 0, unless it is below all normal numbers.
        return [*found, b.bitcast(number, WORDS)]

    def upper_halves(self, first: Any, second: Any) -> Any:
        """Words whose lower halves are the upper ones of the first vector, and whose upper halves of the second."""
        b = self.builder
        return b.or_(b.lshr(first, self.spread(16)), b.and_(second, self.spread(0xFFFF0000)))

    def turned(self, rows: list[Any]) -> list[Any]:
        """The columns of 16 vectors."""
        for distance in (8, 4, 2, 1):
            # Rows `distance` apart swap the halves of every 2 · distance columns that are on the wrong side.
            low = [i if i & distance == 0 else SIDE + i - distance for i in range(SIDE)]
            high = [i + distance if i & distance == 0 else SIDE + i for i in range(SIDE)]
            new = list(rows)
            for i in range(SIDE):
                if i & distance == 0:
                    both = rows[i], rows[i + distance]
                    new[i] = self.builder.shuffle_vector(*both, ir.Constant(WORDS, low))
                    new[i + distance] = self.builder.shuffle_vector(*both, ir.Constant(WORDS, high))
            rows = new
        return rows

    @contextlib.contextmanager
    def repeat(self, times: int) -> Iterator[Any]:
        with cgutils.for_range(self.builder, INT64(times), intp=INT64) as loop:
            yield loop.index

    def fetch_ahead(self, base: Any, offset: Any) -> None:
        """Has the processor bring in what will be read soon; any address will do."""
        place = self.builder.bitcast(self.builder.gep(base, [offset]), INT8.as_pointer())
        arguments = [place, INT32(0), INT32(2), INT32(1)]  # to read, into the second-level cache, data
        self.builder.call(self.intrinsic(ir.VoidType(), [a.type for a in arguments], "llvm.prefetch.p0"), arguments)


class _TilePacker:
    """Writes the packing of 16 rows (of the left matrix, else columns) of STEP numbers as a tile of each of three parts.

    Where they stand the other way round in memory, `turn` comes first, for either half of the numbers; then `row`, for
    each row of the tile.
    """

    def __init__(self, builder: ir.IRBuilder, is_left: bool, is_along: bool, apart: Any, factor: Any) -> None:
        self._builder, self._writer = builder, _Writer(builder)
        self._left, self._along, self._apart, self._factor = is_left, is_along, apart, factor
        self._half = INT64(SIDE) if is_along else builder.mul(apart, INT64(SIDE))  # from one half of STEP to the other
        self.turns = is_left != is_along

    def room(self) -> Any:
        """Room for what is turned."""
        with self._builder.goto_entry_block():
            room = self._builder.alloca(ir.ArrayType(ir.FloatType(), SIDE * STEP))
            room.align = 64
        return self._builder.bitcast(room, ir.FloatType().as_pointer())

    def turn(self, source: Any, half: Any, room: Any) -> None:
        b, w = self._builder, self._writer
        begin = b.mul(half, self._half)
        offsets = [b.add(begin, b.mul(self._apart, INT64(row))) for row in range(SIDE)]
        for row, column in enumerate(w.turned([w.load(FLOATS, source, offset) for offset in offsets])):
            w.store(column, room, b.add(b.shl(half, INT64(4)), INT64(row * STEP)))

    def row(self, source: Any, row: Any, room: Any, packed: Any) -> None:
        b, w = self._builder, self._writer
        if self.turns:
            here, half = b.mul(row, INT64(STEP)), INT64(SIDE)
        else:
            here, half = b.mul(row, self._apart), self._half
        pair = [w.load(FLOATS, room if self.turns else source, offset) for offset in (here, b.add(here, half))]
        if not self._along:
            # The next rows of the matrix but 32: they are far apart, so that memory does not see them coming.
            for more in range(2):
                w.fetch_ahead(source, b.mul(self._apart, b.add(row, INT64(2 * STEP + more * SIDE))))
        if self._left:
            pair = [b.fmul(number, self._factor) for number in pair]
        for part, both in enumerate(zip(*map(w.parts, pair), strict=True)):
            w.store(w.upper_halves(*both), packed, b.add(b.shl(row, INT64(4)), INT64(2 * part * TILE_WORDS)))


@machine_code
def pack_tile(
    typing_context: Any, is_left: Any, is_along: Any, source: Any, apart: Any, factor: Any, packed: Any
) -> Any:
    """Packs 16 rows (of the left matrix, else columns) of STEP numbers, from one address to another.

    `is_along`: the numbers of a row stand side by side and rows `apart`, else the other way round. The parts lie 2 tiles
    apart. Those of the left matrix are multiplied with the factor. What is infinite, no number, or too large for
    bfloat16 has a part that is no number or infinite, and another that is no number or infinite the other way: sums
    with it are no numbers.
    """
    left, along = bool(is_left.literal_value), bool(is_along.literal_value)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        _, _, from_, distance, scale, to = values
        w = _Writer(builder)
        packer = _TilePacker(builder, left, along, distance, w.everywhere(scale))
        numbers, words = w.at(ir.FloatType(), from_), w.at(INT32, to)
        room = packer.room() if packer.turns else None
        if packer.turns:
            with w.repeat(2) as half:
                packer.turn(numbers, half, room)
        with w.repeat(SIDE) as row:
            packer.row(numbers, row, room, words)
        return context.get_dummy_value()

    n = types.int64
    return types.void(is_left, is_along, n, n, types.float32, n), generate


class _Tiles:
    """Writes tile instructions: tiles 0 to 3 hold sums, 4 and 5 are of the left matrix, 6 and 7 of the right one."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self._builder, self._writer = builder, _Writer(builder)

    def call(self, name: str, tiles: list[int], *others: Any) -> None:
        arguments = [INT8(tile) for tile in tiles] + list(others)
        function = self._writer.intrinsic(ir.VoidType(), [a.type for a in arguments], f"llvm.x86.{name}")
        self._builder.call(function, arguments)

    def pair(self, first: int, base: Any, part: int) -> None:
        """Loads the two tiles of a part."""
        for half in range(2):
            place = self._builder.gep(base, [INT64((2 * part + half) * TILE_WORDS * 4)])
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
        b, w = self._builder, self._writer
        zeros = ir.Constant(FLOATS, [0.0] * SIDE)
        fma = w.intrinsic(FLOATS, [FLOATS] * 3, "llvm.fma.v16f32")
        with b.goto_entry_block():
            watched = [b.alloca(FLOATS) for _ in range(2)]
        for watch in watched:
            b.store(zeros, watch)
        with w.repeat(2 * SIDE) as row:
            for half, watch in enumerate(watched):
                number = w.load(FLOATS, base, b.add(b.mul(row, row_bytes), INT64(half * SIDE * 4)))
                b.store(b.call(fma, [number, zeros, b.load(watch)]), watch)  # no number, once one is not finite
        total = b.fadd(*(b.load(watch) for watch in watched))
        is_number = b.bitcast(b.fcmp_ordered("ord", total, total), ir.IntType(SIDE))
        return b.icmp_signed("==", is_number, ir.IntType(SIDE)(-1))


# Left and right part of each product, the small ones first; from one to the next only one side changes.
ORDER = ((0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0))
Piece = Callable[[], None]


class _PanelWriter:
    """Writes the product of two panels: c[i, j] = first[i, j] + Σ_k left[i, k] · right[k, j]."""

    def __init__(self, builder: ir.IRBuilder, left: Any, right: Any, c: Any, row: Any) -> None:
        self.builder, self.writer, self._tiles = builder, _Writer(builder), _Tiles(builder)
        self._left, self._right = self.writer.at(INT8, left), self.writer.at(INT8, right)
        self._c, self._row_bytes = self.writer.at(INT8, c), builder.mul(row, INT64(4))

    def begin(self, first: Any, first_row: Any, has_first: Any) -> None:
        with self.builder.if_else(has_first) as (onto, anew):
            with onto:
                row_bytes = self.builder.mul(first_row, INT64(4))
                self._tiles.sums("tileloadd64", self.writer.at(INT8, first), row_bytes)
            with anew:
                for total in range(4):
                    self._tiles.call("tilezero", [total])

    def block(self, number: Any, others: Sequence[Piece] = ()) -> None:
        """Adds the product of a block, and writes the other pieces of work in between, where they cost least."""
        offset = self.builder.mul(number, INT64(BLOCK_WORDS * 4))
        bases = self.builder.gep(self._left, [offset]), self.builder.gep(self._right, [offset])
        now: list[int | None] = [None, None]
        done = written = 0
        for parts in ORDER:
            for side, part in enumerate(parts):
                if now[side] != part:
                    self._tiles.pair(4 + 2 * side, bases[side], part)
                    now[side] = part
            for total in range(4):
                self._tiles.multiply(total)
                done += 1
                upto = len(others) * done // (4 * len(ORDER))
                for piece in others[written:upto]:
                    piece()
                written = upto

    def end(self, is_checked: Any) -> Any:
        """Writes c; whether all of it is finite, or not to be checked."""
        self._tiles.sums("tilestored64", self._c, self._row_bytes)
        found = cgutils.alloca_once_value(self.builder, cgutils.true_bit)
        with self.builder.if_then(is_checked):
            self.builder.store(self._tiles.is_finite(self._c, self._row_bytes), found)
        return self.builder.load(found)


@machine_code
def multiply_panels(
    typing_context: Any,
    left: Any,
    right: Any,
    blocks: Any,
    c: Any,
    row: Any,
    first: Any,
    first_row: Any,
    has_first: Any,
    is_checked: Any,
) -> Any:
    """c = first + left · right for panels at these addresses, c's rows `row` numbers apart.

    `first` may be c itself, or one row again and again if `first_row` is 0; without it sums begin with 0.
    If c `is_checked`, this gives whether all of it is finite, which takes as long as a block.
    Between `begin_tiles` and `end_tiles`. What is packed begins on a cache line: it takes four times as long if not.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        from_left, from_right, count, to, to_row, *begin, checks = values
        panels = _PanelWriter(builder, from_left, from_right, to, to_row)
        panels.begin(*begin)
        with cgutils.for_range(builder, count, intp=INT64) as loop:
            panels.block(loop.index)
        return panels.end(checks)

    n = types.int64
    return types.boolean(n, n, n, n, n, n, n, types.boolean, types.boolean), generate


@machine_code
def multiply_and_pack(
    typing_context: Any,
    is_left: Any,
    is_along: Any,
    left: Any,
    right: Any,
    blocks: Any,
    c: Any,
    row: Any,
    first: Any,
    first_row: Any,
    has_first: Any,
    is_checked: Any,
    source: Any,
    apart: Any,
    factor: Any,
    packed: Any,
    whole: Any,
) -> Any:
    """`multiply_panels`, and in the shade of it `pack_tile` for a panel that is needed later.

    The tile unit works on its own; meanwhile vectors pack so many `whole` blocks, no more than are multiplied.
    """
    is_of_left, along = bool(is_left.literal_value), bool(is_along.literal_value)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        _, _, from_left, from_right, count, to, to_row, *begin, checks, from_, distance, scale, to_packed, packs = (
            values
        )
        panels = _PanelWriter(builder, from_left, from_right, to, to_row)
        w = panels.writer
        packer = _TilePacker(builder, is_of_left, along, distance, w.everywhere(scale))
        rooms = [packer.room() if packer.turns else None for _ in range(2)]
        # From one half of the panel, and from one block, to the next.
        next_half = builder.mul(distance, INT64(SIDE)) if along else INT64(SIDE)
        next_block = INT64(STEP) if along else builder.mul(distance, INT64(STEP))
        panels.begin(*begin)
        with cgutils.for_range(builder, packs, intp=INT64) as loop:
            numbers = builder.gep(w.at(ir.FloatType(), from_), [builder.mul(loop.index, next_block)])
            words = builder.gep(w.at(INT32, to_packed), [builder.mul(loop.index, INT64(BLOCK_WORDS))])
            turns: list[Piece] = []
            rows: list[Piece] = []
            for half, room in enumerate(rooms):
                source_ = builder.gep(numbers, [next_half]) if half else numbers
                words_ = builder.gep(words, [INT64(half * TILE_WORDS)])
                if packer.turns:
                    turns += [functools.partial(packer.turn, source_, INT64(of_k), room) for of_k in range(2)]
                rows += [functools.partial(packer.row, source_, INT64(r), room, words_) for r in range(SIDE)]
            panels.block(loop.index, _spread(turns, 8) + rows)
        with cgutils.for_range_slice(builder, packs, count, INT64(1), intp=INT64) as (number, _):
            panels.block(number)
        return panels.end(checks)

    n = types.int64
    fixed = (n, n, n, n, n, n, n, types.boolean, types.boolean, n, n, types.float32, n, n)
    return types.boolean(is_left, is_along, *fixed), generate


def _spread(pieces: list[Piece], times: int) -> list[Piece]:
    """Each piece is worth so many others: with as much room after it."""
    return [p for piece in pieces for p in (piece, *[lambda: None] * (times - 1))]


@machine_code
def begin_tiles(typing_context: Any) -> Any:
    """Sets the tile unit of this thread up: eight tiles of 16 rows of 64 bytes."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        columns = b"".join(n.to_bytes(2, "little") for n in [64] * 8 + [0] * 8)
        layout = bytes([1, *[0] * 15]) + columns + bytes([SIDE] * 8 + [0] * 8)
        place = cgutils.alloca_once_value(builder, ir.Constant(ir.ArrayType(INT8, 64), bytearray(layout)))
        _Tiles(builder).call("ldtilecfg", [], builder.bitcast(place, INT8.as_pointer()))
        return context.get_dummy_value()

    return types.void(), generate


@machine_code
def end_tiles(typing_context: Any) -> Any:
    """Leaves the tile unit as it was: a system that switches threads need not save its kilobytes."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        _Tiles(builder).call("tilerelease", [])
        return context.get_dummy_value()

    return types.void(), generate
