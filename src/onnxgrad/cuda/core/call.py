"""A call of an operator whose arrays are on a GPU: the same checks as on the CPU, then the Triton kernel."""

import contextlib
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from onnxgrad import arguments, frameworks
from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.schema import Known

if TYPE_CHECKING:
    from onnxgrad.op import Input, Op


def run(
    op: "Op[..., Any]",
    out: Sequence[Any] | None,
    values: Sequence[Any],
    attributes: dict[str, Any],
    wanted: frozenset[str] | None,
    check: bool,
    deterministic: bool,
) -> tuple[Any, ...]:
    """The results, in kind of the first array that is on the GPU."""
    inputs, like = _to_tensors(op.inputs, values)
    device = next(x.device for x in inputs if isinstance(x, torch.Tensor))
    shapes = op.output_shapes([_known(d, x) for d, x in zip(op.inputs, inputs, strict=True)], attributes)
    kernel = op.kernel("cuda")
    options: dict[str, Any] = dict(attributes)
    if "deterministic" in inspect.signature(kernel).parameters:
        options["deterministic"] = deterministic
    here = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with here, torch.no_grad():
        bad = BadIndex(device, check)
        results = _results(op, out, shapes, inputs, wanted, device)
        kernel(*inputs, *results, **options, bad=bad)
        if (error := bad.error()) is not None:
            raise error
    if out is not None:
        return tuple(None if r is None else o for o, r in zip(out, results, strict=True))
    return tuple(None if r is None else frameworks.in_kind(r, like) for r in results)


def _known(declared: "Input", value: Any) -> Known | None:
    if value is None:
        return None
    return Known(tuple(value.shape), tuple(value.tolist()) if declared.constraint.on_host else None)


def _to_tensors(declared: Sequence["Input"], values: Sequence[Any]) -> tuple[list[Any], Any]:
    """Host inputs as NumPy arrays, the others as contiguous tensors; and the first of these as it came."""
    host = [k for k, entry in enumerate(declared) if entry.constraint.on_host]
    for k in host:
        if frameworks.is_on_gpu(values[k]) and not _is_host_tensor(values[k]):
            raise TypeError(
                f"{declared[k].name} is on the GPU, expected on the host: a list, a NumPy array or a tensor of the CPU"
            )
    plain = [frameworks.to_numpy(values[k]) if frameworks.is_foreign(values[k]) else values[k] for k in host]
    inputs: list[Any] = [None] * len(declared)
    for k, array in zip(host, arguments.to_arrays([declared[k] for k in host], plain), strict=True):
        inputs[k] = array
    chosen: dict[str, tuple[str, torch.dtype]] = {}
    like, device, first = None, None, ""
    for k, (entry, value) in enumerate(zip(declared, values, strict=False)):  # attributes follow
        if k in host or (value is None and entry.optional):
            continue
        if value is None:
            raise TypeError(f"{entry.name} is None, expected an array of {arguments.list_types(entry)}")
        if not frameworks.is_on_gpu(value):
            raise TypeError(f"{entry.name} is a {type(value).__name__} on the host, expected an array on the GPU")
        tensor = value.detach() if isinstance(value, torch.Tensor) else torch.from_dlpack(value)
        if like is None:
            like, device, first = value, tensor.device, entry.name
        if tensor.device != device:
            raise ValueError(f"{entry.name} is on {tensor.device}, expected {device} where {first} is")
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in [str(d) for d in entry.constraint.dtypes]:
            raise TypeError(f"{entry.name} is {name}, expected {arguments.list_types(entry)}")
        source, dtype = chosen.setdefault(entry.constraint.name, (entry.name, tensor.dtype))
        if dtype != tensor.dtype:
            raise TypeError(f"{entry.name} is {name}, expected {str(dtype).removeprefix('torch.')} as {source} is")
        inputs[k] = tensor.contiguous()
    return inputs, like


def _is_host_tensor(value: Any) -> bool:
    """With the interpreter every tensor is on the CPU, and counts for the host where that is asked for."""
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _results(
    op: "Op[..., Any]",
    out: Sequence[Any] | None,
    shapes: Sequence[Sequence[int]],
    inputs: Sequence[Any],
    wanted: frozenset[str] | None,
    device: torch.device,
) -> tuple[torch.Tensor | None, ...]:
    dtypes = [inputs[source].dtype for source in op.dtype_sources]
    names = [output.name for output in op.outputs]
    if out is not None:
        return _check_out(out, names, shapes, dtypes, wanted, device)
    try:
        return tuple(
            torch.empty(tuple(shape), dtype=dtype, device=device) if wanted is None or name in wanted else None
            for name, shape, dtype in zip(names, shapes, dtypes, strict=True)
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
) -> tuple[torch.Tensor | None, ...]:
    """The caller's own result arrays, if they can serve."""
    if len(out) != len(names):
        raise ValueError(f"out has {len(out)} arrays, expected {len(names)}: {', '.join(names)}")
    results: list[torch.Tensor | None] = []
    for array, name, shape, dtype in zip(out, names, shapes, dtypes, strict=True):
        if array is None and wanted is not None and name not in wanted:
            results.append(None)
            continue
        if array is None or not frameworks.is_on_gpu(array):
            raise TypeError(f"out for {name} is a {type(array).__name__}, expected an array on the GPU")
        tensor = array if isinstance(array, torch.Tensor) else torch.from_dlpack(array)
        given = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"
        asked = f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"
        if given != asked or not tensor.is_contiguous():
            raise ValueError(f"out for {name} is {given}, expected {asked}, contiguous")
        results.append(tensor if wanted is None or name in wanted else None)
    return tuple(results)
