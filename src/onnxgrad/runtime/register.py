"""register(): makes the operators known to a session of stock onnxruntime."""

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.op import OPERATORS
from onnxgrad.ops.families.elementwise_program import NAME
from onnxgrad.runtime import api as ort
from onnxgrad.runtime import kernels
from onnxgrad.runtime.api import Api, api_at
from onnxgrad.runtime.custom_op import describe, describe_variadic, overload_at, overloads_of
from onnxgrad.runtime.fused import FusedElementwise
from onnxgrad.runtime.interrupts import answer, callback, note, run
from onnxgrad.runtime.layout import KERNEL
from onnxgrad.schema import OWN, Attribute
from onnxgrad.tensor_types import Array

MOST_PLANS = 256  # kept for one node; with still more shapes Python is asked every time
REGISTERED = "onnxgrad.registered"  # an entry of options that have the operators
CPU, CUDA = b"CPUExecutionProvider", b"CUDAExecutionProvider"


def _of_words(count: int) -> Any:
    """The type of a C function of so many machine words."""
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * count)


def require_onnxruntime(caller: str) -> Any:
    """The module; one sentence where it is not installed."""
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError(
            f"{caller} needs onnxruntime: pip install 'onnxgrad[cpu]', or onnxruntime-gpu for CUDA ({error})"
        ) from error
    return onnxruntime


def register(options: Any = None) -> Any:
    """Adds every operator of onnxgrad to onnxruntime.SessionOptions, by default new ones, and returns them.

    onnxgrad.session() does this for any model. Call register() where other code makes the session, for a model that has
    operators of onnxgrad and imports the domain com.microsoft, as all models from `gradient` do. onnxruntime refuses
    most other models with these options: it does not find its own operators of that domain, for example those that fuse
    Gemm and Relu. Calling it again for the same options has no effect.
    """
    onnxruntime = require_onnxruntime("onnxgrad.register")
    options = onnxruntime.SessionOptions() if options is None else options
    if not isinstance(options, onnxruntime.SessionOptions):
        raise TypeError(f"register: options is a {type(options).__name__}, expected onnxruntime.SessionOptions")
    library, path = bridge()
    with kernels.lock:
        if not _is_registered(options):
            library.onnxgrad_set_hook(_hook)
            run(options.register_custom_ops_library, path)
            options.add_session_config_entry(REGISTERED, "1")
    return options


def _is_registered(options: Any) -> bool:
    try:
        return bool(options.get_session_config_entry(REGISTERED))
    except RuntimeError:  # there is no such entry
        return False


@functools.cache
def bridge() -> tuple[ctypes.CDLL, str]:
    """The library that onnxruntime loads, and its path: loaded twice it is still one."""
    found = sorted(Path(__file__).parent.glob("_bridge*.so")) + sorted(Path(__file__).parent.glob("_bridge*.pyd"))
    if not found:
        raise ImportError("onnxgrad was installed without its C extension: install a C compiler, then onnxgrad again")
    return ctypes.CDLL(str(found[0])), str(found[0])


@functools.cache
def _domains(api_address: int) -> list[int]:
    """The domains with all operators, made once for each onnxruntime in the process."""
    import onnxruntime

    from onnxgrad.runtime.compute import compiled_compute, compiled_compute_in_python

    computes = {CPU: int(compiled_compute.address)}
    if CUDA.decode() in onnxruntime.get_available_providers():
        computes[CUDA] = int(compiled_compute_in_python.address)
    api, domains = api_at(api_address), {}
    destroy = _address_of(bridge()[0].onnxgrad_drop_kernel)
    for op in OPERATORS.values():
        if op.domain not in domains:
            domain = ctypes.c_void_p()
            _check(api, api.call("CreateCustomOpDomain", ctypes.c_char_p(op.domain.encode()), ctypes.byref(domain)))
            domains[op.domain] = domain
        for provider, compute in computes.items():
            # An operator's outputs are where its provider is, so one of small numbers belongs to the CPU; one
            # that has no kernel for CUDA runs there too. One without a kernel for the CPU runs as a function there.
            belongs = op.has_kernel("cpu") if provider == CPU else not op.on_host_only and op.has_kernel("cuda")
            for overload in overloads_of(op, provider) if belongs else ():
                address = describe(overload, _address_of(_create), compute, destroy)
                _check(api, api.call("CustomOpDomain_Add", domains[op.domain], address))
    if CUDA in computes:
        address = describe_variadic(NAME, CUDA, _address_of(_create_fused), computes[CUDA], destroy)
        _check(api, api.call("CustomOpDomain_Add", domains[OWN], address))
    return [int(domain.value or 0) for domain in domains.values()]


