"""Compiling ahead: many kernels in several processes, kept for later ones or put into an archive that is shipped."""

import importlib
import json
import multiprocessing
import os
import pickle
import pkgutil
import tempfile
import uuid
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from onnxgrad.cpu.core.levels import ABOUT, SHIPPED, Level, made_by

LIST = SHIPPED / "kernels.pickle"  # what is shipped, for any machine to compile
TOGETHER = 4  # kernels of a module that one process compiles: they have functions in common
Told = Callable[[str, int], None]  # of a module, and how many kernels of it are there now


class Wanted(NamedTuple):
    """A kernel to compile: its name, the types of its arguments, and instructions that a processor may be without."""

    name: str
    types: Any
    needs: frozenset[str] = frozenset()

    @property
    def module(self) -> str:
        return self.name.split("-")[0].rpartition(".")[0].removeprefix("onnxgrad.")


def read_list() -> list[Wanted]:
    """The kernels that this installation of onnxgrad was built with."""
    if not LIST.is_file():
        raise FileNotFoundError(
            f"warmup: this onnxgrad has no list of kernels ({LIST} does not exist), as wheels have; "
            "in a checkout, `make kernels` writes it"
        )
    found: list[Wanted] = pickle.loads(LIST.read_bytes())
    return found


def compile_all(
    wanted: Sequence[Wanted], processes: int, told: Told, environment: Mapping[str, str] = {}, into: Path | None = None
) -> None:
    """Compiles them in processes of their own, which have these variables in their environment."""
    with _variables(environment):
        pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin, (into,))
        try:
            jobs = {pool.submit(_compile, group): group for group in _groups(wanted)}
            for job in as_completed(jobs):
                job.result()
                told(jobs[job][0].module, len(jobs[job]))
        finally:
            pool.shutdown(cancel_futures=True)


def build_archive(level: Level, wanted: Iterable[Wanted], processes: int, told: Told) -> None:
    """Compiles for a level, on a processor of whatever level, what its processors can run."""
    fitting = [kernel for kernel in wanted if kernel.needs <= level.features]
    about = json.dumps(made_by())  # now: the sources may change meanwhile
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compile_all(fitting, processes, told, level.environment, folder)
        level.archive.parent.mkdir(parents=True, exist_ok=True)
        unfinished = level.archive.with_name(f".{uuid.uuid4().hex}")
        with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            archive.writestr(ABOUT, about)
            for path in sorted(folder.iterdir()):
                archive.write(path, path.name)
        unfinished.replace(level.archive)


def _groups(wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    ordered = sorted(wanted, key=lambda kernel: (kernel.module, kernel.name))
    for _, group in groupby(ordered, lambda kernel: kernel.module):
        kernels = list(group)
        yield from (kernels[first : first + TOGETHER] for first in range(0, len(kernels), TOGETHER))


@contextmanager
def _variables(environment: Mapping[str, str]) -> Iterator[None]:
    """Sets them for the processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def _begin(into: Path | None) -> None:
    """In a new process: makes all kernels known by their names, which compiles the C functions among them."""
    from onnxgrad.cpu.core import kernel_cache

    if into is not None:
        kernel_cache.build_into(into)
    load_kernels()


def load_kernels() -> None:
    """Imports every module that has some."""
    import onnxgrad.cpu
    from onnxgrad.cpu.core.matmul import microkernel

    importlib.import_module("onnxgrad.runtime.native_op")
    for module in pkgutil.walk_packages(onnxgrad.cpu.__path__, "onnxgrad.cpu."):
        importlib.import_module(module.name)
    microkernel.compile_all()


def _compile(group: Iterable[Wanted]) -> None:
    from onnxgrad.cpu.core.jit import KERNELS

    for kernel in group:
        KERNELS[kernel.name].compile(kernel.types)
