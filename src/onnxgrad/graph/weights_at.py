"""weights_at(): where in the files of a model the numbers of its initializers are, so that they can be written over."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import onnx
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

GRAPH, INITIALIZER = 7, 5  # fields of a ModelProto and a GraphProto
NAME, RAW_DATA = 8, 9  # of a TensorProto
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # how protobuf writes a field


class Place(NamedTuple):
    """Bytes of a file."""

    offset: int
    length: int


def weights_at(path: Path) -> dict[str, tuple[str, Place]]:
    """The files that hold initializers of the main graph as raw bytes, little-endian, and where they begin and end."""
    data = path.read_bytes()
    found = {}
    for tensor in onnx.load_model_from_string(data).graph.initializer:
        apart = ExternalDataInfo(tensor) if uses_external_data(tensor) else None
        if apart is not None and apart.length is not None:
            found[tensor.name] = (apart.location, Place(apart.offset or 0, apart.length))
    for graph in _fields(data, Place(0, len(data)), GRAPH):
        for tensor in _fields(data, graph, INITIALIZER):
            names, raw = list(_fields(data, tensor, NAME)), list(_fields(data, tensor, RAW_DATA))
            if names and raw:
                found[data[names[-1].offset : sum(names[-1])].decode()] = (path.name, raw[-1])
    return found


def _fields(data: bytes, message: Place, wanted: int) -> Iterator[Place]:
    """The contents of a message's fields of that number, which hold bytes."""
    at, end = message.offset, sum(message)
    while at < end:
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == BYTES:
            length, at = _varint(data, at)
            if number == wanted:
                yield Place(at, length)
            at += length
        elif kind == VARINT:
            _, at = _varint(data, at)
        else:
            at += {FIXED64: 8, FIXED32: 4}[kind]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number in groups of 7 bits, and where the next field begins."""
    number = shift = 0
    while True:
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number, at
