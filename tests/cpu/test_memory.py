"""The memory of large results: pages that are used again, yet never by two results at once, nor by two processes."""

import subprocess
import sys
from unittest import mock

import numpy as np
import pytest

from onnxgrad import gather_elements_grad, gather_grad, slice_grad
from onnxgrad.cpu.core import memory

F32 = np.dtype(np.float32)
LARGE = memory.LARGE // 4 + 1000  # elements of float32 that make a result a large one


def calls():
    """Large results that are zero but for the first element, one per operator that can leave zeros unwritten."""
    one = np.ones(1, F32)
    return [
        lambda: slice_grad(one, [LARGE], [0], [1]),
        lambda: gather_grad([LARGE], [0], one),
        lambda: gather_grad([LARGE // 40, 40], [0], np.ones((1, 40), F32)),
        lambda: gather_elements_grad(one, [LARGE], [0]),
        lambda: slice_grad(one.astype(np.float16), [2 * LARGE], [0], [1]),
        lambda: gather_grad([2 * LARGE], [0], one.astype(np.float16)),
        lambda: gather_elements_grad(one.astype(np.float16), [2 * LARGE], [0]),
    ]


@pytest.mark.parametrize("call", range(len(calls())))
def test_used_pages_are_cleared(call):
    with mock.patch.object(memory, "_pages", memory._Pages()):
        for _ in range(3):
            result = calls()[call]()
            assert np.count_nonzero(result) == np.count_nonzero(result.reshape(-1)[:40]) > 0
            result.fill(np.nan)
            del result


def test_no_two_living_results_share_memory():
    with mock.patch.object(memory, "LARGE", 1), mock.patch.object(memory, "_pages", memory._Pages()):
        living = []
        for k in range(200):
            result = slice_grad(np.full(1, k + 1, F32), [500 + k], [0], [1])
            assert not any(np.shares_memory(result, other) for other, _ in living)
            living.append((result[::7], k + 1))  # a view alone keeps its pages
            if k % 3 == 0:
                del living[k % len(living)]
            del result
        for view, value in living:
            assert view[0] == value and not view[1:].any()


def test_what_waits_is_limited():
    pages = memory._Pages()
    with (
        mock.patch.object(memory, "LARGE", 1),
        mock.patch.object(memory, "_pages", pages),
        mock.patch.object(memory, "WAITING_LIMIT", 3 * memory.HUGE_PAGE),
    ):
        living = [slice_grad(np.ones(1, F32), [500], [0], [1]) for _ in range(10)]
        living.clear()
        assert 0 < sum(map(len, pages._waiting)) <= 3 * memory.HUGE_PAGE


def test_results_are_arrays_like_any_other():
    result = calls()[0]()
    assert type(result) is np.ndarray
    assert result.flags.c_contiguous and result.flags.writeable and result.flags.aligned
    assert result.ctypes.data % 64 == 0
    np.testing.assert_array_equal(result.copy(), result)


def run_script(script, timeout=60):
    """A script in a process of its own, which must end well and in silence."""
    opening = (
        "import gc, os, signal, sys, threading, time\nimport numpy as np, onnxgrad\n"
        "from onnxgrad.cpu.core import memory\n"
        f"count = {LARGE}\none = np.ones(1, np.float32)\ndef call():\n"
        "    return onnxgrad.slice_grad(one, [count], [0], [1])\n"
    )
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", opening + script]
    run = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert (run.returncode, run.stderr) == (0, ""), run.stdout + run.stderr
    return run.stdout


def test_pages_are_used_again_in_silence():
    output = run_script(
        "addresses = set()\nfor _ in range(5):\n    result = call()\n    addresses.add(result.ctypes.data)\n"
        "    del result\nprint(len(addresses))\nkept = call()\n"
    )
    assert output == "1\n"


def test_a_forked_child_writes_to_memory_of_its_own():
    run_script(
        "mine = call()\nspare = call()\ndel spare\n"
        "child = os.fork()\n"
        "if child == 0:\n    mine.fill(5)\n    theirs = call()\n    theirs.fill(6)\n    time.sleep(0.3)\n"
        "    os._exit(0 if (theirs == 6).all() and (mine == 5).all() else 7)\n"
        "time.sleep(0.1)\n"
        "other = call()\nother.fill(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
        "assert mine.sum() == 1 and (other == 7).all()\n"
    )


@pytest.mark.slow
def test_a_fork_while_another_thread_asks_for_memory():
    """The child has one thread; a lock that another one held would stay locked for ever."""
    run_script(
        "import contextlib\ncall()\n"
        "with getattr(memory._pages, '_lock', contextlib.nullcontext()):\n    child = os.fork()\n"
        "    if child == 0:\n        signal.alarm(10)\n        call()\n        os._exit(0)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
    )


@pytest.mark.slow
def test_the_garbage_collector_may_free_a_result_at_any_moment():
    """Also in the middle of freeing another one, on the same thread: a plain lock would wait for itself."""
    run_script(
        "class Untimely(list):\n"
        "    def append(self, pages):\n        super().append(pages)\n        gc.collect()\n"
        "gc.disable()\nsignal.alarm(10)\n"
        "memory._pages._waiting = Untimely()\n"
        "for _ in range(3):\n    cycle = [call()]\n    cycle.append(cycle)\n    del cycle\n"
        "result = call()\ndel result\nassert call().sum() == 1\n"
    )


def test_more_than_the_process_may_have_is_refused_with_a_sentence():
    output = run_script(
        "import resource\ncall()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))\n"
        "try:\n    onnxgrad.slice_grad(one, [2**31], [0], [1])\n"
        "except MemoryError as error:\n    print(error)\n"
    )
    assert output == "SliceGrad: the result of shape [2147483648] needs 8.0 GiB, more than there is\n"


def test_pages_that_wait_make_room_for_others():
    """Where `ulimit -v` says how many there may be."""
    code = """
import resource
from pathlib import Path
import numpy as np
from onnxgrad.cpu.core import memory

used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
memory.WAITING_LIMIT = 1 << 30
resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20,) * 2)
for size in (150, 250):
    array, _ = memory.allocate((size * 2**20,), np.dtype(np.uint8))
    del array
print("done")
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.stdout == "done\n", found.stderr
