"""Matrix products whose bits do not depend on how the work is divided.

A BLAS chooses its kernel by the sizes and the number of threads, and with it the order of additions. Here every element
of a product is one chain of fused multiply-adds along k, whatever tile it falls into. The tile is written in LLVM's
terms, one accumulator per register, and runs at the speed of MKL: 120 against 117 GFLOP/s in float32 on one core with
AVX-512.

The product is a C function of its own, called through its address: inlined into every kernel that multiplies, it would
be compiled a dozen times over.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from onnxgrad.cpu.core.halves import load, move, store
from onnxgrad.cpu.core.jit import c_function, inlined, machine_code, native
from onnxgrad.cpu.core.matmul.transpose import transpose
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.vectors import (
    FIRST_LEVEL,
    HAS_AVX512,
    HAS_NEON,
    INT8,
    INT64,
    SECOND_LEVEL,
    VECTOR_BYTES,
    Vectors,
    data_of,
)
from onnxgrad.tensor_types import Array

# Tile: ROWS × VECTORS accumulators, VECTORS vectors of b and one of a must fit the registers, 16 or 32 of them.
ROWS = 8 if HAS_AVX512 or HAS_NEON else 4
VECTORS = 3
CACHE_LINE = 64
PACKED = -1  # in place of a's row step: a lies in panels of ROWS rows


class _Tile(NamedTuple):
    """A block of c that stays in registers: pointers, and where in them everything begins."""

    a: Any
    a_start: int
    a_row: int
    a_k: int
    b: Any
    b_start: int
    b_next: int  # from here on one cache line with each k is prefetched into the second-level cache
    depth: int
    c: Any
    c_start: int
    c_row: int
    columns: int
    accumulate: bool


@machine_code
def _multiply_tile(typing_context: Any, rows: Any, vectors: Any, tile: Any) -> Any:
    """c[row, column] (+)= Σ_k a[row, k] · b[k, column] for `rows` rows and the first `columns` of `vectors` vectors.

    a and b are float32 or float64 numbers as c, or words of two bfloat16 numbers that follow each other along k.
    """
    size, is_pairs = tile.types[0].dtype.bitwidth // 8, tile.types[0].dtype == types.int32
    height, width = rows.literal_value, vectors.literal_value

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        fields = cgutils.unpack_tuple(builder, values[2])
        a_base, a_at, row_step, k_step, b_base, b_at, b_soon, k_count, c_base, c_at, c_step, valid, add = fields
        v = Vectors(builder, size)
        multiply_add = v.fma_of_pairs if is_pairs else v.fma
        soon_base, b_base = v.at(b_base, b_soon, INT8), builder.gep(b_base, [b_at])
        a_rows = [builder.gep(a_base, [builder.add(a_at, builder.mul(row_step, INT64(row)))]) for row in range(height)]
        c_offsets = [
            builder.add(c_at, builder.add(builder.mul(c_step, INT64(row)), INT64(position * v.lanes)))
            for row in range(height)
            for position in range(width)
        ]
        # What the sums are added to comes from far too, and is needed only at the end.
        for offset in c_offsets:
            v.prefetch(c_base, offset, FIRST_LEVEL)

        before = builder.block
        loop, done = builder.append_basic_block("multiply"), builder.append_basic_block("multiplied")
        builder.cbranch(builder.icmp_signed(">", k_count, INT64(0)), loop, done)
        builder.position_at_end(loop)
        k = builder.phi(INT64)
        k.add_incoming(INT64(0), before)
        sums = [builder.phi(v.type) for _ in range(height * width)]
        for total in sums:
            total.add_incoming(v.zeros, before)
        b_now, a_now = builder.mul(k, INT64(VECTORS * v.lanes)), builder.mul(k, k_step)
        v.prefetch(soon_base, builder.mul(k, INT64(CACHE_LINE)), SECOND_LEVEL)
        terms = [v.load(v.at(b_base, builder.add(b_now, INT64(position * v.lanes)))) for position in range(width)]
        new_sums = []
        for row in range(height):
            factor = v.splat(builder.bitcast(builder.load(builder.gep(a_rows[row], [a_now])), v.type.element))
            for position in range(width):
                new_sums.append(multiply_add(factor, terms[position], sums[row * width + position]))
        next_k = builder.add(k, INT64(1))
        k.add_incoming(next_k, loop)
        for total, new in zip(sums, new_sums, strict=True):
            total.add_incoming(new, loop)
        builder.cbranch(builder.icmp_signed("<", next_k, k_count), loop, done)

        builder.position_at_end(done)
        results = []
        for new in new_sums:
            result = builder.phi(v.type)
            result.add_incoming(v.zeros, before)
            result.add_incoming(new, loop)
            results.append(result)
        places = [v.at(c_base, offset) for offset in c_offsets]
        with builder.if_else(builder.icmp_signed(">=", valid, INT64(width * v.lanes))) as (whole, part):
            with whole, builder.if_else(add) as (onto_old, anew):
                with onto_old:
                    for place, result in zip(places, results, strict=True):
                        v.store(builder.fadd(v.load(place), result), place)
                with anew:
                    for place, result in zip(places, results, strict=True):
                        v.store(result, place)
            with part:  # masks take long on an EPYC without AVX-512
                _store_part(builder, v, places, results, width, valid, add)
        return context.get_dummy_value()

    return types.void(rows, vectors, tile), generate


def _store_part(
    builder: ir.IRBuilder, v: Vectors, places: list[Any], results: list[Any], width: int, valid: Any, add: Any
) -> None:
    """Lanes past the last column are neither read nor written."""
    masks = [v.compare("<", valid, position * v.lanes) for position in range(width)]
    onto = builder.select(add, ir.Constant(v.mask_type, [1] * v.lanes), ir.Constant(v.mask_type, None))
    for number, (place, result) in enumerate(zip(places, results, strict=True)):
        mask = masks[number % width]
        old = v.masked_load(place, builder.and_(mask, onto))
        v.masked_store(builder.fadd(old, result), place, mask)


def _multiply(
    a: Any,
    a_row: int,
    rows: int,
    b: Any,
    b_depth: int,
    depth: int,
    columns: int,
    c: Any,
    c_row: int,
    width: int,
    accumulate: bool,
) -> None:
    """The body of the C function behind `multiply`."""
    lanes = width // VECTORS
    line = lanes * CACHE_LINE // VECTOR_BYTES
    for first in range(0, columns, width):
        valid = min(width, columns - first)
        panel = first * b_depth
        row = 0
        while row < rows:
            height = ROWS if rows - row >= ROWS else 4 if rows - row >= 4 else 1
            here, row_step, k_step = row * a_row, a_row, 1
            if a_row == PACKED:
                here, row_step, k_step = row // ROWS * ROWS * depth + row % ROWS, 1, ROWS
            at = row * c_row + first
            # All rows read this panel; the next one, if it comes from far, comes meanwhile, a third with each tile.
            third = row // ROWS
            soon = panel + (width * b_depth + third * depth * line if third < VECTORS else 0)
            tile = _Tile(a, here, row_step, k_step, b, panel, soon, depth, c, at, c_row, valid, accumulate)
            if valid > 2 * lanes:
                if height == 8:
                    _multiply_tile(8, 3, tile)
                elif height == 4:
                    _multiply_tile(4, 3, tile)
                else:
                    _multiply_tile(1, 3, tile)
            elif valid > lanes:
                if height == 8:
                    _multiply_tile(8, 2, tile)
                elif height == 4:
                    _multiply_tile(4, 2, tile)
                else:
                    _multiply_tile(1, 2, tile)
            elif height == 8:
                _multiply_tile(8, 1, tile)
            elif height == 4:
                _multiply_tile(4, 1, tile)
            else:
                _multiply_tile(1, 1, tile)
            row += height


@functools.cache
def _compiled_multiply(factors: Any, sums: Any) -> Any:
    pointer, to, n = types.CPointer(factors), types.CPointer(sums), types.int64
    return c_function(types.void(pointer, n, n, pointer, n, n, n, to, n, n, types.boolean))(_multiply)


def gemm_address(dtype: np.dtype[Any]) -> int:
    """The address of the product's C function for float32 or float64; kernels are handed it as `gemm`."""
    kind = types.float32 if dtype.itemsize == 4 else types.float64
    return int(_compiled_multiply(kind, kind).address)


