"""Transposes: a square of one vector by one vector at a time, turned within the registers."""

from typing import Any

from llvmlite import ir
from numba import types

from onnxgrad.cpu.core.gemm import VECTOR_BYTES
from onnxgrad.cpu.core.halves import load, store
from onnxgrad.cpu.core.jit import machine_code, native
from onnxgrad.tensor_types import Array

INT32 = ir.IntType(32)


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

        def vector_at(kind: Any, array: Any, offset: Any) -> Any:
            data = context.make_array(kind)(context, builder, array).data
            return builder.bitcast(builder.gep(data, [offset]), vector.as_pointer())

        def line(base: Any, k: int, distance: Any) -> Any:
            return builder.add(base, builder.mul(distance, ir.IntType(64)(k)))

        rows = [builder.load(vector_at(source, source_array, line(first, k, step)), align=size) for k in range(lanes)]
        # Blocks off the diagonal change places: single elements first, then pairs, …
        half = 1
        while half < lanes:
            low = [lane if lane & half == 0 else lanes + lane - half for lane in range(lanes)]
            high = [lane + half if lane & half == 0 else lanes + lane for lane in range(lanes)]
            masks = [ir.Constant(ir.VectorType(INT32, lanes), order) for order in (low, high)]
            for k in range(lanes):
                if k & half == 0:
                    pair = rows[k], rows[k + half]
                    rows[k], rows[k + half] = (builder.shuffle_vector(*pair, mask) for mask in masks)
            half *= 2
        for k, row in enumerate(rows):
            builder.store(row, vector_at(target, target_array, line(place, k, out_step)), align=size)
        return context.get_dummy_value()

    n = types.int64
    return types.void(source, n, n, target, n, n), generate


@native
def turn(
    source: Array, start: int, source_step: int, rows: int, columns: int, target: Array, at: int, target_step: int
) -> None:
    """target[at + column · target_step + row] = source[start + row · source_step + column]."""
    lanes = VECTOR_BYTES // source.itemsize
    whole_rows, whole_columns = rows // lanes * lanes, columns // lanes * lanes
    for row in range(0, whole_rows, lanes):
        for column in range(0, whole_columns, lanes):
            _turn_square(
                source, start + row * source_step + column, source_step, target, at + column * target_step + row,
                target_step,
            )  # fmt: skip
    for row in range(rows):
        for column in range(whole_columns if row < whole_rows else 0, columns):
            store(target, at + column * target_step + row, load(source, start + row * source_step + column))
