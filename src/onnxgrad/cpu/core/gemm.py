"""Matrix products whose bits do not depend on how the work is divided.

A BLAS chooses its kernel by the size of the piece and the number of threads, and with it the order of additions. Here
every element of a product is one chain of fused multiply-adds along k (in blocks of fixed length where k counts rows
of data), whatever tile it falls into. The tile is written in LLVM's terms, one accumulator per register, and runs at
the speed of MKL: 120 against 117 GFLOP/s in float32 on one core with AVX-512.
"""

from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from onnxgrad.cpu.core.halves import load, store
from onnxgrad.cpu.core.jit import native
from onnxgrad.tensor_types import Array

_features = llvm.get_host_cpu_features()
VECTOR_BYTES = 64 if _features.get("avx512f") else 32 if _features.get("avx") else 16
# Tile: ROWS × VECTORS accumulators, VECTORS columns of b and one element of a must fit the registers, 16 or 32 of them.
ROWS = 8 if _features.get("avx512f") or _features.get("neon") else 4
VECTORS = 3
CACHE_LINE = 64
PACKED = -1  # in place of a's row step
INT64, INT32 = ir.IntType(64), ir.IntType(32)


@intrinsic(prefer_literal=True)  # type: ignore[misc]
def _tile(
    typing_context: Any,
    rows: Any,
    vectors: Any,
    a: Any,
    a_start: Any,
    a_row: Any,
    a_k: Any,
    b: Any,
    b_start: Any,
    b_k: Any,
    count: Any,
    c: Any,
    c_start: Any,
    c_row: Any,
    accumulate: Any,
) -> Any:
    """c[row, column] (+)= Σ_k a[row, k] · b[k, column] for `rows` rows and `vectors` vectors of columns."""
    element = c.dtype
    lanes = VECTOR_BYTES // (element.bitwidth // 8)
    number = ir.FloatType() if element == types.float32 else ir.DoubleType()
    vector = ir.VectorType(number, lanes)
    size = element.bitwidth // 8
    height, width = rows.literal_value, vectors.literal_value

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        _, _, a_array, a_at, row_step, k_step, b_array, b_at, b_step, k_count, c_array, c_at, c_step, add = values

        def pointer(kind: Any, array: Any, start: Any) -> Any:
            return builder.gep(context.make_array(kind)(context, builder, array).data, [start])

        def vector_at(base: Any, offset: Any) -> Any:
            return builder.bitcast(builder.gep(base, [offset]), vector.as_pointer())

        a_base, b_base, c_base = (
            pointer(kind, array, start) for kind, array, start in ((a, a_array, a_at), (b, b_array, b_at), (c, c_array, c_at))
        )
        fma_type = ir.FunctionType(vector, [vector] * 3)
        fma = cgutils.get_or_insert_function(builder.module, fma_type, f"llvm.fma.v{lanes}f{element.bitwidth}")
        nothing = ir.Constant(vector, None)
        a_rows = [builder.gep(a_base, [builder.mul(row_step, INT64(row))]) for row in range(height)]

        before = builder.block
        loop, done = builder.append_basic_block("multiply"), builder.append_basic_block("multiplied")
        builder.cbranch(builder.icmp_signed(">", k_count, INT64(0)), loop, done)
        builder.position_at_end(loop)
        k = builder.phi(INT64)
        k.add_incoming(INT64(0), before)
        sums = [builder.phi(vector) for _ in range(height * width)]
        for total in sums:
            total.add_incoming(nothing, before)
        b_now, a_now = builder.mul(k, b_step), builder.mul(k, k_step)
        columns = []
        for position in range(width):
            at = vector_at(b_base, builder.add(b_now, INT64(position * lanes)))
            columns.append(builder.load(at, align=size))
        new_sums = []
        for row in range(height):
            scalar = builder.load(builder.gep(a_rows[row], [a_now]))
            undefined = ir.Constant(vector, ir.Undefined)
            first = builder.insert_element(undefined, scalar, INT32(0))
            spread = builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(INT32, lanes), None))
            for position in range(width):
                new_sums.append(builder.call(fma, [spread, columns[position], sums[row * width + position]]))
        next_k = builder.add(k, INT64(1))
        k.add_incoming(next_k, builder.block)
        for total, new in zip(sums, new_sums, strict=True):
            total.add_incoming(new, builder.block)
        loop_end = builder.block
        builder.cbranch(builder.icmp_signed("<", next_k, k_count), loop, done)

        builder.position_at_end(done)
        results = []
        for new in new_sums:
            result = builder.phi(vector)
            result.add_incoming(nothing, before)
            result.add_incoming(new, loop_end)
            results.append(result)
        places = [
            vector_at(c_base, builder.add(builder.mul(c_step, INT64(row)), INT64(position * lanes)))
            for row in range(height)
            for position in range(width)
        ]
        with builder.if_else(add) as (onto_old, afresh):
            with onto_old:
                for place, result in zip(places, results, strict=True):
                    builder.store(builder.fadd(builder.load(place, align=size), result), place, align=size)
            with afresh:
                for place, result in zip(places, results, strict=True):
                    builder.store(result, place, align=size)
        return context.get_dummy_value()

    step = types.int64
    return types.void(
        rows, vectors, a, step, step, step, b, step, step, step, c, step, step, types.boolean
    ), generate


