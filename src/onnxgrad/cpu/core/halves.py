"""float16 and bfloat16 for Numba, which has neither: numbers are widened to float32 to compute and rounded once."""

from typing import Any

import ml_dtypes
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from onnxgrad.tensor_types import Array

# The bits of a half number under a field name that tells the format, so that Numba sees two types.
FLOAT16 = np.dtype([("float16", np.uint16)], align=True)
BFLOAT16 = np.dtype([("bfloat16", np.uint16)], align=True)
_VIEWS = {np.dtype(np.float16): FLOAT16, np.dtype(ml_dtypes.bfloat16): BFLOAT16}


def flat(array: Array) -> Array:
    """The array's elements in C order, one-dimensional, in a type that `load` and `store` take."""
    contiguous = np.ascontiguousarray(array)
    return contiguous.view(_VIEWS.get(array.dtype, array.dtype)).reshape(-1)


def load(array: Array, position: int) -> Any:
    """array[position], widened to float32 if it is a half number."""
    raise NotImplementedError("for compiled code only")


def store(array: Array, position: int, value: Any) -> None:
    """array[position] = value, rounded to nearest even if it is a half number."""
    raise NotImplementedError("for compiled code only")


def _format(array: Any) -> str:
    return next(iter(array.dtype.fields)) if isinstance(array.dtype, types.Record) else ""


@overload(load, inline="always", strict=False)  # type: ignore[misc]
def _load(array: Any, position: Any) -> Any:
    if _format(array) == "float16":
        return lambda array, position: _from_float16(array[position].float16)
    if _format(array) == "bfloat16":
        return lambda array, position: _as_float(np.uint32(array[position].bfloat16) << np.uint32(16))
    return lambda array, position: array[position]


@overload(store, inline="always", strict=False)  # type: ignore[misc]
def _store(array: Any, position: Any, value: Any) -> Any:
    if _format(array) == "float16":

        def store_float16(array: Any, position: Any, value: Any) -> None:
            array[position].float16 = _to_float16(np.float32(value))

        return store_float16
    if _format(array) == "bfloat16":

        def store_bfloat16(array: Any, position: Any, value: Any) -> None:
            bits = _as_bits(np.float32(value))
            rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            # Rounding up could carry a NaN's payload into its exponent.
            is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
            array[position].bfloat16 = np.uint16(quiet if is_nan else rounded)

        return store_bfloat16

    def store_native(array: Any, position: Any, value: Any) -> None:
        array[position] = value

    return store_native


@intrinsic  # type: ignore[misc]
def _as_float(typing_context: Any, bits: Any) -> Any:
    return types.float32(types.uint32), lambda context, builder, signature, v: builder.bitcast(v[0], ir.FloatType())


@intrinsic  # type: ignore[misc]
def _as_bits(typing_context: Any, number: Any) -> Any:
    return types.uint32(types.float32), lambda context, builder, signature, v: builder.bitcast(v[0], ir.IntType(32))


@intrinsic  # type: ignore[misc]
def _from_float16(typing_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return builder.fpext(builder.bitcast(values[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic  # type: ignore[misc]
def _to_float16(typing_context: Any, number: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return builder.bitcast(builder.fptrunc(values[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate
