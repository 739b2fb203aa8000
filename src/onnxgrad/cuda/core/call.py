"""A call of an operator whose arrays are on a GPU: the same checks as on the CPU, then the Triton kernel."""

import contextlib
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.utils.dlpack

from onnxgrad import arguments, interop
from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.schema import Known
from onnxgrad.tensor_types import TypeConstraint

if TYPE_CHECKING:
    from onnxgrad.op import Op
    from onnxgrad.schema import Input


class CheckedCall(NamedTuple):
    """What the checks of one call found, good for every call with the same signature."""

    host: dict[int, Any]  # inputs that stay on the host, as arrays, by position
    device: torch.device
    like: int  # position of the first tensor
    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    deterministic: bool  # whether the kernel asks for that


MOST_CHECKED = 1024
_checked: dict[Any, CheckedCall] = {}


def run(
    op: "Op[..., Any]",
    out: Sequence[Any] | None,
    values: Sequence[Any],
    attributes: dict[str, Any],
    wanted: frozenset[str] | None,
    check: bool,
    deterministic: bool,
) -> tuple[Any, ...]:
    """The results, as arrays of the framework of the first array that is on the GPU."""
    signature = _signature(op, values)
    checked = None if signature is None else _checked.get(signature)
    if checked is None:
        checked = _check(op, values, attributes)
        if signature is not None:
            if len(_checked) >= MOST_CHECKED:
                _checked.clear()
            _checked[signature] = checked
    inputs = [
        checked.host[k] if k in checked.host else None if values[k] is None else _in_memory(_to_tensor(values[k]))
        for k in range(len(op.inputs))
    ]
    kernel = op.kernel("cuda")
    if checked.deterministic:
        attributes["deterministic"] = deterministic
    # Triton launches on torch's current device. The tensors are detached, so nothing is recorded for autograd.
    elsewhere = checked.device.type == "cuda" and checked.device.index != torch.cuda.current_device()
    with torch.cuda.device(checked.device) if elsewhere else contextlib.nullcontext():
        bad = BadIndex(checked.device, check)
        results = _results(op, out, checked, wanted, inputs)
        kernel(*inputs, *results, **attributes, bad=bad)
        if (error := bad.error()) is not None:
            raise error
    if out is not None:
        return tuple(None if r is None else o for o, r in zip(out, results, strict=True))
    like = values[checked.like]
    return tuple(None if r is None else interop.to_framework(r, like) for r in results)


def _signature(op: "Op[..., Any]", values: Sequence[Any]) -> Any:
    """All that the checks depend on, if it is quick to find: the checks of a call take longer than its launch."""
    found: list[Any] = [op]
    for value in values:
        if value.__class__ is torch.Tensor:
            if not value.is_cuda:
                return None
            found.append((value.shape, value.dtype, value.device))
        elif value.__class__ is list or value.__class__ is tuple:
            found.append((list, *value, *(v.__class__ for v in value)))  # 4.0 equals 4, but is no dimension
        elif value is None or value.__class__ in (int, float, str):
            found.append((value.__class__, value))
        else:
            return None
    key = tuple(found)
    try:
        hash(key)
    except TypeError:  # a list of lists
        return None
    return key


def _check(op: "Op[..., Any]", values: Sequence[Any], attributes: dict[str, Any]) -> CheckedCall:
    inputs, like = _to_tensors(op.inputs, values)
    shapes = op.output_shapes([_known(d, x) for d, x in zip(op.inputs, inputs, strict=True)], attributes)
    host = {k: inputs[k] for k, entry in enumerate(op.inputs) if entry.constraint.on_host}
    found = op.output_dtypes([None if x is None else x.dtype for x in inputs])
    dtypes = [d if isinstance(d, torch.dtype) else getattr(torch, str(d)) for d in found]
    return CheckedCall(host, inputs[like].device, like, shapes, dtypes, op.kernel_asks_for("cuda", "deterministic"))


