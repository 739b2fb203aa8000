"""OrtCustomOp: an operator, for one choice of types, as onnxruntime wants it described."""

import ctypes
import itertools
from typing import Any, NamedTuple

import numpy as np

from onnxgrad.op import Op
from onnxgrad.runtime.api import VERSION
from onnxgrad.runtime.kernels import outlive_python

# onnxruntime's numbers of the element types. It has no complex tensors; and int2 and uint2 are not offered, since its
# versions do not agree on their numbers: 26 and 25 in 1.25, 25 and 24 in 1.31, where 26 is something else.
ELEMENT_TYPES = {
    "float": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "int32": 6, "int64": 7, "bool": 9, "float16": 10,
    "double": 11, "uint32": 12, "uint64": 13, "bfloat16": 16, "float8e4m3fn": 17,
    "float8e4m3fnuz": 18, "float8e5m2": 19, "float8e5m2fnuz": 20, "uint4": 21, "int4": 22, "float4e2m1": 23,
}  # fmt: skip
FOUR_BIT_TYPES = ("uint4", "int4", "float4e2m1")  # two in a byte: see packed.py; the CPU provider alone has them
REQUIRED, OPTIONAL = 0, 1
ON_DEVICE, ON_HOST = 0, -2  # OrtMemTypeDefault, OrtMemTypeCPUInput
ANY_VERSION = 2**31 - 1

_pointer, _int, _size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_at = ctypes.CFUNCTYPE(_int, _pointer, _size)
_number = ctypes.CFUNCTYPE(_int, _pointer)
_count = ctypes.CFUNCTYPE(_size, _pointer)
_text = ctypes.CFUNCTYPE(_pointer, _pointer)
CREATE = ctypes.CFUNCTYPE(_pointer, _pointer, _pointer, _pointer, ctypes.POINTER(_pointer))


_FUNCTIONS = (
    "CreateKernel", "GetName", "GetExecutionProviderType", "GetInputType", "GetInputTypeCount", "GetOutputType",
    "GetOutputTypeCount", "KernelCompute", "KernelDestroy", "GetInputCharacteristic", "GetOutputCharacteristic",
    "GetInputMemoryType", "GetVariadicInputMinArity", "GetVariadicInputHomogeneity", "GetVariadicOutputMinArity",
    "GetVariadicOutputHomogeneity", "CreateKernelV2", "KernelComputeV2", "InferOutputShapeFn", "GetStartVersion",
    "GetEndVersion", "GetMayInplace", "ReleaseMayInplace", "GetAliasMap", "ReleaseAliasMap",
)  # fmt: skip


class OrtCustomOp(ctypes.Structure):
    """The C struct, in its order; functions are addresses, so that they may be Python's, Numba's or C's."""

    _fields_ = (("version", ctypes.c_uint32), *((name, _pointer) for name in _FUNCTIONS))


class Overload(NamedTuple):
    """An operator with its type variables settled, for one provider."""

    op: Op[..., Any]
    types: dict[str, str]  # ONNX's name of the type, by variable
    provider: bytes
    name: ctypes.Array[ctypes.c_char]
    provider_name: ctypes.Array[ctypes.c_char]

    def dtypes(self) -> tuple[np.dtype[Any], ...]:
        """Of the inputs."""
        found = []
        for entry in self.op.inputs:
            types = dict(zip(entry.constraint.types, entry.constraint.dtypes, strict=True))
            found.append(types[self.types[entry.constraint.name]])
        return tuple(found)


def overloads_of(op: Op[..., Any], provider: bytes) -> list[Overload]:
    """One for each combination of types that onnxruntime has, and the provider's kernels take."""
    offered = [t for t in ELEMENT_TYPES if provider == b"CPUExecutionProvider" or t not in FOUR_BIT_TYPES]
    variables: dict[str, list[str]] = {}
    for constraint in (*(i.constraint for i in op.inputs), *(o.constraint for o in op.outputs)):
        variables.setdefault(constraint.name, [t for t in constraint.types if t in offered])
    names = ctypes.create_string_buffer(op.name.encode()), ctypes.create_string_buffer(provider)
    return [
        Overload(op, dict(zip(variables, chosen, strict=True)), provider, *names)
        for chosen in itertools.product(*variables.values())
    ]


_by_address: dict[int, Overload] = {}


def overload_at(address: int) -> Overload:
    """The overload that a struct describes."""
    return _by_address[address]


def _input_type(address: int, position: int) -> int:
    overload = _by_address[address]
    return ELEMENT_TYPES[overload.types[overload.op.inputs[position].constraint.name]]


def _output_type(address: int, position: int) -> int:
    overload = _by_address[address]
    return ELEMENT_TYPES[overload.types[overload.op.outputs[position].constraint.name]]


def _input_memory(address: int, position: int) -> int:
    overload = _by_address[address]
    on_host = overload.op.inputs[position].constraint.on_host and overload.provider != b"CPUExecutionProvider"
    return ON_HOST if on_host else ON_DEVICE


_CALLBACKS: dict[str, Any] = {
    "GetName": _text(lambda at: ctypes.addressof(_by_address[at].name)),
    "GetExecutionProviderType": _text(lambda at: ctypes.addressof(_by_address[at].provider_name)),
    "GetInputType": _at(_input_type),
    "GetInputTypeCount": _count(lambda at: len(_by_address[at].op.inputs)),
    "GetOutputType": _at(_output_type),
    "GetOutputTypeCount": _count(lambda at: len(_by_address[at].op.outputs)),
    "GetInputCharacteristic": _at(lambda at, i: OPTIONAL if _by_address[at].op.inputs[i].optional else REQUIRED),
    "GetOutputCharacteristic": _at(lambda at, i: OPTIONAL if _by_address[at].op.outputs[i].optional else REQUIRED),
    "GetInputMemoryType": _at(_input_memory),
    "GetVariadicInputMinArity": _number(lambda at: 0),
    "GetVariadicInputHomogeneity": _number(lambda at: 0),
    "GetVariadicOutputMinArity": _number(lambda at: 0),
    "GetVariadicOutputHomogeneity": _number(lambda at: 0),
    "GetStartVersion": _number(lambda at: _by_address[at].op.version),
    "GetEndVersion": _number(lambda at: ANY_VERSION),
}


def describe(overload: Overload, create: Any, compute: int, destroy: int) -> int:
    """The address of a struct for it, which stays."""
    struct = OrtCustomOp(version=VERSION, KernelComputeV2=compute, KernelDestroy=destroy)
    struct.CreateKernelV2 = ctypes.cast(create, _pointer).value
    for name, callback in _CALLBACKS.items():
        setattr(struct, name, ctypes.cast(callback, _pointer).value)
    address = ctypes.addressof(struct)
    _by_address[address] = overload
    outlive_python(struct)
    return address
