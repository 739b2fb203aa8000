"""The C part by itself: what it reads and asks for on CUDA, of an onnxruntime that is a few functions of Python."""

import ctypes
from typing import Any

import numpy as np
import pytest

from onnxgrad.runtime.register import bridge

POINTER, WORD = ctypes.c_void_p, ctypes.c_longlong
SHAPES = [(2, 3), None, (), (7, 0, 5, 1, 9)]
STREAM = 0x1234


def _set(at: int, value: int, kind: Any = WORD) -> None:
    kind.from_address(at).value = value


class Runtime:
    """Inputs of these shapes, of which that of number k is at address 1000 + k, and the outputs asked for."""

    def __init__(self) -> None:
        self.dims = [np.array(shape or (), np.int64) for shape in SHAPES]
        self.asked: list[tuple[int, tuple[int, ...]]] = []
        kinds = [(POINTER, WORD, POINTER), (POINTER, WORD, POINTER, WORD, POINTER), (POINTER,) * 4, (POINTER,) * 2,
                 (POINTER,) * 2]  # fmt: skip
        calls = self.get_input, self.get_output, self.get_shape, self.get_data, self.get_stream
        self.kept = [ctypes.CFUNCTYPE(POINTER, *kind)(call) for kind, call in zip(kinds, calls, strict=True)]
        self.table = (POINTER * 5)(*[ctypes.cast(call, POINTER) for call in self.kept])

    def get_input(self, context: int, index: int, value: int) -> int:
        _set(value, 0 if SHAPES[index] is None else index + 1)
        return 0

    def get_output(self, context: int, index: int, dims: int, rank: int, value: int) -> int:
        self.asked.append((index, tuple((WORD * rank).from_address(dims)) if rank else ()))
        _set(value, 0 if index == 1 else 100 + index)
        return 0

    def get_shape(self, value: int, kind: int, dims: int, rank: int) -> int:
        _set(kind, 1, ctypes.c_int)
        _set(dims, self.dims[value - 1].ctypes.data)
        _set(rank, self.dims[value - 1].size)
        return 0

    def get_data(self, value: int, data: int) -> int:
        _set(data, 999 + value)
        return 0

    def get_stream(self, context: int, stream: int) -> int:
        _set(stream, STREAM)
        return 0


def _read(room: int) -> tuple[int, list[int]]:
    library, runtime = bridge()[0], Runtime()
    read = library.onnxgrad_read
    read.argtypes, read.restype = [POINTER, POINTER, WORD, POINTER, WORD], WORD
    words = np.full(room, -7, np.int64)  # no more memory than that
    return read(runtime.table, None, len(SHAPES), words.ctypes.data, room), words.tolist()


WHOLE = [STREAM, 1000, 2, 2, 3, 0, -1, 1002, 0, 1003, 5, 7, 0, 5, 1, 9]


def test_inputs_are_read_as_words():
    assert _read(len(WHOLE)) == (len(WHOLE), WHOLE)


@pytest.mark.parametrize("room", range(1, len(WHOLE)))
def test_nothing_is_written_past_the_room(room):
    length, words = _read(room)
    assert length == -1
    assert all(word == -7 or word == wanted for word, wanted in zip(words, WHOLE, strict=False))


def test_outputs_are_asked_for():
    library, runtime = bridge()[0], Runtime()
    ask = library.onnxgrad_ask
    ask.argtypes, ask.restype = [POINTER, POINTER, WORD, POINTER, POINTER], None
    asked, addresses = np.array([0, 2, 4, 5, 1, 1, 6, 2, 0], np.int64), np.full(3, -7, np.int64)
    ask(runtime.table, None, 3, asked.ctypes.data, addresses.ctypes.data)
    assert runtime.asked == [(0, (4, 5)), (1, (6,)), (2, ())]
    assert addresses.tolist() == [1099, 0, 1101]
