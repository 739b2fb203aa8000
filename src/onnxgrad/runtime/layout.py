"""The memory that Python and native code share: kernels, plans and their tables, whose words both read by name."""

import ctypes
from typing import Any

import numpy as np

from onnxgrad.tensor_types import Array

MOST_VALUES = 64  # inputs or outputs of a node


def _words(*names: str) -> np.dtype[Any]:
    return np.dtype([(name, np.int64) for name in names])


# A node's kernel, whose address onnxruntime has. `dropped` comes first: bridge.c sets it when the session is gone.
KERNEL = np.dtype(
    [
        *_words("dropped", "api", "number", "plan", "prepare", "explain", "inputs", "outputs", "post", "threads").descr,
        ("host", np.int64, MOST_VALUES),  # of each input: the size of its elements if it is read on the host, else 0
    ]
)
# What to do for inputs of certain shapes, the key. Tables are arrays of the structures below.
PLAN = _words("next", "key_length", "key", "outputs", "copies", "copy_count", "calls", "call_count", "workspace")
OUTPUT = _words("wanted", "rank", "dims")
COPY = _words("output", "source", "bytes")
CALL = _words("function", "words", "word_count", "patches", "patch_count", "shares")
PATCH = _words("word", "source", "offset")  # which word of a call is an address in an input, an output or workspace
ANSWER = _words("plan", "status")  # of Python, asked for a plan or for what is wrong
SCHEDULER = _words("post", "parallel_for", "context", "threads")  # as cpu/core/parallel.py wants it: a function first


def structure_at(address: int, layout: np.dtype[Any]) -> Array:
    """The memory at an address, to read and to write by name."""
    memory: Any = (ctypes.c_char * layout.itemsize).from_address(address)
    return np.frombuffer(memory, layout).reshape(())


def offset_of(layout: np.dtype[Any], name: str) -> int:
    """Where a member begins, in bytes."""
    assert layout.fields is not None
    return int(layout.fields[name][1])
