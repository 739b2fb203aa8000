"""Compiled kernels as C functions of one argument: where their arguments lie in memory, one word after the other."""

import functools
import sys
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from onnxgrad.cpu.core.recording import Call

INT64, INT32 = ir.IntType(64), ir.IntType(32)
FAILED = 2**62  # instead of a result: the kernel itself raised, for want of memory
VOID = -1  # what a function without a result returns: nothing is wrong


def words_of(value: Any) -> list[Any]:
    """An argument as Numba hands it over: numbers, and the array itself where its address belongs."""
    if isinstance(value, np.ndarray):
        if not value.flags.c_contiguous:
            raise TypeError("a kernel takes an array that is not in C order, which a plan cannot keep")
        strides = [int(s) for s in value.strides]
        return [0, 0, value.size, value.itemsize, value, *(int(d) for d in value.shape), *strides]
    if isinstance(value, tuple):
        return [word for member in value for word in words_of(member)]
    if isinstance(value, (bool, np.bool_, int, np.integer)):
        return [int(value)]
    if isinstance(value, (float, np.floating)):
        return [int.from_bytes(np.asarray(value).tobytes(), sys.byteorder, signed=True)]
    raise TypeError(f"a kernel takes a {type(value).__name__}, which native code cannot pass")


def prepare(call: Call) -> tuple[int, list[Any]]:
    """The address of the C function for a call, and its words; the scheduler comes after them."""
    kinds = tuple(numba.typeof(argument) for argument in call.args)
    words = [word for argument in call.args for word in words_of(argument)]
    return _address(call.native, (*kinds, types.int64)), words


@functools.cache
@global_compiler_lock
def _address(native: Any, kinds: tuple[Any, ...]) -> int:
    """Compiles the kernel for these types, or finds it compiled, and a few instructions that unpack its arguments."""
    native.compile(kinds)
    compiled = native.overloads[kinds]
    target = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    context = cpu_target.target_context
    arguments = context.get_arg_packer(kinds).argument_types
    gives = compiled.signature.return_type
    if gives not in (types.int64, types.none):
        raise TypeError(f"{native.py_func.__name__} returns {gives}, expected an int64 or nothing")

    module = ir.Module("onnxgrad_call")
    name = f"onnxgrad_call_{target}"
    function = ir.Function(module, ir.FunctionType(INT64, [INT64.as_pointer()]), name)
    builder = ir.IRBuilder(function.append_basic_block())
    # Numba's own way of calling: where to put the result, where to put an exception, the arguments; 0 for success.
    result_type = INT64 if gives == types.int64 else ir.IntType(8).as_pointer()
    result = builder.alloca(result_type)
    exception = builder.alloca(ir.IntType(8).as_pointer())
    given = [_load(builder, function.args[0], position, kind) for position, kind in enumerate(arguments)]
    signature = ir.FunctionType(INT32, [result.type, exception.type, *arguments])
    address = builder.inttoptr(INT64(target), signature.as_pointer())
    status = builder.call(address, [result, exception, *given])
    good = builder.load(result) if gives == types.int64 else INT64(VOID)
    builder.ret(builder.select(builder.icmp_signed("==", status, INT32(0)), good, INT64(FAILED)))

    library = context.codegen().create_library(name)
    library.add_ir_module(module)
    library.finalize()
    _kept.append(library)
    return int(library.get_pointer_to_function(name))


_kept: list[Any] = []  # machine code lives as long as the library it belongs to


def _load(builder: ir.IRBuilder, words: Any, position: int, kind: Any) -> Any:
    word = builder.load(builder.gep(words, [INT64(position)]))
    if isinstance(kind, ir.PointerType):
        return builder.inttoptr(word, kind)
    if isinstance(kind, ir.DoubleType):
        return builder.bitcast(word, kind)
    if isinstance(kind, ir.FloatType):
        return builder.bitcast(builder.trunc(word, INT32), kind)
    return word if kind.width == 64 else builder.trunc(word, kind)
