"""Where compiled kernels are looked for: those shipped with the package, then those that this machine has kept."""

import hashlib
import pickle
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core.caching import FunctionCache, NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from onnxgrad.cpu.core.compiling import tell
from onnxgrad.cpu.core.levels import shipped, source_stamp

_building: Path | None = None


def build_into(folder: Path) -> None:
    """From now on, compiled kernels are written to a folder, whatever was compiled before."""
    global _building
    _building = folder


class KernelCache:
    """What Numba asks for the compiled code of one function."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name, self._kept = name, _kept_by_numba(function)
        self.cache_path, self.flush = self._kept.cache_path, self._kept.flush

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The kernel for arguments of certain types, or None."""
        target.refresh()
        found = None
        if _building is None:
            found = self._load_shipped(signature, target)
            if found is None:
                found = self._kept.load_overload(signature, target)
        tell(self._name, signature, found is not None)
        return found

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keeps it for later processes, or for an archive."""
        if _building is None:
            self._kept.save_overload(signature, compiled)
        else:
            _write(_building / _member(self._name, signature), dumps(_in_short(compiled)))

    def _load_shipped(self, signature: Any, target: Any) -> Any:
        there = shipped()
        member = _member(self._name, signature)
        if there is None or member not in there[1].NameToInfo:
            return None
        return CompileResult._rebuild(target, *pickle.loads(there[1].read(member)))


def _kept_by_numba(function: Callable[..., Any]) -> Any:
    """In __pycache__ or, where that is read-only, in the user's cache folder."""
    try:
        kept = FunctionCache(function)
    except RuntimeError:  # no folder can be written: what is not shipped is compiled in every process
        return NullCache()
    there = shipped()  # kernels that are compiled here agree with those that are shipped
    kept._cache_file._source_stamp = source_stamp() + (there[0].name.encode() if there else b"")
    return kept


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


def _write(path: Path, content: bytes) -> None:
    """Several processes may write the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{uuid.uuid4().hex}")
    unfinished.write_bytes(content)
    unfinished.replace(path)
