"""Kernels that are compiled ahead for a level of processors run on them, and are left alone where they do not fit."""

import json
import os
import pickle
import subprocess
import sys
import threading
import zipfile
from collections import Counter

import numpy as np
import pytest
from click.testing import CliRunner
from tests.ship_kernels import launched

from onnxgrad.cli import main
from onnxgrad.cpu.core import levels, warmup
from onnxgrad.cpu.core.compiling import asked_for, tell
from onnxgrad.cpu.core.levels import LEVELS
from onnxgrad.cpu.core.recording import record
from onnxgrad.cpu.core.warmup import Wanted
from onnxgrad.ops.activation import relu_grad
from onnxgrad.ops.slice import slice_grad
from onnxgrad.train.progress import Progress

AVX2, AVX512, BF16 = LEVELS


@pytest.fixture
def host(monkeypatch, tmp_path):
    """Sets what the processor has, and gives the folder where kernels would be shipped."""

    def set_features(features):
        monkeypatch.setattr(levels, "host_features", lambda: frozenset(features))

    for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "ONNXGRAD_SHIPPED_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(levels, "SHIPPED", tmp_path)
    levels.shipped.cache_clear()
    yield set_features
    levels.shipped.cache_clear()


def archive_for(level, **changes):
    with zipfile.ZipFile(level.archive, "w") as archive:
        archive.writestr(levels.ABOUT, json.dumps(levels.made_by() | changes))


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (AVX2.required, AVX2),
        (AVX2.required | {"avx512f"}, AVX2),  # the first Xeon Phi
        (AVX512.required, AVX512),
        (BF16.required | {"sse4a"}, BF16),  # Zen 4 has no AMX
        (BF16.features, BF16),
        (AVX2.required - {"fma"}, None),
    ],
)
def test_the_level_of_a_processor(features, expected):
    assert levels.level_of(features) is expected


def test_kernels_keep_to_the_instructions_of_the_level_that_is_shipped(host):
    host(BF16.features | {"avx512vnni"})
    assert levels.shipped() is None and levels.has_feature("avx512vnni")
    archive_for(BF16)
    levels.shipped.cache_clear()
    assert levels.shipped()[0] is BF16
    assert levels.has_feature("amx-tile") and not levels.has_feature("avx512vnni")


def test_amx_is_used_where_the_processor_has_it(host):
    host(BF16.required)
    archive_for(BF16)
    assert levels.shipped()[0] is BF16 and not levels.has_feature("amx-tile")


@pytest.mark.parametrize("what", ["sources", "numba", "python", "system"])
def test_kernels_of_other_sources_or_versions_are_left_alone(host, what):
    host(AVX2.features)
    archive_for(AVX2, **{what: "another"})
    assert levels.shipped() is None


@pytest.mark.parametrize(
    ("name", "value"), [("NUMBA_CPU_NAME", "generic"), ("NUMBA_CPU_FEATURES", ""), ("ONNXGRAD_SHIPPED_KERNELS", "0")]
)
def test_they_can_be_left_alone(host, monkeypatch, name, value):
    host(AVX2.features)
    archive_for(AVX2)
    monkeypatch.setenv(name, value)
    assert levels.shipped() is None


def test_what_is_compiled_is_told_and_what_is_found_is_not(capsys):
    with Progress(quiet=False) as progress, asked_for(progress.tell_of_kernel):
        tell("onnxgrad.cpu.slice._lay-161", (), True)
        assert capsys.readouterr().err == ""
        tell("onnxgrad.cpu.slice._lay-161", (), False)
        tell("onnxgrad.cpu.gather._rows-1", (), False)
    assert capsys.readouterr().err == "compiling kernels for this machine, once\n"


def test_an_installation_without_a_list(monkeypatch, tmp_path):
    monkeypatch.setattr(warmup, "LIST", tmp_path / "none")
    result = CliRunner().invoke(main, ["warmup"])
    assert result.exit_code == 2
    assert result.stderr == (
        f"onnxgrad: warmup: this onnxgrad has no list of kernels ({warmup.LIST} does not exist), as wheels have; "
        "in a checkout, `make kernels` writes it\n"
    )