def _to_tensor(value: Any) -> torch.Tensor:
    return value.detach() if isinstance(value, torch.Tensor) else torch.utils.dlpack.from_dlpack(value)


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Its numbers one after the other, and none of them negated or conjugated only on paper."""
    tensor = tensor.contiguous()
    return tensor.resolve_conj().resolve_neg() if tensor.is_neg() or tensor.is_conj() else tensor


def _known(declared: "Input", value: Any) -> Known | None:
    if value is None:
        return None
    return Known(tuple(value.shape), tuple(value.tolist()) if declared.constraint.on_host else None)


def _to_tensors(declared: Sequence["Input"], values: Sequence[Any]) -> tuple[list[Any], int]:
    """Host inputs as NumPy arrays, the others as tensors; and the position of the first of these."""
    host = [k for k, entry in enumerate(declared) if entry.constraint.on_host]
    for k in host:
        if interop.is_on_gpu(values[k]) and not _is_host_tensor(values[k]):
            raise TypeError(
                f"{declared[k].name} is on the GPU, expected on the host: a list, a NumPy array or a tensor of the CPU"
            )
    plain = [interop.to_numpy(values[k]) if interop.is_foreign(values[k]) else values[k] for k in host]
    inputs: list[Any] = [None] * len(declared)
    for k, array in zip(host, arguments.to_arrays([declared[k] for k in host], plain), strict=True):
        inputs[k] = array
    chosen: dict[str, tuple[str, torch.dtype]] = {}
    like, device = -1, None
    for k, (entry, value) in enumerate(zip(declared, values, strict=False)):  # attributes follow
        if k in host or (value is None and entry.optional):
            continue
        if value is None:
            raise TypeError(f"{entry.name} is None, expected an array of {arguments.list_types(entry)}")
        if not interop.is_on_gpu(value):
            raise TypeError(f"{entry.name} is a {type(value).__name__} on the host, expected an array on the GPU")
        tensor = _to_tensor(value)
        if like < 0:
            like, device = k, tensor.device
        if tensor.device != device:
            raise ValueError(f"{entry.name} is on {tensor.device}, expected {device} where {declared[like].name} is")
        if tensor.dtype not in _torch_types(entry.constraint):
            raise TypeError(f"{entry.name} is {_name(tensor.dtype)}, expected {arguments.list_types(entry)}")
        source, dtype = chosen.setdefault(entry.constraint.name, (entry.name, tensor.dtype))
        if dtype != tensor.dtype:
            raise TypeError(f"{entry.name} is {_name(tensor.dtype)}, expected {_name(dtype)} as {source} is")
        inputs[k] = tensor
    return inputs, like


@functools.cache
def _torch_types(constraint: TypeConstraint) -> frozenset[torch.dtype]:
    """The types of torch among those an input may have; they are named as NumPy's."""
    found = (getattr(torch, str(dtype), None) for dtype in constraint.dtypes)
    return frozenset(dtype for dtype in found if isinstance(dtype, torch.dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_host_tensor(value: Any) -> bool:
    """With the interpreter every tensor is on the CPU, and counts for the host where that is asked for."""
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _results(
    op: "Op[..., Any]",
    out: Sequence[Any] | None,
    checked: CheckedCall,
    wanted: frozenset[str] | None,
    inputs: Sequence[Any],
) -> tuple[torch.Tensor | None, ...]:
    names = op.output_names
    if out is not None:
        return _check_out(out, names, checked.shapes, checked.dtypes, wanted, checked.device, inputs)
    try:
        return tuple(
            torch.empty(shape, dtype=dtype, device=checked.device) if wanted is None or name in wanted else None
            for name, shape, dtype in zip(names, checked.shapes, checked.dtypes, strict=True)
        )
    except torch.OutOfMemoryError as error:
        raise MemoryError(f"the GPU has no room for the results: {str(error).split('.')[0]}") from None


def _check_out(
    out: Sequence[Any],
    names: Sequence[str],
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    wanted: frozenset[str] | None,
    device: torch.device,
    inputs: Sequence[Any],
) -> tuple[torch.Tensor | None, ...]:
    """The caller's own result arrays, if they can serve."""
    if len(out) != len(names):
        raise ValueError(f"out has {len(out)} arrays, expected {len(names)}: {', '.join(names)}")
    results: list[torch.Tensor | None] = []
    for array, name, shape, dtype in zip(out, names, shapes, dtypes, strict=True):
        if array is None and wanted is not None and name not in wanted:
            results.append(None)
            continue
        if array is None or not interop.is_on_gpu(array):
            raise TypeError(f"out for {name} is a {type(array).__name__}, expected an array on the GPU")
        tensor = _to_tensor(array)
        given = f"{_name(tensor.dtype)}{list(tensor.shape)} on {tensor.device}"
        asked = f"{_name(dtype)}{list(shape)} on {device}"
        if given != asked or not tensor.is_contiguous():
            raise ValueError(f"out for {name} is {given}, expected {asked}, contiguous")
        if any(_share_memory(tensor, x) for x in inputs if isinstance(x, torch.Tensor)):
            raise ValueError(f"out for {name} shares memory with an input")
        for other, before in zip(names, results, strict=False):
            if before is not None and _share_memory(tensor, before):
                raise ValueError(f"out for {name} shares memory with {other}")
        results.append(tensor if wanted is None or name in wanted else None)
    return tuple(results)


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two contiguous tensors overlap."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
