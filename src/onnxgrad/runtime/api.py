"""onnxruntime's C interface: the functions used, by their place in its table, which only grows."""

import ctypes
import functools
from typing import Any

# Of the interface asked for: that of onnxruntime 1.25, the first to tell attributes that are lists of strings.
VERSION = 25
SLOTS = {
    "CreateStatus": 0,
    "CreateCustomOpDomain": 26,
    "CustomOpDomain_Add": 27,
    "AddCustomOpDomain": 28,
    "GetTensorMutableData": 51,
    "AllocatorFree": 76,
    "GetAllocatorWithDefaultOptions": 78,
    "KernelInfoGetAttribute_float": 85,
    "KernelInfoGetAttribute_int64": 86,
    "KernelInfoGetAttribute_string": 87,
    "KernelContext_GetInput": 90,
    "KernelContext_GetOutput": 91,
    "ReleaseStatus": 93,
    "KernelInfoGetAttributeArray_float": 162,
    "KernelInfoGetAttributeArray_int64": 163,
    "KernelContext_GetGPUComputeStream": 193,
    "KernelInfo_GetOutputCount": 231,
    "KernelInfo_GetOutputName": 233,
    "KernelInfo_GetNodeName": 244,
    "KernelContext_ParallelFor": 274,
    "GetTensorElementTypeAndShapeDataReference": 414,
    "KernelInfoGetAttributeArray_string": 417,
}
FAIL, INVALID_ARGUMENT = 1, 2  # error codes


@functools.cache
def api_at(address: int) -> "Api":
    """The table at an address: one for each onnxruntime in the process, since looking functions up takes time."""
    return Api(address)


class Api:
    """The table of one onnxruntime, as functions of Python."""

    def __init__(self, address: int) -> None:
        self.address = address
        self._table = ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p))
        self._functions: dict[tuple[str, int], Any] = {}

    def function(self, name: str) -> int:
        """The address of a function of the table."""
        return self._table[SLOTS[name]] or 0

    def call(self, name: str, *arguments: Any) -> int:
        """Calls a function of the table with machine words or pointers; 0, or the address of a status."""
        function = self._functions.get((name, len(arguments)))
        if function is None:
            kind = ctypes.CFUNCTYPE(ctypes.c_void_p, *([ctypes.c_void_p] * len(arguments)))
            function = self._functions[name, len(arguments)] = kind(self._table[SLOTS[name]])
        return function(*arguments) or 0

    def succeeds(self, name: str, *arguments: Any) -> bool:
        """The same, where a failure is an answer: its status is dropped."""
        status = self.call(name, *arguments)
        if status:
            self.call("ReleaseStatus", status)
        return status == 0

    def status(self, text: str, code: int = INVALID_ARGUMENT) -> int:
        """An error as onnxruntime raises it."""
        function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
        return function(self._table[SLOTS["CreateStatus"]])(code, text.encode()) or 0

    def text(self, name: str, *arguments: Any) -> str:
        """What a function writes into a buffer of the size it first asks for; "" if it has nothing."""
        size = ctypes.c_size_t(0)
        self.succeeds(name, *arguments, None, ctypes.byref(size))
        if size.value == 0:
            return ""
        buffer = ctypes.create_string_buffer(size.value)
        return buffer.value.decode() if self.succeeds(name, *arguments, buffer, ctypes.byref(size)) else ""
