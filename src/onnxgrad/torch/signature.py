"""Signature: the inputs of a model, and the tensors of a call by input name, or one sentence if they do not fit."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import onnx_ir as ir
import torch

from onnxgrad.graph.suggest import listed, suggestion
from onnxgrad.graph.tensor import Dim, dims_of
from onnxgrad.torch.session import CALLER, DTYPES

LEAST = 2  # of what may be the size of a free dimension of an export: 1 broadcasts


class _Input(NamedTuple):
    dtype: torch.dtype
    dims: tuple[Dim, ...] | None


class Signature:
    """The inputs of a model: names, types and dimensions."""

    def __init__(self, values: Sequence[ir.Value], caller: str) -> None:
        self._caller = caller
        self._inputs = {str(v.name): _Input(dtype_of(v, caller, "input"), dims_of(v)) for v in values}
        self.names = list(self._inputs)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors of a call."""
        if len(args) > len(self.names):
            raise TypeError(f"{self._caller}: {len(args)} inputs are given, expected {len(self.names)}: {self}")
        given: dict[str, Any] = dict(zip(self.names, args, strict=False))
        for name, tensor in kwargs.items():
            if name not in self._inputs:
                raise TypeError(f"{self._caller}: the model has no input {name!r}{suggestion(name, self.names)}")
            if name in given:
                raise TypeError(f"{self._caller}: the input {name!r} is given twice, by place and by name")
            given[name] = tensor
        missing = [name for name in self.names if name not in given]
        if missing:
            raise TypeError(f"{self._caller}: the input {missing[0]!r} is not given, expected {self}")
        sizes: dict[str, tuple[int, str]] = {}
        return {name: self._checked(name, given[name], sizes) for name in self.names}

    def takes(self, shapes: Sequence[tuple[int, ...]]) -> bool:
        """Whether tensors of these shapes fit; as torch.export has it, sizes of 0 and 1 are none that are free."""
        sizes: dict[str, tuple[int, str]] = {}
        try:
            for (name, expected), shape in zip(self._inputs.items(), shapes, strict=True):
                self._check_shape(name, shape, expected.dims or shape, sizes)
                free = [size for size, d in zip(shape, expected.dims or (), strict=False) if not isinstance(d, int)]
                if any(size < LEAST for size in free):
                    return False
        except ValueError:
            return False
        return True

    def __str__(self) -> str:
        return listed(self.names)

    def _checked(self, name: str, tensor: Any, sizes: dict[str, tuple[int, str]]) -> torch.Tensor:
        expected = self._inputs[name]
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{self._caller}: the input {name!r} is a {type(tensor).__name__}, expected a torch.Tensor")
        if tensor.dtype != expected.dtype:
            if not (tensor.is_floating_point() and torch.is_autocast_enabled(tensor.device.type)):
                kinds = dtype_name(tensor.dtype), dtype_name(expected.dtype)
                raise TypeError("{}: the input {!r} holds {}, expected {}".format(self._caller, name, *kinds))
            tensor = tensor.to(expected.dtype)  # layers before it may give a half type there
        if expected.dims is not None:
            self._check_shape(name, tensor.shape, expected.dims, sizes)
        return tensor

    def _check_shape(
        self, name: str, shape: Sequence[int], dims: tuple[Dim, ...], sizes: dict[str, tuple[int, str]]
    ) -> None:
        what = f"{self._caller}: the input {name!r} has shape {list(shape)}"
        if len(shape) != len(dims):
            raise ValueError(f"{what}, expected {len(dims)} dimensions")
        for size, dim in zip(shape, dims, strict=True):
            if isinstance(dim, int) and size != dim:
                raise ValueError(f"{what}, expected {[d if isinstance(d, int) else 'any' for d in dims]}")
            if isinstance(dim, str):
                known, source = sizes.setdefault(dim, (size, name))
                if size != known:
                    raise ValueError(f"{what}, but {dim} is {known} in {source!r}")


def dtype_of(value: ir.Value, caller: str, what: str) -> torch.dtype:
    """The type of a model's input or output; raises one sentence if torch has none for it."""
    if isinstance(value.type, ir.TensorType) and value.dtype in DTYPES:
        return DTYPES[value.dtype]
    kind = value.dtype.name.lower() if isinstance(value.type, ir.TensorType) and value.dtype else "sequences or maps"
    raise TypeError(
        f"{caller}: the model's {what} {value.name!r} holds {kind}, which torch has no tensors of: let the model end "
        "with numbers, and begin with them"
    )


def dtype_name(dtype: torch.dtype) -> str:
    """float32 for torch.float32."""
    return str(dtype).removeprefix("torch.")


def common_device(tensors: Mapping[str, torch.Tensor], caller: str = CALLER) -> torch.device:
    """Where all tensors are."""
    first, device = next(((name, t.device) for name, t in tensors.items()), ("", torch.device("cpu")))
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(
                f"{caller}: {name!r} is on {tensor.device}, but {first!r} is on {device}: move the input, or the "
                "module by .to()"
            )
    return device
