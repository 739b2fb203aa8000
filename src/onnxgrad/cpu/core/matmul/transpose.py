"""Transposes: a square of one vector by one vector at a time, turned within the registers."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from onnxgrad.cpu.core.halves import load, store
from onnxgrad.cpu.core.jit import machine_code, native
from onnxgrad.cpu.core.matmul.microkernel import VECTOR_BYTES
from onnxgrad.tensor_types import Array

INT64, INT32, BIT = ir.IntType(64), ir.IntType(32), ir.IntType(1)
WORTH_VECTORS = 4  # vectors of elements for which part of a square is turned like a whole one


def _exchanged(builder: ir.IRBuilder, rows: list[Any]) -> list[Any]:
    """The columns of a square, given its rows. Blocks off the diagonal change places: single elements, then pairs, …"""
    lanes, half = len(rows), 1
    while half < lanes:
        low = [lane if lane & half == 0 else lanes + lane - half for lane in range(lanes)]
        high = [lane + half if lane & half == 0 else lanes + lane for lane in range(lanes)]
        masks = [ir.Constant(ir.VectorType(INT32, lanes), order) for order in (low, high)]
        for k in range(lanes):
            if k & half == 0:
                pair = rows[k], rows[k + half]
                rows[k], rows[k + half] = (builder.shuffle_vector(*pair, mask) for mask in masks)
        half *= 2
    return rows


@machine_code
def _turn_square(
    typing_context: Any, source: Any, start: Any, source_step: Any, target: Any, at: Any, target_step: Any
) -> Any:
    """target[at + j · target_step + i] = source[start + i · source_step + j], for as many i and j as a vector holds."""
    size = source.dtype.bitwidth // 8
    lanes = VECTOR_BYTES // size
    vector = ir.VectorType(ir.FloatType() if size == 4 else ir.DoubleType(), lanes)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        source_array, first, step, target_array, place, out_step = values

        def line(kind: Any, array: Any, base: Any, k: int, distance: Any) -> Any:
            data = context.make_array(kind)(context, builder, array).data
            offset = builder.add(base, builder.mul(distance, INT64(k)))
            return builder.bitcast(builder.gep(data, [offset]), vector.as_pointer())

        rows = [builder.load(line(source, source_array, first, k, step), align=size) for k in range(lanes)]
        for k, row in enumerate(_exchanged(builder, rows)):
            builder.store(row, line(target, target_array, place, k, out_step), align=size)
        return context.get_dummy_value()

    n = types.int64
    return types.void(source, n, n, target, n, n), generate


@machine_code
def _turn_part(
    typing_context: Any,
    source: Any,
    start: Any,
    source_step: Any,
    rows: Any,
    columns: Any,
    target: Any,
    at: Any,
    target_step: Any,
) -> Any:
    """The same for i below `rows` and j below `columns`, at least one each and at most as many as a vector holds."""
    size = source.dtype.bitwidth // 8
    lanes = VECTOR_BYTES // size
    vector = ir.VectorType(ir.FloatType() if size == 4 else ir.DoubleType(), lanes)
    mask_type, counts = ir.VectorType(BIT, lanes), ir.VectorType(INT64, lanes)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        source_array, first, step, row_count, column_count, target_array, place, out_step = values
        name = f"v{lanes}f{size * 8}"

        def function(result: Any, arguments: list[Any], intrinsic_name: str) -> Any:
            return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), intrinsic_name)

        def below(count: Any) -> Any:
            alone = builder.insert_element(ir.Constant(counts, ir.Undefined), count, INT32(0))
            zeros = ir.Constant(ir.VectorType(INT32, lanes), None)
            spread = builder.shuffle_vector(alone, ir.Constant(counts, ir.Undefined), zeros)
            return builder.icmp_signed("<", ir.Constant(counts, list(range(lanes))), spread)

        def line(kind: Any, array: Any, base: Any, k: int, count: Any, distance: Any) -> Any:
            """The k-th, or the first in place of one that does not exist."""
            data = context.make_array(kind)(context, builder, array).data
            exists = builder.icmp_signed("<", INT64(k), count)
            offset = builder.add(base, builder.mul(distance, builder.select(exists, INT64(k), INT64(0))))
            return builder.bitcast(builder.gep(data, [offset]), vector.as_pointer()), exists

        masked_load = function(
            vector, [vector.as_pointer(), INT32, mask_type, vector], f"llvm.masked.load.{name}.p0{name}"
        )
        masked_store = function(
            ir.VoidType(), [vector, vector.as_pointer(), INT32, mask_type], f"llvm.masked.store.{name}.p0{name}"
        )
        seen, written, nothing = below(column_count), below(row_count), ir.Constant(mask_type, None)
        lines = []
        for k in range(lanes):
            here, _ = line(source, source_array, first, k, row_count, step)
            lines.append(builder.call(masked_load, [here, INT32(size), seen, ir.Constant(vector, None)]))
        for k, turned in enumerate(_exchanged(builder, lines)):
            here, exists = line(target, target_array, place, k, column_count, out_step)
            builder.call(masked_store, [turned, here, INT32(size), builder.select(exists, written, nothing)])
        return context.get_dummy_value()

    n = types.int64
    return types.void(source, n, n, n, n, target, n, n), generate


@native
def turn(
    source: Array, start: int, source_step: int, rows: int, columns: int, target: Array, at: int, target_step: int
) -> None:
    """target[at + column · target_step + row] = source[start + row · source_step + column]."""
    lanes = VECTOR_BYTES // source.itemsize
    for row in range(0, rows, lanes):
        height = min(lanes, rows - row)
        for column in range(0, columns, lanes):
            width = min(lanes, columns - column)
            here, there = start + row * source_step + column, at + column * target_step + row
            if height == lanes and width == lanes:
                _turn_square(source, here, source_step, target, there, target_step)
            elif height * width >= WORTH_VECTORS * lanes:
                _turn_part(source, here, source_step, height, width, target, there, target_step)
            else:
                for i in range(height):
                    for j in range(width):
                        store(target, there + j * target_step + i, load(source, here + i * source_step + j))
