"""Groups of processes that AllReduceSum adds up over: a number for each, and a C function that calls what adds up."""

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from onnxgrad.tensor_types import Array

Reduce = Callable[[Array], None]  # adds up over the group, in place
ALONE = 0  # the group of the process itself
_groups: dict[int, Reduce] = {}
_numbers = itertools.count(1)


def join(reduce: Reduce) -> int:
    """The number of a new group. `reduce` must not raise: it is called by native code."""
    number = next(_numbers)
    _groups[number] = reduce
    return number


def leave(number: int) -> None:
    """Forgets a group."""
    _groups.pop(number, None)


@ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)
def _add_up(group: int, address: int, count: int, itemsize: int) -> int:
    kind: Any = ctypes.c_float if itemsize == 4 else ctypes.c_double
    _groups[group](np.ctypeslib.as_array((kind * count).from_address(address)))
    return 0


def address_of(group: int) -> int:
    """That of the C function (group, address, count, size of each number) for a group; 0 for a process alone."""
    if group == ALONE:
        return 0
    if group not in _groups:
        raise ValueError(f"group is {group}, which this process is not in")
    return ctypes.cast(_add_up, ctypes.c_void_p).value or 0
