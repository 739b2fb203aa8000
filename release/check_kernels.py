"""Disassembles the kernels of an installed wheel: instructions of their level alone, and Python's stable interface.

`make dist` runs it with the Python of an environment that has the wheel. objdump and nm are of binutils.
"""

import json
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from onnxgrad.cpu.core.levels import ABOUT, LEVELS, Level

NEWER = (  # than AVX-512 as x86-64-v4 has it, and not of bfloat16 either
    r"vpdp(bus|wss)|vperm[it]?2?b\b|vpmultishift|vpopcnt|vpsh[lr]d|vp(compress|expand)[bw]\b|vpmadd52|gf2p8|vp2intersect"
    r"|vaes|sha\d"
)
BFLOAT16 = r"v\w+bf16\w*"
AVX512 = r".*(%zmm|%k[0-7]\b|%[xy]mm(1[6-9]|2\d|3[01])\b)"
AMX = r"tile|tdp|ldtilecfg|sttilecfg"
BEYOND = {
    "avx2": re.compile(f"{AVX512}|{BFLOAT16}|{AMX}|{NEWER}"),
    "avx512": re.compile(f"{BFLOAT16}|{AMX}|{NEWER}"),
    "avx512-bf16": re.compile(NEWER),
}
# What kernels call of Python: all of its stable interface, and so the same in every version.
STABLE = {
    "PyArg_UnpackTuple", "PyBytes_FromStringAndSize", "PyErr_Clear", "PyErr_Format",
    "PyErr_Occurred", "PyErr_SetNone", "PyErr_SetString", "PyErr_WriteUnraisable",
    "PyEval_RestoreThread", "PyEval_SaveThread", "PyExc_MemoryError", "PyExc_OverflowError",
    "PyExc_RuntimeError", "PyExc_StopIteration", "PyExc_SystemError", "PyExc_TypeError",
    "PyExc_ValueError", "PyFloat_AsDouble", "PyFloat_FromDouble", "PyBool_FromLong",
    "PyList_New", "PyLong_AsLongLong", "PyLong_AsUnsignedLongLong", "PyLong_FromLongLong",
    "PyLong_FromUnsignedLongLong", "PyNumber_Float", "PyNumber_Long", "PyObject_CallFunctionObjArgs",
    "PyObject_GetAttrString", "PyObject_IsTrue", "PyTuple_GetItem", "PyTuple_New",
    "PyTuple_SetItem", "PyTuple_Size", "PyUnicode_FromString", "Py_DecRef",
    "Py_IncRef", "_Py_NoneStruct",
}  # fmt: skip


def main() -> int:
    if not all(map(shutil.which, ("objdump", "nm"))):
        print("objdump and nm are not here: what is in the kernels was not looked at")
        return 0
    wrong = [sentence for level in LEVELS for sentence in _wrong_in(level)]
    print("\n".join(wrong))
    return int(bool(wrong))


def _wrong_in(level: Level) -> Iterator[str]:
    with zipfile.ZipFile(level.archive) as archive, tempfile.NamedTemporaryFile() as file:
        about = json.loads(archive.read(ABOUT))
        names = [name for name in archive.namelist() if name != ABOUT]
        for name in names:
            Path(file.name).write_bytes(pickle.loads(archive.read(name))[0][2][0])
            lines = _output("objdump", "-d", "--no-show-raw-insn", file.name).splitlines()
            instructions = [line.split("\t", 1)[1] for line in lines if "\t" in line]
            found = sorted({text.split()[0] for text in instructions if BEYOND[level.name].match(text)})
            if found:
                yield f"{level.name}: {name} has {', '.join(found)}"
            called = {line.split()[-1] for line in _output("nm", "-u", file.name).splitlines()}
            unknown = sorted(symbol for symbol in called - STABLE if symbol.lstrip("_").startswith("Py"))
            if unknown:
                yield f"{level.name}: {name} calls {', '.join(unknown)}, which Python may change"
    print(f"{level.name}: {len(names)} kernels, {level.archive.stat().st_size / 1e6:.1f} MB, made by {about['numba']}")


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
