"""A node's run on the CUDA provider: the Triton kernels, on the session's own stream and memory."""

import ctypes
import functools
import math
import threading
import weakref
from typing import Any

import numpy as np

from onnxgrad import arguments
from onnxgrad.runtime import kernels
from onnxgrad.runtime.api import Api
from onnxgrad.runtime.interrupts import answer, callback
from onnxgrad.schema import Known
from onnxgrad.tensor_types import Array

MOST_CALLS = 256  # kept for one node
ROOM = 1024  # words for the addresses and shapes of a node's inputs
# In the order of `struct functions` in bridge.c.
FUNCTIONS = (
    "KernelContext_GetInput", "KernelContext_GetOutput", "GetTensorElementTypeAndShapeDataReference",
    "GetTensorMutableData", "KernelContext_GetGPUComputeStream",
)  # fmt: skip
_word = ctypes.c_int64


class _Call:
    """What a node does with inputs at certain addresses, of certain shapes, and of certain numbers on the host.

    Sessions take their memory from an arena, in which things come to lie where they were in the run before: so tensors
    for inputs and outputs, which do not own that memory, are kept with what was found out about them.
    """

    def __init__(self, node: kernels.Node, given: list[tuple[int, tuple[int, ...]] | None], device: Any) -> None:
        op = node.op
        self.inputs: list[Any] = [
            None if x is None else _on_host(*x, dtype) if entry.constraint.on_host else _tensor(*x, dtype, device)
            for x, entry, dtype in zip(given, op.inputs, node.dtypes, strict=True)
        ]
        try:
            for k, entry in enumerate(op.inputs):
                if entry.constraint.on_host and self.inputs[k] is not None:
                    (self.inputs[k],) = arguments.to_arrays([entry], [self.inputs[k]])  # refuses what is no vector
            known = [_known(x) for x in self.inputs]
            self.options = {a.name: arguments.to_attribute(a, node.attributes[a.name]) for a in op.attributes}
            self.shapes = op.output_shapes(known, self.options)
        except (TypeError, ValueError) as error:
            raise op.named(error) from None
        if op.kernel_asks_for("cuda", "deterministic"):
            self.options["deterministic"] = True
        self.dtypes = op.output_dtypes(node.dtypes)
        self._wanted = [k for k, wanted in enumerate(node.wanted) if wanted]
        asked = [word for k in self._wanted for word in (k, len(self.shapes[k]), *self.shapes[k])]
        self.asked = np.array(asked, np.int64)
        self._outputs: dict[tuple[int, ...], list[Any]] = {}

    def outputs(self, ort: Any, context: int, device: Any) -> list[Any]:
        """Tensors for the outputs that the node has, None for the others."""
        addresses = (_word * max(1, len(self._wanted)))()
        _library().onnxgrad_ask(ort, context, len(self._wanted), self.asked.ctypes.data, addresses)
        key = tuple(addresses)
        found = self._outputs.get(key)
        if found is None:
            found = [None] * len(self.shapes)
            for k, address in zip(self._wanted, key, strict=False):
                found[k] = _tensor(address, tuple(self.shapes[k]), self.dtypes[k], device)
            if len(self._outputs) >= MOST_CALLS:
                self._outputs.clear()
            self._outputs[key] = found
        return found


class _Pool:
    """Memory for the kernels of one session.

    torch keeps freed memory for the stream it was used on, for ever, but a session's stream ends with the session. So
    each stream has a pool of its own, which is held by the kernels of that session. One thread at a time may use it.
    """

    def __init__(self, stream: int) -> None:
        import torch

        self.memory = torch.cuda.MemPool()
        self.stream = torch.cuda.ExternalStream(stream)
        self.lock = threading.Lock()


_pools: "weakref.WeakValueDictionary[int, _Pool]" = weakref.WeakValueDictionary()


@callback(ctypes.CFUNCTYPE(None, _word, _word, _word))
def compute_on_cuda(number: int, context: int, at: int) -> None:
    """Runs a node."""
    kernel = kernels.find(number)
    answer(at, lambda: _run(kernel, context), kernel.api, kernel.node.name)


def _run(kernel: kernels.Kernel, context: int) -> int:
    """1 when all is launched."""
    import torch

    index = torch._C._cuda_getDevice()
    ort = _functions(kernel.api)
    words = _room()
    length = _library().onnxgrad_read(ort, context, len(kernel.node.op.inputs), words.ctypes.data, ROOM)
    if length < 0:
        raise ValueError(f"{kernel.node.op.name}: its shapes take more than {ROOM} numbers")
    read = words[:length].tolist()
    stream, given = read[0], _parts(read)
    call = _call(kernel, given, index)
    outputs = call.outputs(ort, context, torch.device("cuda", index))
    if torch._C._cuda_getCurrentRawStream(index) == stream:  # whoever runs the session gave it this stream of torch's
        _launch(kernel.node.op, call, outputs, index)
        return 1
    pool = _pool_of(kernel, stream)
    with pool.lock, torch.cuda.stream(pool.stream), torch.cuda.use_mem_pool(pool.memory):
        _launch(kernel.node.op, call, outputs, index)
    return 1


