"""The tensor types an operator takes: annotations for its parameters, and ONNX's names for NumPy's dtypes."""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

# ONNX's name of each fixed-size element type that has a zero. float8e8m0 holds powers of two only, so a gradient
# in it cannot say "nothing flows here"; strings have no fixed size.
DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(scalar)
    for name, scalar in {
        "float16": np.float16,
        "float": np.float32,
        "double": np.float64,
        "bfloat16": ml_dtypes.bfloat16,
        "float8e4m3fn": ml_dtypes.float8_e4m3fn,
        "float8e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
        "float8e5m2": ml_dtypes.float8_e5m2,
        "float8e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
        "float4e2m1": ml_dtypes.float4_e2m1fn,
        "int8": np.int8,
        "int16": np.int16,
        "int32": np.int32,
        "int64": np.int64,
        "uint8": np.uint8,
        "uint16": np.uint16,
        "uint32": np.uint32,
        "uint64": np.uint64,
        "int4": ml_dtypes.int4,
        "uint4": ml_dtypes.uint4,
        "int2": ml_dtypes.int2,
        "uint2": ml_dtypes.uint2,
        "bool": np.bool_,
        "complex64": np.complex64,
        "complex128": np.complex128,
    }.items()
}
FLOATS = ("float16", "float", "double", "bfloat16")


@dataclass(frozen=True)
class TypeConstraint:
    """What one type variable of a schema (T, Tind, I) may stand for."""

    name: str
    types: tuple[str, ...]
    on_host: bool = False  # shape-like: read by the CPU even when the data is on a GPU; lists and ints are welcome
    single: bool = False  # on the host, and one number: a graph may have it as a scalar

    @cached_property
    def dtypes(self) -> tuple[np.dtype[Any], ...]:
        return tuple(DTYPES[name] for name in self.types)


T = Annotated[Array, TypeConstraint("T", FLOATS)]
AnyT = Annotated[Array, TypeConstraint("T", tuple(DTYPES))]
Index = Annotated[Array, TypeConstraint("Tind", ("int32", "int64"))]
HostIndex = Annotated[Array, TypeConstraint("Tind", ("int32", "int64"), on_host=True)]
Shape = Annotated[Array, TypeConstraint("I", ("int64",), on_host=True)]
# GatherGrad alone has always taken its shape in int32 too.
Shape32 = Annotated[Array, TypeConstraint("I", ("int64", "int32"), on_host=True)]
Lengths = Annotated[Array, TypeConstraint("Tlen", ("int32",))]


def accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type sums are kept in: float32 for the half types, so that they round once, at the end."""
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype
