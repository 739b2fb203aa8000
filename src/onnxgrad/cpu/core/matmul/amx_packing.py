"""How matrices are packed for AMX: the bf16x3 split of each number, in tiles.

A packed panel is a sequence of blocks of STEP numbers along k. A block has, for each 16 rows or columns of the panel,
one tile of each of the split's three terms. The matrix on the left has k along a tile's rows, that on the right in
pairs down its columns; a pair is the k-th number of the first half of the block and the k-th of the second, which takes
no shuffling.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from onnxgrad.cpu.core.jit import machine_code
from onnxgrad.cpu.core.vectors import INT32, INT64, SECOND_LEVEL, Vectors

STEP = 32  # numbers along k in a tile
SIDE = 16  # rows of a tile
PANEL = 2 * SIDE  # rows or columns that are multiplied at a time: 2 × 2 tiles hold sums
TERMS = 3  # of the split: bfloat16 numbers whose sum a float32 number is
TILE_WORDS = SIDE * SIDE  # 32-bit words in a tile
BLOCK_WORDS = 2 * TERMS * TILE_WORDS  # in a block of a panel

WORDS = ir.VectorType(INT32, SIDE)


def rows_of_tiles(builder: ir.IRBuilder) -> Vectors:
    """Vectors of float32 numbers as long as a tile's row."""
    return Vectors(builder, 4, SIDE)


def _words(word: int) -> Any:
    return ir.Constant(WORDS, [word] * SIDE)


def pointer(builder: ir.IRBuilder, kind: Any, address: Any) -> Any:
    """To what is at an address."""
    return builder.inttoptr(address, kind.as_pointer())


class TilePacker:
    """Writes the packing of 16 rows (of the left matrix, else columns) of STEP numbers, a tile for each of three terms.

    Where they stand the other way round in memory, `transpose` comes first, for either half of the numbers; then `row`,
    for each row of the tile.
    """

    def __init__(
        self, builder: ir.IRBuilder, is_left: bool, is_along: bool, apart: Any, factor: Any, is_slow: bool = False
    ) -> None:
        self._builder, self._vectors = builder, rows_of_tiles(builder)
        self._left, self._apart, self._factor = is_left, apart, self._vectors.splat(factor)
        self._half = INT64(SIDE) if is_along else builder.mul(apart, INT64(SIDE))  # from one half of STEP to the other
        # Rows of the matrix are far apart, so the processor does not prefetch them itself. Slow packing can wait for
        # them, and leaves the few line fill buffers to the loads of tiles.
        self._prefetches = not is_along and not is_slow
        self.transposes = is_left != is_along

    def buffer(self) -> Any:
        """Memory for the transposed numbers of a tile."""
        with self._builder.goto_entry_block():
            buffer = self._builder.alloca(ir.ArrayType(ir.FloatType(), SIDE * STEP))
            buffer.align = 64
        return self._builder.bitcast(buffer, ir.FloatType().as_pointer())

    def transpose(self, source: Any, half: Any, buffer: Any) -> None:
        b, v = self._builder, self._vectors
        begin = b.mul(half, self._half)
        offsets = [b.add(begin, b.mul(self._apart, INT64(row))) for row in range(SIDE)]
        for row, column in enumerate(v.transpose([v.load(v.at(source, offset)) for offset in offsets])):
            v.store(column, v.at(buffer, b.add(b.shl(half, INT64(4)), INT64(row * STEP))))

    def row(self, source: Any, row: Any, buffer: Any, packed: Any) -> None:
        b, v = self._builder, self._vectors
        if self.transposes:
            here, half = b.mul(row, INT64(STEP)), INT64(SIDE)
        else:
            here, half = b.mul(row, self._apart), self._half
        pair = [v.load(v.at(buffer if self.transposes else source, offset)) for offset in (here, b.add(here, half))]
        if self._prefetches:  # the next rows but 32
            for more in range(2):
                v.prefetch(source, b.mul(self._apart, b.add(row, INT64(2 * STEP + more * SIDE))), SECOND_LEVEL)
        if self._left:
            pair = [b.fmul(number, self._factor) for number in pair]
        for term, both in enumerate(zip(*map(self._split, pair), strict=True)):
            place = v.at(packed, b.add(b.shl(row, INT64(4)), INT64(2 * term * TILE_WORDS)), WORDS)
            v.store(self._upper_halves(*both), place)

    def _split(self, number: Any) -> list[Any]:
        """The bf16x3 split: three vectors of words whose upper halves are bfloat16 numbers that add up to `number`."""
        b = self._builder
        found = []
        for _ in range(TERMS - 1):
            bits = b.add(b.bitcast(number, WORDS), _words(0x8000))  # to the nearest
            found.append(b.and_(bits, _words(0xFFFF0000)))
            number = b.fsub(number, b.bitcast(found[-1], self._vectors.type))
        # The lower halves of the last term are 0, unless it is below all normal numbers.
        return [*found, b.bitcast(number, WORDS)]

    def _upper_halves(self, first: Any, second: Any) -> Any:
        """Words whose lower halves are the upper ones of the first vector, and whose upper halves of the second."""
        b = self._builder
        return b.or_(b.lshr(first, _words(16)), b.and_(second, _words(0xFFFF0000)))


@machine_code
def pack_tile(
    typing_context: Any, is_left: Any, is_along: Any, source: Any, apart: Any, factor: Any, packed: Any
) -> Any:
    """Packs 16 rows (of the left matrix, else columns) of STEP numbers, from one address to another.

    `is_along`: the numbers of a row stand side by side and rows `apart`, else the other way round. The terms lie two
    tiles apart. Numbers of the left matrix are multiplied with the factor. Of a number that is infinite, NaN, or too
    large for bfloat16, one term is NaN, or two are infinite with different signs: sums with it are NaN.
    """
    left, along = bool(is_left.literal_value), bool(is_along.literal_value)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        _, _, from_, distance, scale, to = values
        packer = TilePacker(builder, left, along, distance, scale)
        numbers, words = pointer(builder, ir.FloatType(), from_), pointer(builder, INT32, to)
        buffer = packer.buffer() if packer.transposes else None
        if packer.transposes:
            with cgutils.for_range(builder, INT64(2), intp=INT64) as loop:
                packer.transpose(numbers, loop.index, buffer)
        with cgutils.for_range(builder, INT64(SIDE), intp=INT64) as loop:
            packer.row(numbers, loop.index, buffer, words)
        return context.get_dummy_value()

    n = types.int64
    return types.void(is_left, is_along, n, n, types.float32, n), generate
