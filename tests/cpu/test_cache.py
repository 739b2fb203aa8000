"""Compiled kernels are kept on disk: a second process compiles nothing, wherever the package is installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
PACKAGE = Path(__file__).parents[2] / "src" / "onnxgrad"
SCRIPT = """
import sys
from pathlib import Path
import numpy as np
import onnxgrad
from numba.core import event
assert Path(onnxgrad.__file__).parents[1] == Path(sys.argv[1]), onnxgrad.__file__
ones = np.ones((4, 3), np.float32)
with event.install_recorder("numba:compile") as compiled:
    if "slice" in sys.argv:
        assert onnxgrad.slice_grad(ones[0, :2], [5], [0], [5], [0], [3]).tolist() == [1, 0, 0, 1, 0]
    if "gather" in sys.argv:
        dX = onnxgrad.gather_grad([4, 3], [0, 1, -1, 3], ones)
        assert dX.tolist() == [[1] * 3, [1] * 3, [0] * 3, [2] * 3]
        assert onnxgrad.gather_elements_grad(ones, [4, 3], np.zeros((4, 3), np.int64))[0].tolist() == [4] * 3
        assert onnxgrad.broadcast_gradient_args([2, 3], [3])[1].tolist() == [0]
    if "gru" in sys.argv:
        X, W, R = ones.reshape(2, 2, 3), np.ones((1, 6, 3), np.float32), np.ones((1, 6, 2), np.float32)
        HAll, HFinal, ZRH = onnxgrad.gru_training(X, W, R)
        onnxgrad.gru_grad(X, W, R, None, None, None, HAll, ZRH, HAll)
print(len(compiled.buffer))
"""


def compiles(package_parent, *calls, **environment):
    """How many functions a fresh process compiles for these calls."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA", "XDG", "PYTHON"))}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(package_parent), *calls],
        env={**inherited, "PYTHONPATH": str(package_parent), "PYTHONDONTWRITEBYTECODE": "1", **environment},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


def kept(folder):
    """Every file of machine code below a folder, and when it was written."""
    return {path: path.stat().st_mtime_ns for path in Path(folder).rglob("*.nbc")}


def test_a_second_process_compiles_nothing(tmp_path):
    assert compiles(PACKAGE.parent, "slice", "gather", NUMBA_CACHE_DIR=str(tmp_path)) > 0
    first = kept(tmp_path)
    assert first
    assert compiles(PACKAGE.parent, "slice", "gather", NUMBA_CACHE_DIR=str(tmp_path)) == 0
    assert kept(tmp_path) == first


def test_by_default_kernels_are_kept_beside_their_source():
    """Here GRU takes part too: other tests leave it compiled, so it costs no second time."""
    compiles(PACKAGE.parent, "slice", "gather", "gru")
    before = kept(PACKAGE)
    assert {"gather", "gather_elements", "slice", "gru_forward", "gru_backward"} <= {
        p.name.split(".")[0] for p in before
    }
    assert compiles(PACKAGE.parent, "slice", "gather", "gru") == 0


@pytest.fixture
def sealed_package(tmp_path):
    """A copy of the package where nothing can be written: a file stands where each __pycache__ would be.

    Taking away the right to write would not stop root.
    """
    copy = tmp_path / "installed" / "onnxgrad"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in [copy, *(p for p in copy.rglob("*") if p.is_dir())]:
        (folder / "__pycache__").write_text("")
    return copy.parent


def test_a_read_only_installation_uses_the_users_cache_folder(sealed_package, tmp_path):
    user = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path / "home")}
    assert compiles(sealed_package, "slice", **user) > 0
    assert kept(tmp_path / "cache") or kept(tmp_path / "home")
    assert compiles(sealed_package, "slice", **user) == 0


def test_with_nowhere_to_write_every_process_compiles(sealed_package, tmp_path):
    (tmp_path / "file").write_text("")
    nowhere = {"XDG_CACHE_HOME": str(tmp_path / "file" / "cache"), "HOME": str(tmp_path / "file" / "home")}
    assert compiles(sealed_package, "slice", **nowhere) > 0
    assert not kept(tmp_path)


def test_a_changed_kernel_file_makes_every_kept_kernel_stale(tmp_path):
    copy = tmp_path / "installed" / "onnxgrad"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    first = compiles(copy.parent, "slice")
    assert first > 0 and compiles(copy.parent, "slice") == 0
    halves = copy / "cpu" / "core" / "halves.py"
    halves.write_text(halves.read_text() + "\n# changed\n")
    assert compiles(copy.parent, "slice") == first


LAYOUTS = """
import sys
import numpy as np
from numba.core.dispatcher import Dispatcher
from onnxgrad import gather_elements_grad, gather_grad, gru_grad, gru_training, slice_grad
from tests.checks import layouts
from tests.gru_cases import case
given = case(dtype=np.float32, lengths=True)
backward = given.backward()
dY, indices = np.ones((4, 3), np.float32), np.zeros((4, 3), np.int64)
calls = [
    lambda lay: gather_grad([5, 3], lay(indices[:, 0]), lay(dY)),
    lambda lay: gather_elements_grad(lay(dY), [5, 3], lay(indices)),
    lambda lay: slice_grad(lay(dY), [5, 3], [0], [4]),
    lambda lay: gru_training(*map(lay, given.forward)),
    lambda lay: gru_grad(*map(lay, backward)),
]
def versions():
    modules = [m for name, m in sys.modules.items() if name.startswith("onnxgrad.cpu")]
    found = {id(f): f for m in modules for f in vars(m).values() if isinstance(f, Dispatcher)}
    return sum(len(f.signatures) for f in found.values())
for layout in ["contiguous", *layouts(dY)]:
    before = versions()
    for call in calls:
        call(lambda array: layouts(array)[layout])
    print(layout, versions() - before)
"""


def test_no_layout_of_an_input_needs_a_kernel_of_its_own():
    """A version for read-only or unaligned arrays would take seconds to compile, at a call like any other."""
    command = [sys.executable, "-c", LAYOUTS]
    run = subprocess.run(command, cwd=PACKAGE.parents[1], capture_output=True, text=True, check=True)
    first, *others = run.stdout.splitlines()
    assert int(first.split()[1]) > 0
    assert [line for line in others if not line.endswith(" 0")] == []