SCRIPT = """
import sys
from pathlib import Path
import numba.core.compiler
import numpy as np
from onnxgrad.cpu.core import levels
level = levels.LEVELS[int(sys.argv[1])]
levels.SHIPPED, levels.host_features = Path(sys.argv[2]), lambda: level.features
assert levels.shipped()[0] is level
def refuse(*args, **kwargs):
    raise AssertionError("this compiles")
numba.core.compiler.compile_extra = refuse
import onnxgrad
numbers = np.arange(-3, 3, dtype=np.float32)
assert onnxgrad.relu_grad(numbers, numbers).tolist() == [0, 0, 0, 0, 1, 2]
assert onnxgrad.slice_grad(numbers[:2], [5], [0], [5], [0], [3]).tolist() == [-3, 0, 0, -2, 0]
try:
    onnxgrad.relu_grad(numbers.astype(np.float64), numbers.astype(np.float64))
except AssertionError as error:
    print(error)
"""


@pytest.mark.slow
def test_shipped_kernels_run_without_compiling(monkeypatch, tmp_path):
    """For two levels, in processes that cannot compile; a type that is not shipped would be compiled."""
    numbers = np.arange(-3, 3, dtype=np.float32)
    with record() as recording:
        relu_grad(numbers, numbers)
        slice_grad(numbers[:2], [5], [0], [5], [0], [3])
    asked = list(launched(recording))
    assert [kernel.module for kernel in asked] == ["cpu.core.elementwise", "cpu.slice"]
    monkeypatch.setattr(levels, "SHIPPED", tmp_path)
    for number, level in enumerate((AVX2, AVX512)):
        told = Counter()
        warmup.build_archive(level, [*asked, Wanted("none", (), frozenset({"amx-tile"}))], 1, told.__setitem__)
        assert told == {"cpu.core.elementwise": 1, "cpu.slice": 1}
        if not level.required <= levels.host_features():
            continue
        environment = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA")}
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(number), str(tmp_path)],
            env=environment | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (run.returncode, run.stdout) == (0, "this compiles\n"), run.stderr


WARMUP = """
import sys
from pathlib import Path
from onnxgrad.cli import main
from onnxgrad.cpu.core import warmup
if __name__ == "__main__":
    warmup.LIST = Path(sys.argv.pop())
    main()
"""


@pytest.mark.slow
def test_warmup_leaves_kernels_for_later_processes(tmp_path):
    with record() as recording:
        slice_grad(np.ones(2, np.float32), [5], [0], [5], [0], [3])
    (tmp_path / "list").write_bytes(pickle.dumps(list(launched(recording))))
    (tmp_path / "warm.py").write_text(WARMUP)
    run = subprocess.run(
        [sys.executable, str(tmp_path / "warm.py"), "warmup", str(tmp_path / "list")],
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "ONNXGRAD_SHIPPED_KERNELS": "0"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    told = "1 kernels, of which those that are not there for this machine yet are compiled\nall kernels are ready\n"
    assert (run.returncode, run.stderr) == (0, told)
    assert [*(tmp_path / "cache").rglob("slice._lay-*.nbc")]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ChildProcessError("a process was ended")])
def test_a_warmup_that_ends_waits_for_no_kernel(monkeypatch, error):
    killed = threading.Event()

    class Compiling:
        """Of two processes the first one has a kernel at hand when the other one fails, or Ctrl-C comes."""

        started = 0

        def __init__(self, *args, **settings):
            Compiling.started += 1
            self.is_first = Compiling.started == 1

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def wait_until_ready(self):
            pass

        def compile(self, kernels):
            if not self.is_first:
                raise error
            assert killed.wait(60)

        def kill(self):
            killed.set()

    monkeypatch.setattr(warmup, "Compiler", Compiling)
    kernels = [Wanted(f"onnxgrad.cpu.{module}.kernel-1", ()) for module in "abcdef"]
    with pytest.raises(type(error)):
        warmup.compile_all(kernels, 2, lambda module, count: None)
    assert killed.is_set()