def _check(api: Api, status: int) -> None:
    if status:
        api.call("ReleaseStatus", status)
        raise RuntimeError("onnxruntime rejects onnxgrad's operators: install onnxruntime 1.25 or newer")


@callback(ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p))
def _hook(options: int, base: int) -> int | None:
    """Called within register_custom_ops_library."""
    try:
        get_api = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)
        address = get_api(ctypes.cast(base, ctypes.POINTER(ctypes.c_void_p))[0] or 0)(ort.VERSION)
        if not address:
            raise RuntimeError("this onnxruntime is too old: install onnxruntime 1.25 or newer")
        api = api_at(address)
        for domain in _domains(address):
            _check(api, api.call("AddCustomOpDomain", options, domain))
    except BaseException as error:  # it must not cross the boundary
        note(error)
    return None


@callback(_of_words(4))
def _create(op_address: int, api_address: int, info: int, at: int) -> None:
    """Makes the kernel of a node: called once for each node of a session."""
    from onnxgrad.cpu.core.threads import get_num_threads
    from onnxgrad.runtime import compute

    api, overload = api_at(api_address), overload_at(op_address)
    op = overload.op
    name = api.text("KernelInfo_GetNodeName", info)

    def make() -> int:
        attributes = {a.name: _read_attribute(api, info, a) for a in op.attributes}
        count = ctypes.c_size_t(0)
        api.call("KernelInfo_GetOutputCount", info, ctypes.byref(count))
        wanted = tuple(
            k < count.value and bool(api.text("KernelInfo_GetOutputName", info, k)) for k in range(len(op.outputs))
        )
        memory = _memory(api_address, overload.provider, len(op.inputs), len(op.outputs))
        memory["explain"], memory["release"] = _address_of(_explain), _address_of(_release)
        memory["post"] = compute.compiled_post.address
        memory["threads"] = compute.threads_word(get_num_threads())
        node = kernels.Node(op, name, overload.dtypes(), attributes, wanted)
        for k, entry in enumerate(op.inputs):
            memory["host"][k] = node.dtypes[k].itemsize if entry.constraint.on_host else 0
        return _add(kernels.Kernel(node, api, memory))

    answer(at, make, api, name)


@callback(_of_words(4))
def _create_fused(op_address: int, api_address: int, info: int, at: int) -> None:
    """The same for a FusedElementwise, whose program says all about it."""
    api = api_at(api_address)
    name = api.text("KernelInfo_GetNodeName", info)

    def make() -> int:
        op = FusedElementwise(api.text("KernelInfoGetAttribute_string", info, ctypes.c_char_p(b"program")))
        memory = _memory(api_address, CUDA, len(op.inputs), len(op.outputs))
        node = kernels.Node(op, name, op.input_dtypes, {}, (True,) * len(op.outputs))
        return _add(kernels.Kernel(node, api, memory))

    answer(at, make, api, name)


def _memory(api_address: int, provider: bytes, inputs: int, outputs: int) -> Array:
    """Of a new kernel."""
    memory = np.zeros((), KERNEL)
    memory["api"], memory["inputs"], memory["outputs"] = api_address, inputs, outputs
    memory["prepare"] = _address_of(_prepare)
    if provider == CUDA:
        from onnxgrad.runtime.cuda import compute_on_cuda

        memory["prepare"] = _address_of(compute_on_cuda)
    return memory


def _add(kernel: kernels.Kernel) -> int:
    """Its address, for onnxruntime."""
    kernel.memory["number"] = kernels.add(kernel)
    return int(kernel.memory.ctypes.data)


def _address_of(callback: Any) -> int:
    return ctypes.cast(callback, ctypes.c_void_p).value or 0