def gemm_of_pairs_address() -> int:
    """The same for words of two bfloat16 numbers, which are added up in float32."""
    return int(_compiled_multiply(types.int32, types.float32).address)


def compile_all() -> None:
    """Compiles every C function of a product, which else happens when it is first asked for."""
    gemm_of_pairs_address()
    for dtype in (np.float32, np.float64):
        gemm_address(np.dtype(dtype))


class Strided(NamedTuple):
    """A matrix in an array: element [row, column] stands at start + row · row_step + column · column_step."""

    array: Any
    start: int
    row_step: int
    column_step: int


class Matrix(NamedTuple):
    """A matrix with contiguous rows in an array: element [row, column] stands at start + row · row_step + column."""

    array: Any
    start: int
    row_step: int  # PACKED: in panels of ROWS rows


class Panels(NamedTuple):
    """The right side of a product as `pack` lays it out: from `start` on, with `depth` rows in each panel."""

    array: Any
    start: int
    depth: int


@machine_code
def multiply(typing_context: Any, gemm: Any, a: Any, b: Any, c: Any, sizes: Any, accumulate: Any) -> Any:
    """c (+)= a · b, for Matrix a and c and Panels b; `sizes` are rows, depth and columns."""
    width = VECTORS * VECTOR_BYTES // (c.types[0].dtype.bitwidth // 8)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        address, *matrices, size, add = values

        def place(kind: Any, matrix: Any) -> tuple[Any, Any]:
            """The address of the first element, and the step."""
            array, *numbers = cgutils.unpack_tuple(builder, matrix)
            start, step = (
                context.cast(builder, n, t, types.int64) for n, t in zip(numbers, kind.types[1:], strict=True)
            )
            return builder.gep(data_of(context, builder, kind.types[0], array), [start]), step

        (left, a_row), (right, b_depth), (to, c_row) = map(place, (a, b, c), matrices)
        rows, depth, columns = cgutils.unpack_tuple(builder, size)
        arguments = [
            left, a_row, rows, right, b_depth, depth, columns, to, c_row,
            INT64(width), builder.zext(add, INT8),
        ]  # fmt: skip
        kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
        builder.call(builder.inttoptr(address, kind.as_pointer()), arguments)
        return context.get_dummy_value()

    return types.void(types.int64, a, b, c, types.UniTuple(types.int64, 3), types.boolean), generate


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
    source: Array,
    start: int,
    k_step: int,
    column_step: int,
    depth: int,
    columns: int,
    width: int,
    packed: Array,
    at: int,
) -> None:
    """Lays source[k, column] out in panels: packed[panel, k, column within panel], padded with zeros."""
    for first in range(0, columns, width):
        taken = min(width, columns - first)
        base = at + first * depth
        if column_step == 1:
            whole = taken // ROWS * ROWS
            for k in range(depth):
                here, to = start + k * k_step + first, base + k * width
                for j in range(0, whole, ROWS):
                    move(ROWS, source, here + j, packed, to + j)
                for j in range(whole, taken):
                    store(packed, to + j, load(source, here + j))
        else:
            for j in range(taken):
                here = start + (first + j) * column_step
                for k in range(depth):
                    store(packed, base + k * width + j, load(source, here + k * k_step))
        _fill_panel(packed, base, depth, taken, width)


