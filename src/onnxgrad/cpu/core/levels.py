"""The classes of processors that kernels are shipped for, and which of them this processor belongs to.

Machine code made for the very processor runs on few others. What is shipped is made for a level: the instructions that
all processors of a class have.
"""

import functools
import hashlib
import io
import json
import os
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numba

PACKAGE = Path(__file__).parents[2]
SHIPPED = PACKAGE / "_kernels"  # an archive for each level, which `make kernels` writes
SOURCES = ("cpu/**/*.py", "runtime/**/*.py", "ops/**/*.py")  # numbers of ops/ are compiled in, too
ABOUT = "about.json"  # the member of an archive that says what it was made by


class Level(NamedTuple):
    """A class of processors: its name, the one that LLVM knows, and all instructions that kernels ask for by name."""

    name: str
    cpu: str
    required: frozenset[str]
    used_if_there: frozenset[str] = frozenset()  # by kernels that are chosen where the processor has them

    @property
    def features(self) -> frozenset[str]:
        return self.required | self.used_if_there

    @property
    def environment(self) -> dict[str, str]:
        """The settings with which a process of Numba's compiles for this level, on any x86-64 processor."""
        features = ",".join(f"+{feature}" for feature in sorted(self.features))
        return {"NUMBA_CPU_NAME": self.cpu, "NUMBA_CPU_FEATURES": features, "NUMBA_DISABLE_INTEL_SVML": "1"}

    @property
    def archive(self) -> Path:
        return SHIPPED / f"{self.name}.zip"


_AVX2 = frozenset(("64bit", "avx", "avx2", "bmi", "bmi2", "cx16", "f16c", "fma", "lzcnt", "movbe", "popcnt", "sse4.2"))
_AVX512 = _AVX2 | {f"avx512{part}" for part in ("f", "bw", "cd", "dq", "vl")}
_TILES = frozenset(("amx-tile", "amx-bf16"))
LEVELS = (
    Level("avx2", "x86-64-v3", _AVX2),
    Level("avx512", "x86-64-v4", _AVX512),
    Level("avx512-bf16", "x86-64-v4", _AVX512 | {"avx512bf16"}, _TILES),
)


@functools.cache
def source_stamp() -> bytes:
    """A hash of every kernel file.

    Numba forgets a cached function when its own file changes. Kernels here are built from functions of other files,
    so one changed file makes all of them stale.
    """
    digest = hashlib.sha256()
    for path in sorted({path for pattern in SOURCES for path in PACKAGE.glob(pattern)}):
        digest.update(path.read_bytes())
    return digest.digest()


def made_by() -> dict[str, str]:
    """All that has to be the same where compiled code is used as where it was made, but for the processor.

    Of Python it is not the version: kernels call functions of its stable interface alone, as release/check.py sees to.
    A Python without its lock has other objects.
    """
    return {
        "sources": source_stamp().hex(),
        "numba": numba.__version__,
        "python": sys.implementation.name + sys.abiflags,
        "system": llvm.get_process_triple(),
    }


@functools.cache
def host_features() -> frozenset[str]:
    """What the processor at hand has, in LLVM's words."""
    found: Any = llvm.get_host_cpu_features()
    return frozenset(name for name, has in found.items() if has)


def level_of(features: Iterable[str]) -> Level | None:
    """The highest level that a processor belongs to."""
    fitting = [level for level in LEVELS if level.required <= set(features)]
    return fitting[-1] if fitting else None


@functools.cache
def shipped() -> tuple[Level, zipfile.ZipFile] | None:
    """This processor's level and its archive, if that is there and was made from these very sources.

    Numba's settings for another processor leave it alone, and so does ONNXGRAD_SHIPPED_KERNELS=0.
    """
    if {"NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"} & set(os.environ) or os.environ.get("ONNXGRAD_SHIPPED_KERNELS") == "0":
        return None
    level = level_of(host_features())
    if level is None or not level.archive.is_file():
        return None
    archive = zipfile.ZipFile(io.BytesIO(level.archive.read_bytes()))  # forked processes share the place in a file
    return (level, archive) if json.loads(archive.read(ABOUT)) == made_by() else None


def has_feature(name: str) -> bool:
    """Whether kernels may use certain instructions.

    They may use those of the processor at hand, unless NUMBA_CPU_FEATURES names others. Where kernels are shipped, they
    keep to those of their level: one that is compiled here has to agree with the others in the width of its vectors.
    """
    chosen = os.environ.get("NUMBA_CPU_FEATURES")
    if chosen is not None:
        return f"+{name}" in chosen.split(",")
    found = shipped()
    return name in host_features() and (found is None or name in found[0].features)