def _launch(op: Any, call: _Call, outputs: list[Any], index: int) -> None:
    import torch

    from onnxgrad.cuda.core.indices import BadIndex

    device = torch.device("cuda", index)
    if not op.chooses_outputs and any(o is None for o in outputs):  # the kernel writes all of them
        outputs = [
            torch.empty(tuple(shape), dtype=_torch_type(dtype), device=device) if o is None else o
            for o, shape, dtype in zip(outputs, call.shapes, call.dtypes, strict=True)
        ]
    bad = BadIndex(device, True)
    try:
        op.kernel("cuda")(*call.inputs, *outputs, **call.options, bad=bad)
        error = bad.error()
    except (TypeError, ValueError, IndexError, MemoryError) as found:
        error = found
    if error is not None:
        raise op.named(error) from None


@functools.cache
def _library() -> Any:
    from onnxgrad.runtime.register import bridge

    library = bridge()[0]
    pointer, word = ctypes.c_void_p, ctypes.c_longlong
    library.onnxgrad_read.argtypes, library.onnxgrad_read.restype = [pointer, pointer, word, pointer, word], word
    library.onnxgrad_ask.argtypes, library.onnxgrad_ask.restype = [pointer, pointer, word, pointer, pointer], None
    return library


def _functions(api: Api) -> Any:
    """Their addresses in one onnxruntime, as `struct functions`."""
    found = _tables.get(api.address)
    if found is None:
        found = _tables[api.address] = (ctypes.c_void_p * len(FUNCTIONS))(*map(api.function, FUNCTIONS))
    return found


_tables: dict[int, Any] = {}
_of_thread = threading.local()


def _room() -> Array:
    """Memory of this thread's."""
    found: Array | None = getattr(_of_thread, "words", None)
    if found is None:
        found = _of_thread.words = np.zeros(ROOM, np.int64)
    return found


def _parts(read: list[int]) -> list[tuple[int, tuple[int, ...]] | None]:
    """(address, shape) of each input, None if it is absent."""
    found: list[tuple[int, tuple[int, ...]] | None] = []
    at = 1
    while at < len(read):
        address, rank = read[at : at + 2]
        at += 2
        if rank < 0:
            found.append(None)
            continue
        found.append((address, tuple(read[at : at + rank])))
        at += rank
    return found


def _pool_of(kernel: kernels.Kernel, stream: int) -> _Pool:
    with kernels.lock:
        pool = _pools.get(stream)
        if pool is None:
            pool = _pools[stream] = _Pool(stream)
        kernel.pools[stream] = pool
    return pool


def _call(kernel: kernels.Kernel, given: list[tuple[int, tuple[int, ...]] | None], index: int) -> _Call:
    """Of inputs that look the same as before, as before."""
    import torch

    numbers = [
        _bytes(*x, dtype)
        for x, entry, dtype in zip(given, kernel.node.op.inputs, kernel.node.dtypes, strict=True)
        if x is not None and entry.constraint.on_host
    ]
    key = (index, *given, *numbers)
    found = kernel.calls.get(key)
    if found is None:
        found = _Call(kernel.node, given, torch.device("cuda", index))
        if len(kernel.calls) >= MOST_CALLS:
            kernel.calls.clear()
        kernel.calls[key] = found
    return found


def _known(given: Any) -> Known | None:
    if isinstance(given, np.ndarray):
        return Known(given.shape, tuple(given.tolist()))
    return None if given is None else Known(tuple(given.shape), None)


def _bytes(address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    return ctypes.string_at(address, math.prod(shape) * dtype.itemsize)


def _on_host(address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A copy: the next run may have other numbers there."""
    return np.frombuffer(_bytes(address, shape, dtype), dtype).reshape(shape)


def _tensor(address: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: Any) -> Any:
    """Memory of the session's as a tensor, which does not own it."""
    import torch

    kind = _torch_type(dtype)
    if 0 in shape:
        return torch.empty(shape, dtype=kind, device=device)
    size = math.prod(shape) * dtype.itemsize
    storage = torch._C._construct_storage_from_data_pointer(address, device, size)
    return torch.empty(0, dtype=kind, device=device).set_(storage, 0, shape, _strides(shape))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@functools.cache
def _torch_type(dtype: np.dtype[Any]) -> Any:
    import torch

    return getattr(torch, str(dtype))
