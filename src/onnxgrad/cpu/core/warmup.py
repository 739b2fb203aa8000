"""Compiling ahead: many kernels in several processes, kept for later ones or put into an archive that is shipped."""

import importlib
import json
import pickle
import pkgutil
import tempfile
import uuid
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import groupby
from pathlib import Path

from onnxgrad.cpu.core.compilers import Compiler, Wanted
from onnxgrad.cpu.core.levels import ABOUT, SHIPPED, Level, made_by

LIST = SHIPPED / "kernels.pickle"  # what is shipped, for any machine to compile
TOGETHER = 4  # kernels of a module that one process compiles: they have functions in common
Told = Callable[[str, int], None]  # of a module, and how many kernels of it are there now


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
    groups = list(_groups(wanted))
    waiting = iter(groups)

    def work(process: Compiler) -> None:
        with process:
            process.wait_until_ready()
            for group in waiting:
                process.compile(group)
                told(group[0].module, len(group))

    started = [Compiler(environment, into, c_functions=True, log=None) for _ in range(min(processes, len(groups)))]
    with ThreadPoolExecutor(processes) as pool:
        jobs = [pool.submit(work, process) for process in started]
        try:
            for job in as_completed(jobs):
                job.result()
        except BaseException:  # Ctrl-C, too, need not wait for what is at hand
            for process in started:
                process.kill()
            raise


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


def import_kernels() -> None:
    """Imports every module of the CPU that has some."""
    import onnxgrad.cpu

    for module in pkgutil.walk_packages(onnxgrad.cpu.__path__, "onnxgrad.cpu."):
        importlib.import_module(module.name)


def load_kernels() -> None:
    """Makes all of them known, and compiles the C functions among them."""
    from onnxgrad.cpu.core.matmul import microkernel

    importlib.import_module("onnxgrad.runtime.native_op")
    import_kernels()
    microkernel.compile_all()
