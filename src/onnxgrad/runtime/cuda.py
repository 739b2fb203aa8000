"""A node's run on the CUDA provider: the Triton kernels, on the session's own stream and memory."""

import ctypes
import functools
import math
import threading
import weakref
from typing import Any, NamedTuple

import numpy as np

from onnxgrad import arguments
from onnxgrad.runtime import kernels
from onnxgrad.runtime.api import Api
from onnxgrad.runtime.compute import NUMBER
from onnxgrad.schema import Known
from onnxgrad.tensor_types import Array

MOST_CALLS = 256  # kept for one node
_word = ctypes.c_int64


class _Call(NamedTuple):
    """What a node does with inputs of certain shapes, and of certain numbers where these are on the host."""

    host: dict[int, Any]  # inputs on the host, as kernels want them, by position
    shapes: list[tuple[int, ...]]  # of the outputs
    options: dict[str, Any]  # attributes, and what else the kernel asks for


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


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
def compute_on_cuda(kernel_address: int, context: int) -> int | None:
    """KernelComputeV2 for the CUDA provider."""
    number = _word.from_address(kernel_address + 8 * NUMBER).value
    kernel = kernels.find(number)
    return kernels.guarded(lambda: _run(kernel, context), kernel.api, kernel.node.name) or None


def _run(kernel: kernels.Kernel, context: int) -> None:
    import torch

    from onnxgrad.cuda.core.indices import BadIndex

    node, api, op = kernel.node, kernel.api, kernel.node.op
    device = torch.device("cuda", torch._C._cuda_getDevice())
    inputs: list[Any] = []  # tensors, and the bytes of those on the host
    for k, (declared, dtype) in enumerate(zip(op.inputs, node.dtypes, strict=True)):
        value = ctypes.c_void_p()
        api.call("KernelContext_GetInput", context, k, ctypes.byref(value))
        if not value.value:
            inputs.append(None)
        elif declared.constraint.on_host:
            inputs.append(_on_host(api, value, dtype))
        else:
            inputs.append(_tensor(api, value, dtype, device))
    call = _call(kernel, inputs)
    for k, array in call.host.items():
        inputs[k] = array
    outputs: list[Any] = []
    for o, (shape, wanted) in enumerate(zip(call.shapes, node.wanted, strict=True)):
        if not wanted:
            outputs.append(None)
            continue
        dims, value = (_word * max(1, len(shape)))(*shape), ctypes.c_void_p()
        api.call("KernelContext_GetOutput", context, o, dims, len(shape), ctypes.byref(value))
        outputs.append(_tensor(api, value, node.dtypes[op.dtype_sources[o]], device))
    address = ctypes.c_void_p()
    api.call("KernelContext_GetGPUComputeStream", context, ctypes.byref(address))
    pool = _pool_of(kernel, address.value or 0)
    with pool.lock, torch.cuda.stream(pool.stream), torch.cuda.use_mem_pool(pool.memory):
        if not op.chooses_outputs:  # the kernel writes all of them
            outputs = [
                torch.empty(tuple(s), dtype=_torch_type(node.dtypes[source]), device=device) if o is None else o
                for o, s, source in zip(outputs, call.shapes, op.dtype_sources, strict=True)
            ]
        bad = BadIndex(device, True)
        try:
            op.kernel("cuda")(*inputs, *outputs, **call.options, bad=bad)
            error = bad.error()
        except (TypeError, ValueError, IndexError, MemoryError) as found:
            error = found
        if error is not None:
            raise op.named(error) from None


def _pool_of(kernel: kernels.Kernel, stream: int) -> _Pool:
    with kernels.lock:
        pool = _pools.get(stream)
        if pool is None:
            pool = _pools[stream] = _Pool(stream)
        kernel.pools[stream] = pool
    return pool


def _call(kernel: kernels.Kernel, inputs: list[Any]) -> _Call:
    """Of inputs that look the same as before, as before."""
    key = tuple(None if x is None else x if isinstance(x, tuple) else x.shape for x in inputs)
    found = kernel.calls.get(key)
    if found is None:
        found = _make_call(kernel.node, inputs)
        if len(kernel.calls) >= MOST_CALLS:
            kernel.calls.clear()
        kernel.calls[key] = found
    return found


def _make_call(node: kernels.Node, inputs: list[Any]) -> _Call:
    op = node.op
    try:
        host = {}
        for k, x in enumerate(inputs):
            if isinstance(x, tuple):
                array = np.frombuffer(x[1], node.dtypes[k]).reshape(x[0])
                (host[k],) = arguments.to_arrays([op.inputs[k]], [array])  # refuses what is no vector
        known = [_known(x, host.get(k)) for k, x in enumerate(inputs)]
        options = {a.name: arguments.to_attribute(a, node.attributes[a.name]) for a in op.attributes}
        shapes = op.output_shapes(known, options)
    except (TypeError, ValueError) as error:
        raise op.named(error) from None
    if op.kernel_asks_for("cuda", "deterministic"):
        options["deterministic"] = True
    return _Call(host, shapes, options)


def _known(given: Any, values: Array | None) -> Known | None:
    if values is not None:
        return Known(values.shape, tuple(values.tolist()))
    return None if given is None else Known(tuple(given.shape), None)


def _shape_and_address(api: Api, value: Any) -> tuple[tuple[int, ...], int]:
    kind, dims, rank = ctypes.c_int(), ctypes.POINTER(_word)(), ctypes.c_size_t()
    reference = ctypes.byref
    api.call("GetTensorElementTypeAndShapeDataReference", value, reference(kind), reference(dims), reference(rank))
    data = ctypes.c_void_p()
    api.call("GetTensorMutableData", value, ctypes.byref(data))
    return tuple(dims[: rank.value]), data.value or 0


def _on_host(api: Api, value: Any, dtype: np.dtype[Any]) -> tuple[tuple[int, ...], bytes]:
    """Shape and bytes: numbers that decide what the kernel does."""
    shape, address = _shape_and_address(api, value)
    return shape, ctypes.string_at(address, math.prod(shape) * dtype.itemsize)


def _tensor(api: Api, value: Any, dtype: np.dtype[Any], device: Any) -> Any:
    """Memory of the session's as a tensor, which does not own it."""
    import torch

    shape, address = _shape_and_address(api, value)
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
