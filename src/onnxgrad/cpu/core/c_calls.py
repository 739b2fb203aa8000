"""Calls of C functions by their address, and memory by address."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from onnxgrad.cpu.core.jit import machine_code

INT64 = ir.IntType(64)


@machine_code
def invoke(typing_context: Any, address: Any, arguments: Any) -> Any:
    """Calls the C function at an address with machine words, and gives the word it returns."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        count = len(arguments.types)
        function = builder.inttoptr(values[0], ir.FunctionType(INT64, [INT64] * count).as_pointer())
        return builder.call(function, cgutils.unpack_tuple(builder, values[1], count))

    return types.int64(types.int64, arguments), generate


@machine_code
def keep(typing_context: Any, array: Any) -> Any:
    """Nothing; but an array is freed after its last use, and its address does not count for one."""
    return types.void(array), lambda context, builder, signature, values: context.get_dummy_value()
