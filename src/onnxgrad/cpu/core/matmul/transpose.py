"""Transposes: a square of one vector by one vector at a time, within the registers."""

from typing import Any

from llvmlite import ir
from numba import types

from onnxgrad.cpu.core.halves import load, store
from onnxgrad.cpu.core.jit import machine_code, native
from onnxgrad.cpu.core.vectors import INT64, VECTOR_BYTES, Vectors, data_of
from onnxgrad.tensor_types import Array

WORTH_VECTORS = 4  # vectors of elements for which part of a square is transposed like a whole one


@machine_code
def _transpose_square(
    typing_context: Any, source: Any, start: Any, source_step: Any, target: Any, at: Any, target_step: Any
) -> Any:
    """target[at + j · target_step + i] = source[start + i · source_step + j], for as many i and j as a vector holds."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        source_array, first, step, target_array, place, out_step = values
        v = Vectors(builder, source.dtype.bitwidth // 8)
        source_data, target_data = (
            data_of(context, builder, source, source_array),
            data_of(context, builder, target, target_array),
        )

        def line(data: Any, base: Any, k: int, distance: Any) -> Any:
            return v.at(data, builder.add(base, builder.mul(distance, INT64(k))))

        rows = [v.load(line(source_data, first, k, step)) for k in range(v.lanes)]
        for k, column in enumerate(v.transpose(rows)):
            v.store(column, line(target_data, place, k, out_step))
        return context.get_dummy_value()

    n = types.int64
    return types.void(source, n, n, target, n, n), generate


@machine_code
def _transpose_part(
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

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        source_array, first, step, row_count, column_count, target_array, place, out_step = values
        v = Vectors(builder, source.dtype.bitwidth // 8)
        source_data, target_data = (
            data_of(context, builder, source, source_array),
            data_of(context, builder, target, target_array),
        )

        def line(data: Any, base: Any, k: int, count: Any, distance: Any) -> Any:
            """The k-th, or the first in place of one that does not exist."""
            exists = builder.icmp_signed("<", INT64(k), count)
            offset = builder.add(base, builder.mul(distance, builder.select(exists, INT64(k), INT64(0))))
            return v.at(data, offset), exists

        seen, written, nothing = v.compare("<", column_count), v.compare("<", row_count), ir.Constant(v.mask_type, None)
        lines = []
        for k in range(v.lanes):
            here, _ = line(source_data, first, k, row_count, step)
            lines.append(v.masked_load(here, seen))
        for k, column in enumerate(v.transpose(lines)):
            here, exists = line(target_data, place, k, column_count, out_step)
            v.masked_store(column, here, builder.select(exists, written, nothing))
        return context.get_dummy_value()

    n = types.int64
    return types.void(source, n, n, n, n, target, n, n), generate


@native
def transpose(
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
                _transpose_square(source, here, source_step, target, there, target_step)
            elif height * width >= WORTH_VECTORS * lanes:
                _transpose_part(source, here, source_step, height, width, target, there, target_step)
            else:
                for i in range(height):
                    for j in range(width):
                        store(target, there + j * target_step + i, load(source, here + i * source_step + j))