@native
def panel_width(array: Array) -> int:
    """Columns in a panel of b: those of one tile."""
    return VECTORS * (VECTOR_BYTES // array.itemsize)


@native
def packed_size(array: Array, depth: int, columns: int) -> int:
    """Elements a packed b needs, with room to start on a cache line."""
    width = panel_width(array)
    return (columns + width - 1) // width * width * depth + CACHE_LINE // array.itemsize


@native
def aligned(buffer: Array) -> int:
    """The first position of the buffer on a cache line; loads across lines cost a tenth of the speed."""
    return (-buffer.ctypes.data % CACHE_LINE) // buffer.itemsize


@native
def pack(
    source: Array, start: int, k_step: int, column_step: int, depth: int, columns: int, width: int, packed: Array, at: int
) -> None:
    """Lays source[k, column] out in panels: packed[panel, k, column within panel], padded with zeros."""
    for first in range(0, columns, width):
        taken = min(width, columns - first)
        base = at + first * depth
        if column_step == 1:
            for k in range(depth):
                here = start + k * k_step + first
                for j in range(taken):
                    store(packed, base + k * width + j, load(source, here + j))
        else:
            for j in range(taken):
                here = start + (first + j) * column_step
                for k in range(depth):
                    store(packed, base + k * width + j, load(source, here + k * k_step))
        if taken < width:
            for k in range(depth):
                for j in range(taken, width):
                    store(packed, base + k * width + j, 0)


@native
def _one_tile(
    rows: int,
    vectors: int,
    a: Array,
    a_start: int,
    a_row: int,
    a_k: int,
    b: Array,
    b_start: int,
    b_k: int,
    count: int,
    c: Array,
    c_start: int,
    c_row: int,
    accumulate: bool,
) -> None:
    """A tile of a height and width for which there is code."""
    if vectors == 3:
        if rows == 8:
            _tile(8, 3, a, a_start, a_row, a_k, b, b_start, b_k, count, c, c_start, c_row, accumulate)
        elif rows == 4:
            _tile(4, 3, a, a_start, a_row, a_k, b, b_start, b_k, count, c, c_start, c_row, accumulate)
        else:
            _tile(1, 3, a, a_start, a_row, a_k, b, b_start, b_k, count, c, c_start, c_row, accumulate)
    elif vectors == 2:
        if rows == 8:
            _tile(8, 2, a, a_start, a_row, a_k, b, b_start, b_k, count, c, c_start, c_row, accumulate)
        elif rows == 4:
            _tile(4, 2, a, a_start, a_row, a_k, b, b_start, b_k, count, c, c_start, c_row, accumulate)
        else:
            _tile(1, 2, a, a_start, a_row, a_k, b, b_start, b_k, count, c, c_start, c_row, accumulate)
    elif rows == 8:
        _tile(8, 1, a, a_start, a_row, a_k, b, b_start, b_k, count, c, c_start, c_row, accumulate)
    elif rows == 4:
        _tile(4, 1, a, a_start, a_row, a_k, b, b_start, b_k, count, c, c_start, c_row, accumulate)
    else:
        _tile(1, 1, a, a_start, a_row, a_k, b, b_start, b_k, count, c, c_start, c_row, accumulate)


@native
def multiply(
    a: Array,
    a_start: int,
    a_row: int,
    rows: int,
    b: Array,
    b_start: int,
    b_depth: int,
    depth: int,
    columns: int,
    c: Array,
    c_start: int,
    c_row: int,
    accumulate: bool,
) -> None:
    """c (+)= a · b, b packed with `b_depth` rows per panel of which the first `depth` from b_start on are used.

    a[row, k] stands at a_start + row · a_row + k, or a_row is PACKED and a is packed in panels of ROWS rows.
    """
    width = panel_width(c)
    lanes = width // VECTORS
    scratch = np.empty(ROWS * width, c.dtype)
    for first in range(0, columns, width):
        taken = min(width, columns - first)
        vectors = (taken + lanes - 1) // lanes
        whole = taken % lanes == 0
        panel = b_start + first * b_depth
        row = 0
        while row < rows:
            height = ROWS if rows - row >= ROWS else 4 if rows - row >= 4 else 1
            at = c_start + row * c_row + first
            here = a_start + row * a_row
            row_step, k_step = a_row, 1
            if a_row == PACKED:
                here = a_start + row // ROWS * ROWS * depth + row % ROWS
                row_step, k_step = 1, ROWS
            if whole:
                _one_tile(height, vectors, a, here, row_step, k_step, b, panel, width, depth, c, at, c_row, accumulate)
            else:
                _one_tile(height, vectors, a, here, row_step, k_step, b, panel, width, depth, scratch, 0, width, False)
                for i in range(height):
                    for j in range(taken):
                        old = load(c, at + i * c_row + j) if accumulate else 0
                        store(c, at + i * c_row + j, old + scratch[i * width + j])
            row += height
