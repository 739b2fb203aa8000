"""int4, uint4 and float4: onnxruntime packs two elements into a byte, kernels take each in a byte of its own."""

from typing import Any

import numpy as np

from onnxgrad.cpu.core.halves import load, store
from onnxgrad.cpu.core.jit import native
from onnxgrad.cpu.core.memory import workspace
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.threads import launch
from onnxgrad.runtime.custom_op import FOUR_BIT_TYPES
from onnxgrad.tensor_types import DTYPES, Array

CHUNK = 1 << 16  # pairs in one task
_dtypes = {DTYPES[name] for name in FOUR_BIT_TYPES}


def is_packed(dtype: np.dtype[Any]) -> bool:
    """Whether onnxruntime puts two elements of this type into a byte."""
    return dtype in _dtypes


def packed_size(count: int) -> int:
    """Bytes that so many elements take."""
    return (count + 1) // 2


def unpacked(array: Array) -> Array:
    """The same in working memory, an element in each byte; only the first half of what the array spans is read."""
    result = workspace(array.shape, array.dtype)
    if array.size:
        launch(_unpack, _packed_bytes(array), _bytes(result), bytes_touched=array.size)
    return result


def pack(elements: Array, array: Array) -> None:
    """The other way round."""
    if array.size:
        launch(_pack, _bytes(elements), _packed_bytes(array), bytes_touched=array.size)


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _packed_bytes(array: Array) -> Array:
    return _bytes(array)[: packed_size(array.size)]


@native
def _unpack_chunk(number: int, packed: Array, elements: Array) -> None:
    pairs = elements.size // 2
    for i in range(number * CHUNK, min(pairs, (number + 1) * CHUNK)):
        both = load(packed, i)
        store(elements, 2 * i, both & 15)
        store(elements, 2 * i + 1, both >> 4)
    if number == 0 and elements.size > 2 * pairs:
        store(elements, 2 * pairs, load(packed, pairs) & 15)


@native
def _pack_chunk(number: int, elements: Array, packed: Array) -> None:
    pairs = elements.size // 2
    for i in range(number * CHUNK, min(pairs, (number + 1) * CHUNK)):
        store(packed, i, (load(elements, 2 * i) & 15) | (load(elements, 2 * i + 1) << 4))
    if number == 0 and elements.size > 2 * pairs:
        store(packed, pairs, load(elements, 2 * pairs) & 15)


@native
def _unpack(packed: Array, elements: Array, scheduler: int) -> None:
    parallel(scheduler, (packed.size + CHUNK - 1) // CHUNK, _unpack_chunk, (packed, elements))


@native
def _pack(elements: Array, packed: Array, scheduler: int) -> None:
    parallel(scheduler, (packed.size + CHUNK - 1) // CHUNK, _pack_chunk, (elements, packed))
