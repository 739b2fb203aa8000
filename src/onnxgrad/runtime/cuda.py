"""A node's run on the CUDA provider: the Triton kernels, on the session's own stream and memory."""

import ctypes
from typing import Any

import numpy as np

from onnxgrad.runtime import kernels
from onnxgrad.runtime.api import Api
from onnxgrad.runtime.compute import NUMBER
from onnxgrad.schema import Known

CARRIERS = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}  # bits travel as integers: the protocol has no name for bfloat16
_word = ctypes.c_int64


class _OnDevice:
    """Memory of the GPU, as torch takes it."""

    def __init__(self, address: int, shape: tuple[int, ...], itemsize: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": CARRIERS[itemsize],
            "data": (address, False),
            "version": 3,
        }


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
def compute_on_cuda(kernel_address: int, context: int) -> int | None:
    """KernelComputeV2 for the CUDA provider."""
    number = _word.from_address(kernel_address + 8 * NUMBER).value
    kernel = kernels.find(number)
    return kernels.guarded(lambda: _run(kernel, context), kernel.api, kernel.node.name) or None


def _run(kernel: kernels.Kernel, context: int) -> None:
    import torch

    node, api = kernel.node, kernel.api
    inputs: list[Any] = []
    for k, (declared, dtype) in enumerate(zip(node.op.inputs, node.dtypes, strict=True)):
        value = ctypes.c_void_p()
        api.call("KernelContext_GetInput", context, k, ctypes.byref(value))
        if not value.value:
            inputs.append(None)
        elif declared.constraint.on_host:
            inputs.append(_on_host(api, value, dtype))
        else:
            inputs.append(_tensor(api, value, dtype))
    known = [
        None if x is None else Known(tuple(x.shape), tuple(x.tolist()) if d.constraint.on_host else None)
        for x, d in zip(inputs, node.op.inputs, strict=True)
    ]
    try:
        shapes = node.op.output_shapes(known, node.attributes)
    except (TypeError, ValueError) as error:
        raise node.op.named(error) from None
    stream = ctypes.c_void_p()
    api.call("KernelContext_GetGPUComputeStream", context, ctypes.byref(stream))
    outputs: list[Any] = []
    for o, (shape, wanted) in enumerate(zip(shapes, node.wanted, strict=True)):
        if not wanted:
            outputs.append(None)
            continue
        dims, value = (_word * max(1, len(shape)))(*shape), ctypes.c_void_p()
        api.call("KernelContext_GetOutput", context, o, dims, len(shape), ctypes.byref(value))
        outputs.append(_tensor(api, value, node.dtypes[node.op.dtype_sources[o]]))
    with torch.cuda.stream(torch.cuda.ExternalStream(stream.value or 0)):
        names = [output.name for output, wanted in zip(node.op.outputs, node.wanted, strict=True) if wanted]
        if node.op.chooses_outputs:
            node.op.into(outputs, *inputs, **node.attributes, outputs=names)
        else:
            spare = [
                torch.empty(tuple(s), dtype=_torch_type(node.dtypes[source]), device="cuda") if o is None else o
                for o, s, source in zip(outputs, shapes, node.op.dtype_sources, strict=True)
            ]
            node.op.into(spare, *inputs, **node.attributes)


def _shape_and_address(api: Api, value: Any) -> tuple[tuple[int, ...], int]:
    kind, dims, rank = ctypes.c_int(), ctypes.POINTER(_word)(), ctypes.c_size_t()
    reference = ctypes.byref
    api.call("GetTensorElementTypeAndShapeDataReference", value, reference(kind), reference(dims), reference(rank))
    data = ctypes.c_void_p()
    api.call("GetTensorMutableData", value, ctypes.byref(data))
    return tuple(dims[: rank.value]), data.value or 0


def _on_host(api: Api, value: Any, dtype: np.dtype[Any]) -> Any:
    shape, address = _shape_and_address(api, value)
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(ctypes.string_at(address, size), dtype).reshape(shape)


def _tensor(api: Api, value: Any, dtype: np.dtype[Any]) -> Any:
    import torch

    shape, address = _shape_and_address(api, value)
    if 0 in shape:
        return torch.empty(shape, dtype=_torch_type(dtype), device="cuda")
    return torch.as_tensor(_OnDevice(address, shape, dtype.itemsize), device="cuda").view(_torch_type(dtype))


def _torch_type(dtype: np.dtype[Any]) -> Any:
    import torch

    return getattr(torch, str(dtype))
