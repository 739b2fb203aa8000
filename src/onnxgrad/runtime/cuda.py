"""A node's run on the CUDA provider: the Triton kernels, on the session's own stream and memory."""

import ctypes
import threading
import weakref
from typing import Any

import numpy as np

from onnxgrad.runtime import kernels
from onnxgrad.runtime.api import Api
from onnxgrad.runtime.compute import NUMBER
from onnxgrad.schema import Known

MOST_SHAPES = 256  # kept for one node
_word = ctypes.c_int64


class _Pool:
    """Memory for the kernels of one session.

    torch keeps freed memory for the stream it was used on, for ever, but a session's stream ends with the session. So
    each stream has a pool of its own, which is held by the kernels of that session. One thread at a time may use it.
    """

    def __init__(self) -> None:
        import torch

        self.memory = torch.cuda.MemPool()
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

    node, api = kernel.node, kernel.api
    device = torch.cuda.current_device()
    inputs: list[Any] = []
    for k, (declared, dtype) in enumerate(zip(node.op.inputs, node.dtypes, strict=True)):
        value = ctypes.c_void_p()
        api.call("KernelContext_GetInput", context, k, ctypes.byref(value))
        if not value.value:
            inputs.append(None)
        elif declared.constraint.on_host:
            inputs.append(_on_host(api, value, dtype))
        else:
            inputs.append(_tensor(api, value, dtype, device))
    stream = ctypes.c_void_p()
    api.call("KernelContext_GetGPUComputeStream", context, ctypes.byref(stream))
    outputs: list[Any] = []
    shapes = _output_shapes(kernel, inputs)
    for o, (shape, wanted) in enumerate(zip(shapes, node.wanted, strict=True)):
        if not wanted:
            outputs.append(None)
            continue
        dims, value = (_word * max(1, len(shape)))(*shape), ctypes.c_void_p()
        api.call("KernelContext_GetOutput", context, o, dims, len(shape), ctypes.byref(value))
        outputs.append(_tensor(api, value, node.dtypes[node.op.dtype_sources[o]], device))
    pool = _pool_of(kernel, stream.value or 0)
    on_stream = torch.cuda.stream(torch.cuda.ExternalStream(stream.value or 0))
    with pool.lock, on_stream, torch.cuda.use_mem_pool(pool.memory):
        names = [output.name for output, wanted in zip(node.op.outputs, node.wanted, strict=True) if wanted]
        if node.op.chooses_outputs:
            node.op.into(outputs, *inputs, **node.attributes, outputs=names)
        else:
            spare = [
                torch.empty(tuple(s), dtype=_torch_type(node.dtypes[source]), device="cuda") if o is None else o
                for o, s, source in zip(outputs, shapes, node.op.dtype_sources, strict=True)
            ]
            node.op.into(spare, *inputs, **node.attributes)


def _pool_of(kernel: kernels.Kernel, stream: int) -> _Pool:
    with kernels.lock:
        pool = _pools.get(stream)
        if pool is None:
            pool = _pools[stream] = _Pool()
        kernel.pools[stream] = pool
    return pool


def _output_shapes(kernel: kernels.Kernel, inputs: list[Any]) -> Any:
    """Of inputs that look the same as before, as before."""
    node = kernel.node
    key = tuple(tuple(x) if isinstance(x, list) else None if x is None else tuple(x.shape) for x in inputs)
    found = kernel.shapes.get(key)
    if found is None:
        known = [
            None if x is None else Known((len(x),), tuple(x)) if isinstance(x, list) else Known(tuple(x.shape), None)
            for x in inputs
        ]
        try:
            found = node.op.output_shapes(known, node.attributes)
        except (TypeError, ValueError) as error:
            raise node.op.named(error) from None
        if len(kernel.shapes) >= MOST_SHAPES:
            kernel.shapes.clear()
        kernel.shapes[key] = found
    return found


def _shape_and_address(api: Api, value: Any) -> tuple[tuple[int, ...], int]:
    kind, dims, rank = ctypes.c_int(), ctypes.POINTER(_word)(), ctypes.c_size_t()
    reference = ctypes.byref
    api.call("GetTensorElementTypeAndShapeDataReference", value, reference(kind), reference(dims), reference(rank))
    data = ctypes.c_void_p()
    api.call("GetTensorMutableData", value, ctypes.byref(data))
    return tuple(dims[: rank.value]), data.value or 0


def _on_host(api: Api, value: Any, dtype: np.dtype[Any]) -> Any:
    """A vector as a list, which a call takes more quickly than an array; any other shape as an array, to be refused."""
    shape, address = _shape_and_address(api, value)
    size = int(np.prod(shape)) * dtype.itemsize
    array = np.frombuffer(ctypes.string_at(address, size), dtype).reshape(shape)
    return array.tolist() if array.ndim == 1 else array


def _tensor(api: Api, value: Any, dtype: np.dtype[Any], device: int) -> Any:
    """Memory of the session's as a tensor, which does not own it."""
    import torch

    shape, address = _shape_and_address(api, value)
    kind = _torch_type(dtype)
    if 0 in shape:
        return torch.empty(shape, dtype=kind, device="cuda")
    size = int(np.prod(shape)) * dtype.itemsize
    storage = torch._C._construct_storage_from_data_pointer(address, torch.device("cuda", device), size)
    return torch.empty(0, dtype=kind, device="cuda").set_(storage, 0, shape, _strides(shape))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _torch_type(dtype: np.dtype[Any]) -> Any:
    import torch

    return getattr(torch, str(dtype))
