"""The memory that Python and native code share: operators, kernels, plans, tables, whose words both read by name."""

from typing import Any

import numpy as np

MOST_VALUES = 64  # inputs or outputs of a node


def _words(*names: str) -> np.dtype[Any]:
    return np.dtype([(name, np.int64) for name in names])


# An operator for one choice of types. First comes onnxruntime's OrtCustomOp: a version and functions that it calls with
# the address of this. Then comes what those functions, in native code, answer, and `create`, which is Python's.
FUNCTIONS = (
    "CreateKernel", "GetName", "GetExecutionProviderType", "GetInputType", "GetInputTypeCount", "GetOutputType",
    "GetOutputTypeCount", "KernelCompute", "KernelDestroy", "GetInputCharacteristic", "GetOutputCharacteristic",
    "GetInputMemoryType", "GetVariadicInputMinArity", "GetVariadicInputHomogeneity", "GetVariadicOutputMinArity",
    "GetVariadicOutputHomogeneity", "CreateKernelV2", "KernelComputeV2", "InferOutputShapeFn", "GetStartVersion",
    "GetEndVersion", "GetMayInplace", "ReleaseMayInplace", "GetAliasMap", "ReleaseAliasMap",
)  # fmt: skip
OPERATOR = np.dtype(
    [
        *_words("version", *FUNCTIONS).descr,
        *_words("name", "provider", "inputs", "outputs", "first_version", "last_version", "zero", "create").descr,
        *((name, np.int64, MOST_VALUES) for name in ("input_type", "input_optional", "input_memory")),
        *((name, np.int64, MOST_VALUES) for name in ("output_type", "output_optional")),
    ]
)
# A node's kernel, whose address onnxruntime has. `dropped` comes first: bridge.c sets it when the session is gone.
KERNEL = np.dtype(
    [
        *_words("dropped", "api", "number", "plan", "prepare", "explain", "release").descr,
        *_words("inputs", "outputs", "post", "threads").descr,
        ("host", np.int64, MOST_VALUES),  # of each input: the size of its elements if it is read on the host, else 0
    ]
)
# What to do for inputs of certain shapes, the key. Tables are arrays of the structures below. A plan `for_one_run` is
# not in its kernel's list, and given back by `release`.
PLAN = np.dtype(
    [
        *_words("next", "key_length", "key", "outputs", "copies", "copy_count", "calls", "call_count").descr,
        *_words("workspace", "for_one_run").descr,
    ]
)
OUTPUT = _words("wanted", "rank", "dims")
COPY = _words("output", "source", "bytes")
CALL = _words("function", "words", "word_count", "patches", "patch_count", "shares")
PATCH = _words("word", "source", "offset")  # which word of a call is an address in an input, an output or workspace
ANSWER = _words("result", "status")  # of Python, asked for a kernel, for a plan, or for what is wrong
SCHEDULER = _words("post", "parallel_for", "context", "threads")  # as cpu/core/parallel.py wants it: a function first


def offset_of(layout: np.dtype[Any], name: str) -> int:
    """Where a member begins, in bytes."""
    assert layout.fields is not None
    return int(layout.fields[name][1])
