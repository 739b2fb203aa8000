"""The tool itself: it finds what is planted, says which call it was, and calls nothing twice in two ways."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.fuzz.calls import draw_call, operators
from tests.fuzz.draw import Draw
from tests.fuzz.families import draw_calls
from tests.fuzz.guarded import empty, in_order, read_only

from onnxgrad.arguments import to_arrays

ROOT = Path(__file__).parents[2]

# Seven ways to do wrong in place of a kernel, each in a process of its own, as some of them end it.
PLANTED = {
    "reads past the end": ("ctypes.string_at(dY.ctypes.data + dY.nbytes + 4096, 1)", "Segmentation fault"),
    "reads before the start": ("ctypes.string_at(dY.ctypes.data - 8192, 1)", "Segmentation fault"),
    "writes past the end": ("ctypes.memset(dX.ctypes.data + dX.nbytes + 4096, 0, 1)", "Segmentation fault"),
    "writes to an input": ("ctypes.memset(dY.ctypes.data, 0, max(1, dY.nbytes))", "Segmentation fault"),
    "raises what it must not": ("raise KeyError('x')", "KeyError"),
    "raises no sentence": ("np.empty(3).reshape(2)", "cannot reshape array"),
    "leaves the result as it was": ("pass", "dX"),
}
PROGRAM = """
import ctypes, sys
import numpy as np
from tests.fuzz import child
from onnxgrad.op import OPERATORS
from onnxgrad.ops import load_operators

load_operators()

def planted(dY, X, dX):
    {line}

OPERATORS["ReluGrad"]._kernels["cpu"] = planted
OPERATORS["ReluGrad"]._asked_for["cpu"] = frozenset()
child.SESSIONS = 0
child.main(0, 40, 60, "ReluGrad", sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", PLANTED)
def test_what_is_planted_is_found(what, tmp_path):
    line, text = PLANTED[what]
    status = tmp_path / "status"
    status.write_bytes(bytes(16))
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(line=line), str(status)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert text in found.stdout + found.stderr
    if found.returncode:  # it says which call it was
        assert str(draw_call(operators("ReluGrad")[0], int.from_bytes(status.read_bytes()[:8], "little")))


@pytest.mark.parametrize("op", operators(), ids=lambda op: op.name)
def test_a_number_always_stands_for_the_same_call(op):
    one, other = (draw_call(op, 7) for _ in range(2))
    assert str(one) == str(other)
    for a, b in zip(one.inputs, other.inputs, strict=True):
        assert type(a) is type(b)
        assert not isinstance(a, np.ndarray) or (a.tobytes() == b.tobytes() and a.strides == b.strides)


@pytest.mark.parametrize("op", operators(), ids=lambda op: op.name)
def test_drawn_calls_are_right_calls(op):
    for seed in range(20):
        drawn = draw_calls(op, Draw(seed))
        arrays = to_arrays(op.inputs, drawn.make_inputs())
        op.checked_shapes(arrays, {a.name: drawn.attributes.get(a.name, a.default) for a in op.attributes})


def test_arrays_lie_against_their_guards():
    for at_end in (False, True):
        array = empty((3, 5), np.dtype(np.float64), at_end, 0xFF)
        edge = array.ctypes.data + (array.nbytes if at_end else 0)
        assert edge % 4096 == 0 and np.isnan(array).all()


@pytest.mark.parametrize("steps", [(1, 1, 1), (2, 1, 3), (-1, 1, -2)])
def test_arrays_hold_their_values_in_any_layout(steps):
    values = np.arange(24.0).reshape(2, 3, 4)
    array = read_only(values, True, in_order(values.shape, (2, 0, 1), steps))
    assert (array == values).all() and not array.flags.c_contiguous
