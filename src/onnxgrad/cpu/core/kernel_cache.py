"""Where compiled kernels are looked for: those shipped with the package, then those that this machine has kept."""

import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from onnxgrad.cpu.core import ahead
from onnxgrad.cpu.core.compiling import tell
from onnxgrad.cpu.core.kept_kernels import KeptKernels, write_whole
from onnxgrad.cpu.core.levels import shipped

_building: Path | None = None


def build_into(folder: Path) -> None:
    """From now on, compiled kernels are written to a folder, whatever was compiled before."""
    global _building
    _building = folder


class KernelCache:
    """What Numba asks for the compiled code of one function."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name, self._kept = name, KeptKernels(name, function)
        self.cache_path = str(self._kept.folder)

    def flush(self) -> None:
        """Numba's, for functions that are compiled anew; what is kept here is never in the way."""

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The kernel for arguments of certain types, or None."""
        target.refresh()
        found = None
        if _building is None:
            found = self._load(signature, target)
        tell(self._name, signature, found is not None)
        if found is None and _building is None and ahead.has_compiled(self._name, signature):
            found = self._load(signature, target)
            if found is None:
                ahead.give_up()
        return found

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keeps it for later processes, or for an archive."""
        if _building is None:
            self._kept.write(signature, compiled._reduce())
        else:
            write_whole(_building / _member(self._name, signature), dumps(_in_short(compiled)))

    @property
    def keeps(self) -> bool:
        """Whether there is a folder for what is compiled."""
        return self._kept.folder is not None

    def has(self, signature: Any) -> bool:
        """Whether the kernel is shipped or kept."""
        there = shipped()
        is_shipped = there is not None and _member(self._name, signature) in there[1].NameToInfo
        return is_shipped or self._kept.has(signature)

    def _load(self, signature: Any, target: Any) -> Any:
        there, member = shipped(), _member(self._name, signature)
        if there is not None and member in there[1].NameToInfo:
            return CompileResult._rebuild(target, *pickle.loads(there[1].read(member)))
        parts = self._kept.read(signature)
        return None if parts is None else CompileResult._rebuild(target, *parts)


def _member(name: str, signature: Any) -> str:
    """The name of a kernel's code in an archive."""
    return f"{name}.{hashlib.sha256(repr(signature).encode()).hexdigest()[:16]}"


def _in_short(compiled: Any) -> tuple[Any, ...]:
    """What Numba keeps of a function, without its LLVM code, which no caller takes in, and without its types in words.

    That makes a third of it. LLVM wants to know which names the machine code defines: empty functions say so.
    """
    library, fndesc, *others = compiled._reduce()
    name, kind, (code, _) = library
    defined = (fndesc.llvm_func_name, fndesc.llvm_cpython_wrapper_name, fndesc.llvm_cfunc_wrapper_name)
    names = llvm.parse_assembly(str(_of_names(defined))).as_bitcode()
    others[4] = ""
    return ((name, kind, (code, names)), fndesc, *others)


def _of_names(names: tuple[str, ...]) -> ir.Module:
    module = ir.Module()
    for name in names:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), []), name)
        ir.IRBuilder(function.append_basic_block()).ret_void()
    return module
