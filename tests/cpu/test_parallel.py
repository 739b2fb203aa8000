"""Tasks for which there is no memory: the kernel says so, instead of leaving their part of the result unwritten."""

import numpy as np
import pytest
from tests.checks import on_threads, raises

from onnxgrad.cpu.core.jit import native
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.threads import launch


@native
def _fill(number, sizes, found):
    room = np.empty(sizes[number], np.uint8)
    found[number] = room.size


@native
def _fill_all(sizes, found, scheduler):
    parallel(scheduler, sizes.size, _fill, (sizes, found))
    return 5


@pytest.mark.parametrize("threads", [1, 2])
def test_a_task_without_memory_fails_the_kernel(threads):
    sizes, found = np.arange(8), np.full(8, -1)
    with on_threads(threads):
        assert launch(_fill_all, sizes, found, bytes_touched=1) == 5
        np.testing.assert_array_equal(found, sizes)
        sizes[3], found[:] = 2**50, -1
        with raises(MemoryError, "there was not enough memory to run it"):
            launch(_fill_all, sizes, found, bytes_touched=1)
    np.testing.assert_array_equal(np.delete(found, 3), np.delete(sizes, 3))  # the others are done
