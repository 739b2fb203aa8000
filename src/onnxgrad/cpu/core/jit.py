"""How kernels are compiled: to native code without Python's lock, once per machine, kept on disk."""

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.core.ccallback import CFunc
from numba.core.compiler import Compiler
from numba.extending import intrinsic

from onnxgrad.cpu.core.kernel_cache import KernelCache

try:
    from numba.core.dispatcher import _FunctionCompiler  # type: ignore[attr-defined]
except ImportError:  # a private name, which other versions of Numba may not have: compiling takes longer there
    _FunctionCompiler = None


int64: Any = np.int64  # a machine number: to the type checker, in native code, anything goes

# The arithmetic is the machine's: a division by zero gives inf, a multiplication and an addition may fuse.
OPTIONS: dict[str, Any] = {"error_model": "numpy", "fastmath": {"contract"}}


KERNELS: dict[str, Any] = {}  # every function that Python calls, by a name that tells it from the others


def _find_by_name(compiled: Any, function: Callable[..., Any]) -> Any:
    """Gives a function its place among the compiled ones."""
    name = f"{function.__module__}.{function.__qualname__}-{function.__code__.co_firstlineno}"
    inside = "".join(
        f"[{cell.cell_contents}]" for cell in function.__closure__ or ()
    )  # as functions made by others have
    compiled._cache = KernelCache(name + inside, function)
    KERNELS[name + inside] = compiled
    return compiled


def native(function: Callable[..., Any], **options: Any) -> Any:
    """A function for other native code and for Python, compiled when first called."""
    for_python, for_native = (numba.njit(nogil=True, **{**OPTIONS, **options})(function) for _ in range(2))
    if _FunctionCompiler is None:
        return _find_by_name(for_python, function)
    for_native._compiler = _LLVMCompiler(for_native)
    for question in ("get_call_template", "get_overload", "get_compile_result"):  # which native code asks
        setattr(for_python, question, getattr(for_native, question))
    return _find_by_name(for_python, function)


class _LLVMCompiler(_FunctionCompiler or object):  # type: ignore[misc]
    """Stops at optimised LLVM code, which native callers take in.

    By itself Numba makes machine code of every function with all that it calls, at each level again, and two wrappers
    for Python and C. Only those of the functions that Python calls are ever run: without the others, GRUGrad compiles
    in 7 s instead of 12 (EPYC).
    """

    def __init__(self, function: Any) -> None:
        super().__init__(function.py_func, function.targetdescr, function.targetoptions, {}, Compiler)

    def _customize_flags(self, flags: Any) -> Any:
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        return flags

    def compile(self, args: Any, return_type: Any) -> Any:
        result = super().compile(args, return_type)
        result.library._finalize_final_module = functools.partial(setattr, result.library, "_finalized", True)
        # Numba finds a compiled function by what Python would call, of which any built-in method takes the place.
        result = result._replace(entry_point=[].append)
        result.target_context.insert_user_function(result.entry_point, result.fndesc, [result.library])
        return result


def inlined(function: Callable[..., Any]) -> Any:
    """Like `native`, for small functions inside loops: a real call counts references to every array it is given."""
    return native(function, forceinline=True)


def machine_code(function: Callable[..., Any]) -> Any:
    """A function that writes the LLVM code of its call itself; arguments known when compiling come as literals."""
    return intrinsic(prefer_literal=True)(function)


def c_function(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """A function with an address, that is called rather than merged into its callers; compiled at once."""

    def build(function: Callable[..., Any]) -> Any:
        compiled = CFunc(function, (signature.args, signature.return_type), locals={}, options=OPTIONS)
        _find_by_name(compiled, function).compile()
        return compiled

    return build