@inlined
def _fill_panel(packed: Array, at: int, depth: int, taken: int, width: int) -> None:
    """Zeros in the columns that are not there."""
    if taken < width:
        for k in range(depth):
            for j in range(taken, width):
                store(packed, at + k * width + j, 0)


@native
def _pack_panel(
    number: int,
    source: Array,
    start: int,
    k_step: int,
    column_step: int,
    depth: int,
    columns: int,
    packed: Array,
) -> None:
    width = panel_width(packed)
    first = number * width
    taken, at = min(width, columns - first), aligned(packed) + first * depth
    here = start + first * column_step
    if k_step == 1 and column_step != 1:
        transpose(source, here, column_step, taken, depth, packed, at, width)
        _fill_panel(packed, at, depth, taken, width)
    else:
        pack(source, here, k_step, column_step, depth, taken, width, packed, at)


@native
def packed_matrix(
    source: Array, start: int, k_step: int, column_step: int, depth: int, columns: int, scheduler: int
) -> Array:
    """source[k, column] as the right side of a product; it begins at `aligned` of the result."""
    packed = np.empty(packed_size(source, depth, columns), source.dtype)
    width = panel_width(source)
    work = (source, start, k_step, column_step, depth, columns, packed)
    parallel(scheduler, (columns + width - 1) // width, _pack_panel, work)
    return packed
