"""OrtCustomOp: an operator, for one choice of types, as onnxruntime wants it described."""

import ctypes
import itertools
from typing import Any, NamedTuple

import numpy as np

from onnxgrad.op import Op
from onnxgrad.runtime.api import VERSION
from onnxgrad.runtime.kernels import outlive_python
from onnxgrad.runtime.layout import OPERATOR
from onnxgrad.tensor_types import Array

# onnxruntime's numbers of the element types. It has no complex tensors; and int2 and uint2 are not offered, since its
# versions do not agree on their numbers: 26 and 25 in 1.25, 25 and 24 in 1.31, where 26 is something else.
ELEMENT_TYPES = {
    "float": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "int32": 6, "int64": 7, "bool": 9, "float16": 10,
    "double": 11, "uint32": 12, "uint64": 13, "bfloat16": 16, "float8e4m3fn": 17,
    "float8e4m3fnuz": 18, "float8e5m2": 19, "float8e5m2fnuz": 20, "uint4": 21, "int4": 22, "float4e2m1": 23,
}  # fmt: skip
FOUR_BIT_TYPES = ("uint4", "int4", "float4e2m1")  # two in a byte: see packed.py; the CPU provider alone has them
REQUIRED, OPTIONAL, VARIADIC = 0, 1, 2
ON_DEVICE, ON_HOST = 0, -2  # OrtMemTypeDefault, OrtMemTypeCPUInput
ANY_VERSION = 2**31 - 1
ANY_TYPE = 0


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
    """The overload that a layout.OPERATOR describes."""
    return _by_address[address]


def describe(overload: Overload, create: int, compute: int, destroy: int) -> int:
    """The address of a layout.OPERATOR for it, which stays; `create` is called by the native CreateKernelV2."""
    op = overload.op
    memory = _operator(overload.name, overload.provider_name, create, compute, destroy)
    memory["inputs"], memory["outputs"], memory["first_version"] = len(op.inputs), len(op.outputs), op.version
    for k, entry in enumerate(op.inputs):
        memory["input_type"][k] = ELEMENT_TYPES[overload.types[entry.constraint.name]]
        memory["input_optional"][k] = OPTIONAL if entry.optional else REQUIRED
        on_host = entry.constraint.on_host and overload.provider != b"CPUExecutionProvider"
        memory["input_memory"][k] = ON_HOST if on_host else ON_DEVICE
    for k, output in enumerate(op.outputs):
        memory["output_type"][k] = ELEMENT_TYPES[overload.types[output.constraint.name]]
        memory["output_optional"][k] = OPTIONAL if output.optional else REQUIRED
    address = int(memory.ctypes.data)
    _by_address[address] = overload
    return address


def describe_variadic(name: str, provider: bytes, create: int, compute: int, destroy: int) -> int:
    """The same for an operator of any inputs and outputs, the types of which the graph declares."""
    names = ctypes.create_string_buffer(name.encode()), ctypes.create_string_buffer(provider)
    memory = _operator(*names, create, compute, destroy)
    memory["inputs"] = memory["outputs"] = memory["first_version"] = 1
    memory["input_type"][0] = memory["output_type"][0] = ANY_TYPE
    memory["input_optional"][0] = memory["output_optional"][0] = VARIADIC
    return int(memory.ctypes.data)


def _operator(name: Any, provider: Any, create: int, compute: int, destroy: int) -> Array:
    """A layout.OPERATOR that stays, as far as all operators are the same."""
    from onnxgrad.runtime.native_op import ANSWERS  # imported here because it loads Numba

    memory = np.zeros((), OPERATOR)
    memory["version"], memory["KernelComputeV2"], memory["KernelDestroy"] = VERSION, compute, destroy
    for question, function in ANSWERS.items():
        memory[question] = function.address
    memory["name"], memory["provider"] = map(ctypes.addressof, (name, provider))
    memory["last_version"], memory["create"] = ANY_VERSION, create
    for thing in (memory, name, provider):
        outlive_python(thing)
    return memory
