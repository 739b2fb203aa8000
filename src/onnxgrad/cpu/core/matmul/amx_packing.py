"""How matrices are laid out for tile units: three bfloat16 parts of each number, in tiles.

What is packed lies in blocks of STEP numbers along k. A block is one tile of each of the three parts for each 16 rows,
or columns, of a panel. The matrix on the left has k along a tile's rows, that on the right in pairs down its columns;
a pair is the k-th number of the first half of the block and the k-th of the second, which takes no shuffling.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

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


class VectorWriter:
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


class TilePacker:
    """Writes the packing of 16 rows (of the left matrix, else columns) of STEP numbers, a tile for each of three parts.

    Where they stand the other way round in memory, `turn` comes first, for either half of the numbers; then `row`, for
    each row of the tile.
    """

    def __init__(
        self, builder: ir.IRBuilder, is_left: bool, is_along: bool, apart: Any, factor: Any, is_slow: bool = False
    ) -> None:
        self._builder, self._writer = builder, VectorWriter(builder)
        self._left, self._apart, self._factor = is_left, apart, factor
        self._half = INT64(SIDE) if is_along else builder.mul(apart, INT64(SIDE))  # from one half of STEP to the other
        # Rows of the matrix are far apart, so that memory does not see them coming; who is slow can wait for them, and
        # leaves the few places for lines on their way to the tiles.
        self._fetches = not is_along and not is_slow
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
        if self._fetches:  # the next rows but 32
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

    `is_along`: the numbers of a row stand side by side and rows `apart`, else the other way round. The parts lie two
    tiles apart. Those of the left matrix are multiplied with the factor. Of what is infinite, no number, or too large
    for bfloat16, one part is no number, or two are infinite with different signs: sums with it are no numbers.
    """
    left, along = bool(is_left.literal_value), bool(is_along.literal_value)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        _, _, from_, distance, scale, to = values
        w = VectorWriter(builder)
        packer = TilePacker(builder, left, along, distance, w.everywhere(scale))
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
