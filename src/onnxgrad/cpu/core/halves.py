"""float16 and bfloat16 for Numba, which has neither: numbers are widened to float32 to compute and rounded once.

`load` and `store` are also how kernels reach array elements at computed positions. Numba's own array[i] tests for
negative positions and counts references, which keeps loops off vector code.
"""

from typing import Any

import ml_dtypes
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import overload

from onnxgrad.cpu.core.jit import machine_code
from onnxgrad.tensor_types import Array

# The bits of a half number under a field name that tells the format, so that Numba sees two types.
_VIEWS = {
    np.dtype(np.float16): np.dtype([("float16", np.uint16)], align=True),
    np.dtype(ml_dtypes.bfloat16): np.dtype([("bfloat16", np.uint16)], align=True),
}
INT16, INT32, FLOAT = ir.IntType(16), ir.IntType(32), ir.FloatType()


class _Bytes:
    """The memory of an array, as bytes that may be written; keeps the array alive."""

    def __init__(self, array: Array) -> None:
        self.array = array
        data = (array.ctypes.data, False)
        self.__array_interface__ = {"shape": (array.nbytes,), "typestr": "|u1", "data": data, "version": 3}


def flat(array: Array) -> Array:
    """The array's elements in C order, one-dimensional, in a type that `load` and `store` take.

    Numba would compile every kernel anew for unaligned and for read-only memory. The first is copied; of the second it
    gets a view that does not say so, since kernels do not write to their inputs.
    """
    if not array.flags.carray:
        array = np.require(array, requirements=["C", "A"])
        if not array.flags.writeable:
            array = np.asarray(_Bytes(array)).view(array.dtype)
    view = _VIEWS.get(array.dtype)
    return array.reshape(-1) if view is None else array.view(view).reshape(-1)


def _format(array: Any) -> str:
    return next(iter(array.dtype.fields)) if isinstance(array.dtype, types.Record) else ""


@machine_code
def load(typing_context: Any, array: Any, position: Any) -> Any:
    """load(array, position): the element there, widened to float32 if it is a half number."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        pointer = _element(context, builder, array, values)
        if not _format(array):
            return context.unpack_value(builder, array.dtype, pointer)
        bits = builder.load(builder.bitcast(pointer, INT16.as_pointer()), align=2)
        if _format(array) == "float16":
            return builder.fpext(builder.bitcast(bits, ir.HalfType()), FLOAT)
        return builder.bitcast(builder.shl(builder.zext(bits, INT32), INT32(16)), FLOAT)

    return (types.float32 if _format(array) else array.dtype)(array, types.int64), generate


@machine_code
def store(typing_context: Any, array: Any, position: Any, value: Any) -> Any:
    """store(array, position, value), rounding to nearest even if the elements are half numbers."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        pointer = _element(context, builder, array, values)
        if _format(array):
            if _format(array) == "float16":
                bits = builder.bitcast(builder.fptrunc(values[2], ir.HalfType()), INT16)
            else:
                bits = _round_to_bfloat16(builder, values[2])
            builder.store(bits, builder.bitcast(pointer, INT16.as_pointer()), align=2)
        else:
            context.pack_value(builder, array.dtype, values[2], pointer)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.float32 if _format(array) else array.dtype), generate


@machine_code
def move(typing_context: Any, count: Any, source: Any, start: Any, target: Any, at: Any) -> Any:
    """target[at : at + count] = source[start : start + count], widened like `load`; `count` is known when compiling.

    A loop of loads and stores stays one of single numbers, as its two arrays might overlap.
    """
    many = count.literal_value

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        _, source_array, first, target_array, place = values
        here = _element(context, builder, source, (source_array, first))
        there = _element(context, builder, target, (target_array, place))
        kind = ir.VectorType(INT16 if _format(source) else there.type.pointee, many)
        align = source.dtype.bitwidth // 8 if not _format(source) else 2
        numbers = builder.load(builder.bitcast(here, kind.as_pointer()), align=align)
        if _format(source) == "float16":
            numbers = builder.fpext(builder.bitcast(numbers, ir.VectorType(ir.HalfType(), many)), _wide(many))
        elif _format(source):
            words = builder.zext(numbers, ir.VectorType(INT32, many))
            shift = ir.Constant(words.type, [16] * many)
            numbers = builder.bitcast(builder.shl(words, shift), _wide(many))
        builder.store(numbers, builder.bitcast(there, numbers.type.as_pointer()), align=target.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(count, source, types.int64, target, types.int64), generate


def _wide(count: int) -> Any:
    return ir.VectorType(FLOAT, count)


@machine_code
def bfloat16_pair(typing_context: Any, first: Any, second: Any) -> Any:
    """A word of two float32 numbers as bfloat16, rounded to nearest even, the first in its lower half."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        low, high = (builder.zext(_round_to_bfloat16(builder, number), INT32) for number in values)
        return builder.or_(low, builder.shl(high, INT32(16)))

    return types.int32(types.float32, types.float32), generate


def _element(context: Any, builder: ir.IRBuilder, array: Any, values: Any) -> Any:
    return builder.gep(context.make_array(array)(context, builder, values[0]).data, [values[1]])


def _round_to_bfloat16(builder: ir.IRBuilder, number: Any) -> Any:
    bits = builder.bitcast(number, INT32)
    high = builder.lshr(bits, INT32(16))
    half_up = builder.add(INT32(0x7FFF), builder.and_(high, INT32(1)))
    rounded = builder.lshr(builder.add(bits, half_up), INT32(16))
    # Rounding up could carry a NaN's payload into its exponent, so a NaN is cut off and made quiet.
    is_nan = builder.fcmp_unordered("uno", number, number)
    return builder.trunc(builder.select(is_nan, builder.or_(high, INT32(0x40)), rounded), INT16)


def is_half(array: Array) -> bool:
    """Whether the elements are half numbers; known when compiling, so that the other branch is left out."""
    raise NotImplementedError("for compiled code only")


def zero(array: Array, start: int, end: int) -> None:
    """array[start:end] = 0."""
    raise NotImplementedError("for compiled code only")


def sums_for(array: Array, start: int, count: int) -> Array:
    """Where the sums for array[start : start + count] are formed: in place or, for half numbers, in a float32 copy."""
    raise NotImplementedError("for compiled code only")


def finish_sums(array: Array, start: int, sums: Array) -> None:
    """Puts what `sums_for` gave back into its array, rounding half numbers once."""
    raise NotImplementedError("for compiled code only")


@overload(is_half, inline="always", strict=False)
def _is_half(array: Any) -> Any:
    half = bool(_format(array))
    return lambda array: half


@overload(zero, strict=False)
def _zero(array: Any, start: Any, end: Any) -> Any:
    def zero_range(array: Any, start: Any, end: Any) -> None:
        for i in range(start, end):
            store(array, i, 0)

    return zero_range


@overload(sums_for, strict=False)
def _sums_for(array: Any, start: Any, count: Any) -> Any:
    if _format(array):
        return lambda array, start, count: np.empty(count, np.float32)
    return lambda array, start, count: array[start : start + count]


@overload(finish_sums, strict=False)
def _finish_sums(array: Any, start: Any, sums: Any) -> Any:
    if not _format(array):
        return lambda array, start, sums: None

    def round_once(array: Any, start: Any, sums: Any) -> None:
        for i in range(sums.size):
            store(array, start + i, sums[i])

    return round_once
