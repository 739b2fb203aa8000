"""AllReduceSum on the CPU: a copy, which the group of processes then adds up in place."""

from onnxgrad.cpu.core.c_calls import invoke
from onnxgrad.cpu.core.groups import address_of
from onnxgrad.cpu.core.halves import flat
from onnxgrad.cpu.core.jit import native
from onnxgrad.cpu.core.threads import launch
from onnxgrad.tensor_types import Array


def all_reduce_sum(data: Array, reduced: Array, group: int) -> None:
    work = (flat(data), flat(reduced), address_of(group), group)
    launch(_add_up, *work, bytes_touched=0)  # whatever time it takes, threads are no help


@native
def _add_up(data: Array, reduced: Array, add_up: int, group: int, scheduler: int) -> None:
    for i in range(data.size):
        reduced[i] = data[i]
    if add_up != 0:
        invoke(add_up, (group, reduced.ctypes.data, reduced.size, reduced.itemsize))
