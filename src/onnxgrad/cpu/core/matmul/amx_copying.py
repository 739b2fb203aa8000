"""Results of tiles on their way into memory: some rows are gathered, then copied while the next ones are multiplied.

To read a tile that has just been written takes long, if its rows are 4 kB apart most of all. Rows that are copied later
can be measured on the way at next to no cost, and a tile's row that lies on two cache lines is written in one go.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from onnxgrad.cpu.core.jit import machine_code
from onnxgrad.cpu.core.matmul.amx_packing import FLOATS, INT8, INT64, PANEL, SIDE, VectorWriter

PIECE = PANEL * PANEL  # numbers: as many pieces as panels
DOUBLES = ir.VectorType(ir.DoubleType(), SIDE)


class PieceCopier:
    """Writes the copying of a piece: of PANEL numbers, TIMES over."""

    TIMES = PIECE // PANEL

    def __init__(
        self,
        builder: ir.IRBuilder,
        is_measured: bool,
        source: Any,
        target: Any,
        column: Any,
        columns: Any,
        source_row: Any,
        target_row: Any,
    ) -> None:
        self._builder, self._writer, self._measured = builder, VectorWriter(builder), is_measured
        self._columns = columns
        self._steps = [builder.mul(row, INT64(4)) for row in (source_row, target_row)]
        self._rows = [cgutils.alloca_once_value(builder, address) for address in (source, target)]
        self._column = cgutils.alloca_once_value(builder, column)
        zeros = ir.Constant(DOUBLES, [0.0] * SIDE)
        self._totals = [cgutils.alloca_once_value(builder, zeros) for _ in range(2)]

    def copy_some(self) -> None:
        """The next PANEL numbers, which are of one row; the row after it if they end it."""
        b, w = self._builder, self._writer
        column, rows = b.load(self._column), [b.load(row) for row in self._rows]
        source, target = (w.at(INT8, row) for row in rows)
        for half, total in enumerate(self._totals):
            at = b.shl(b.add(column, INT64(half * SIDE)), INT64(2))
            number = w.load(FLOATS, source, at)
            w.store(number, target, at)
            if self._measured:
                wide = b.fpext(number, DOUBLES)
                fma = w.intrinsic(DOUBLES, [DOUBLES] * 3, "llvm.fma.v16f64")
                b.store(b.call(fma, [wide, wide, b.load(total)]), total)
        following = b.add(column, INT64(PANEL))
        is_end = b.icmp_signed(">=", following, self._columns)
        b.store(b.select(is_end, INT64(0), following), self._column)
        for place, row, step in zip(self._rows, rows, self._steps, strict=True):
            b.store(b.select(is_end, b.add(row, step), row), place)

    def squares(self) -> Any:
        """The sum of the squares of what was copied, in float64."""
        b = self._builder
        number = ir.DoubleType()
        add = self._writer.intrinsic(number, [number, DOUBLES], "llvm.vector.reduce.fadd.v16f64")
        return b.call(add, [number(0.0), b.fadd(*(b.load(t) for t in self._totals))], fastmath=("reassoc",))


@machine_code
def copy_piece(typing_context: Any, is_measured: Any, copying: Any) -> Any:
    """Copies a piece, as `multiply_and_copy` does, on its own."""
    measured = bool(is_measured.literal_value)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        *places, squares = cgutils.unpack_tuple(builder, values[1])
        copier, writer = PieceCopier(builder, measured, *places), VectorWriter(builder)
        with writer.repeat(copier.TIMES):
            copier.copy_some()
        if measured:
            builder.store(copier.squares(), writer.at(ir.DoubleType(), squares))
        return context.get_dummy_value()

    return types.void(is_measured, copying), generate
