"""The kernels of all sessions, as Python knows them: a node, its memory, and the plans made for it."""

import ctypes
import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from onnxgrad.runtime.api import Api
from onnxgrad.tensor_types import Array


class Node(NamedTuple):
    """One node of a graph, as its kernel knows it."""

    op: Any  # an Op, or fused.FusedElementwise
    name: str
    dtypes: tuple[np.dtype[Any], ...]  # of its inputs
    attributes: dict[str, Any]
    wanted: tuple[bool, ...]  # which outputs it has


@dataclass
class Kernel:
    """`memory` is a layout.KERNEL, whose address onnxruntime has."""

    node: Node
    api: Api
    memory: Array
    plans: list[Any] = field(default_factory=list)
    # Plans past the limit are for one run, which gives them back; by their addresses.
    passing_plans: dict[int, Any] = field(default_factory=dict)
    # On CUDA: what was found out about inputs that look the same, and the memory pools of its session's streams.
    calls: dict[Any, Any] = field(default_factory=dict)
    pools: dict[int, Any] = field(default_factory=dict)


def outlive_python(thing: Any) -> None:
    """Keeps something whose address onnxruntime has: a session that is in a cycle ends after Python's modules have."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _let_go(thing: Any) -> None:
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(thing))


lock = threading.RLock()
_kernels: dict[int, Kernel] = {}
_numbers = iter(range(1, 2**62))
FEW = 256  # kernels that are not worth looking through
_most = FEW  # kernels before the next look: twice as many as the last one left, so that adding n takes n steps


def add(kernel: Kernel) -> int:
    """Gives a kernel its number, and forgets those of sessions that are gone, once there are many."""
    global _most
    with lock:
        if len(_kernels) >= _most:
            for gone in [n for n, k in _kernels.items() if k.memory["dropped"]]:
                _let_go(_kernels.pop(gone).memory)
            _most = max(FEW, 2 * len(_kernels))
        number = next(_numbers)
        outlive_python(kernel.memory)
        _kernels[number] = kernel
    return number


def nodes() -> dict[str, Node]:
    """Those of open sessions by their names; where several have one, that of the last session."""
    with lock:
        return {kernel.node.name: kernel.node for kernel in _kernels.values() if not kernel.memory["dropped"]}


def find(number: int) -> Kernel:
    """The kernel of that number."""
    return _kernels[number]