def _read_attribute(api: Api, info: int, attribute: Attribute) -> Any:
    """Its value, or the default."""
    name = ctypes.c_char_p(attribute.name.encode())
    if attribute.is_list and attribute.kind is str:
        return _read_strings(api, info, name, attribute.default)
    if attribute.is_list:
        return _read_numbers(api, info, name, attribute)
    if attribute.kind is str:
        return api.text("KernelInfoGetAttribute_string", info, name) or attribute.default
    number: Any = ctypes.c_int64(0) if attribute.kind is int else ctypes.c_float(0)
    kind = "int64" if attribute.kind is int else "float"
    found = api.succeeds(f"KernelInfoGetAttribute_{kind}", info, name, ctypes.byref(number))
    return number.value if found else attribute.default


def _read_numbers(api: Api, info: int, name: ctypes.c_char_p, attribute: Attribute) -> Any:
    size = ctypes.c_size_t(0)
    kind: Any = ctypes.c_int64 if attribute.kind is int else ctypes.c_float
    reader = f"KernelInfoGetAttributeArray_{'int64' if attribute.kind is int else 'float'}"
    if not api.succeeds(reader, info, name, None, ctypes.byref(size)):
        return attribute.default
    numbers = (kind * size.value)()
    api.call(reader, info, name, numbers, ctypes.byref(size))
    return [attribute.kind(x) for x in numbers]


def _read_strings(api: Api, info: int, name: ctypes.c_char_p, default: Any) -> Any:
    allocator, strings, size = ctypes.c_void_p(), ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t(0)
    api.call("GetAllocatorWithDefaultOptions", ctypes.byref(allocator))
    arguments = (info, name, allocator, ctypes.byref(strings), ctypes.byref(size))
    if not api.succeeds("KernelInfoGetAttributeArray_string", *arguments):
        return default
    values = [ctypes.string_at(strings[k] or 0).decode() for k in range(size.value)]
    for k in range(size.value):
        api.call("AllocatorFree", allocator, strings[k])
    if size.value:
        api.call("AllocatorFree", allocator, ctypes.cast(strings, ctypes.c_void_p))
    return values


@callback(_of_words(4))
def _prepare(number: int, key: int, length: int, at: int) -> None:
    """Makes a plan for inputs of shapes not seen before."""
    from onnxgrad.runtime import compute
    from onnxgrad.runtime.plan import make_plan

    kernel = kernels.find(number)

    def make() -> int:
        if length < 0:
            raise ValueError(f"{kernel.node.op.name}: its shapes take more than {compute.KEY_ROOM} numbers")
        plan = make_plan(kernel.node, list((ctypes.c_int64 * length).from_address(key)))
        with kernels.lock:
            if len(kernel.plans) < MOST_PLANS:
                kernel.plans.append(plan)
                plan.memory["next"] = kernel.memory["plan"]
                kernel.memory["plan"] = plan.address
            else:
                plan.memory["for_one_run"] = 1
                kernel.passing_plans[plan.address] = plan
        return plan.address

    answer(at, make, kernel.api, kernel.node.name)


@callback(_of_words(2))
def _release(number: int, address: int) -> None:
    """Frees a plan that was for one run, which is done."""
    del kernels.find(number).passing_plans[address]


@callback(_of_words(5))
def _explain(number: int, key: int, length: int, data: int, at: int) -> None:
    """Runs a node again that found bad values, in Python, for the sentence."""
    from onnxgrad.runtime.plan import read_key

    kernel = kernels.find(number)
    node = kernel.node

    def explain() -> int:
        shapes, contents = read_key(node, list((ctypes.c_int64 * length).from_address(key)))
        addresses = (ctypes.c_int64 * len(shapes)).from_address(data)
        inputs = []
        for k, (shape, content) in enumerate(zip(shapes, contents, strict=True)):
            if shape is None or content is not None:
                inputs.append(content)
                continue
            inputs.append(_array_at(addresses[k], shape, node.dtypes[k]))
        node.op(*inputs, **node.attributes)
        raise MemoryError(f"{node.op.name}: there was not enough memory to run it")

    answer(at, explain, kernel.api, node.name)


def _array_at(address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An input as an array."""
    from onnxgrad.runtime.packed import is_packed, unpacked

    size = int(np.prod(shape)) * dtype.itemsize  # for a packed type more than there is, and never read
    memory: Any = (ctypes.c_char * size).from_address(address) if size else b""
    array = np.frombuffer(memory, np.uint8).view(dtype).reshape(shape)
    return unpacked(array) if is_packed(dtype) else array
