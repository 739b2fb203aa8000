"""Module: an ONNX model as a torch.nn.Module."""

import fnmatch
import functools
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

from onnxgrad.graph.files import expect_weights, load, save
from onnxgrad.graph.suggest import suggestion
from onnxgrad.passes.draft import Draft, without_garbage_collection
from onnxgrad.passes.free_batch import fixed_batch
from onnxgrad.passes.prepare import RESTORE, prepare_for_training
from onnxgrad.passes.put_back import put_back
from onnxgrad.rules.engine import influences
from onnxgrad.torch.graphs import Graphs, forget_numbers
from onnxgrad.torch.session import DTYPES, KINDS
from onnxgrad.torch.signature import Signature, common_device, dtype_name, dtype_of
from onnxgrad.train.batch_dimension import with_free_batch
from onnxgrad.train.devices import as_tensor

CALLER = "Module"


class Module(torch.nn.Module):
    """An ONNX model as a layer of PyTorch: its parameters are torch's, and forward and backward run in onnxruntime.

    `model` is a path, an onnx.ModelProto or an onnx_ir.Model, which is not changed. Parameters and running statistics
    have the names that they have in the model, with a module for each part between dots, so that
    `module.encoder.layer.get_parameter("0.weight")` is "encoder.layer.0.weight". All parameters are there, as
    `onnxgrad inspect` shows them; `trainable` names those that require gradients, patterns allowed, by default all of
    them, and may name other weights. `freeze` names some that do not; a BatchNormalization whose statistics match
    normalizes with them in train mode, too.

    A call takes the model's inputs in their order or by name, and returns its output, or a named tuple of several. In
    train mode, which a module begins in, Dropout drops as torch.manual_seed has it and BatchNormalization measures the
    batch. Gradients can be differentiated again. Where nothing requires a gradient, nothing is kept for one.
    """

    def __init__(
        self,
        model: Any,
        trainable: str | Sequence[str] | None = None,
        freeze: str | Sequence[str] = (),
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__()
        with without_garbage_collection():
            loaded = load(model, CALLER)
            expect_weights(loaded, CALLER)
            self._model = _Exported(Draft(loaded, CALLER).run(RESTORE).model)
            prepared = _with_free_batch(prepare_for_training(self._model.copy(), CALLER), self._model)
        self._signature = Signature(prepared.graph.inputs, CALLER)
        self._outputs = {str(v.name): dtype_of(v, CALLER, "output") for v in prepared.graph.outputs}
        found = _floating(prepared.graph)
        chosen, frozen = _matching(found, trainable, "trainable"), _matching(found, freeze, "freeze")
        reached = {v.name for v in influences(list(prepared.graph), set(prepared.graph.outputs))}
        for name in sorted(chosen - reached):
            raise ValueError(f"{CALLER}: trainable names {name!r}, but no output has a gradient for it")
        self._paths: dict[str, str] = {}
        for name, tensor in found.items():
            role = prepared.roles.get(name)
            if role is not None and role.kind == "statistic":
                self._place(name, torch.nn.Buffer(_as_torch(tensor)))
            elif name in chosen or (role is not None and role.is_parameter and name in reached):
                is_trained = (trainable is None or name in chosen) and name not in frozen
                self._place(name, torch.nn.Parameter(_as_torch(tensor), is_trained))
        self._frozen = frozen
        self._model.forget(self._paths)
        self._graphs = Graphs(prepared, self._paths)
        self._kinds = {name: found[name].dtype for name in self._paths}
        self.to(device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model, or a named tuple of its outputs."""
        tensors = {**self._signature.bind(args, kwargs), **self._weights()}
        device = common_device(tensors, CALLER)
        outputs, statistics = self._graphs.run(tensors, device, training=self.training, frozen=self._frozen)
        with torch.no_grad():
            for name, following in statistics.items():
                tensors[name].copy_(following)
        outputs = [tensor.to(device) for tensor in outputs]
        return outputs[0] if len(outputs) == 1 else _named(tuple(self._outputs))(*outputs)

    def export(self, path: str | Path) -> list[Path]:
        """Writes the model, in inference mode, with the weights as they are; returns the files that were written."""
        arrays = {name: _as_array(tensor) for name, tensor in self._weights().items()}
        return self._model.write(Path(path), arrays)

    def extra_repr(self) -> str:
        """What the model takes and gives."""
        return f"{self._signature} -> {', '.join(map(repr, self._outputs))}"

    def _weights(self) -> dict[str, torch.Tensor]:
        """Parameters and statistics by the names in the model, wherever they are by now."""
        found = {}
        for name, path in self._paths.items():
            owner, _, last = path.rpartition(".")
            tensor = getattr(self.get_submodule(owner), last)
            if KINDS.get(tensor.dtype) != self._kinds[name]:
                raise _wrong_type(tensor.dtype, self._kinds[name])
            found[name] = tensor
        return found

    def _place(self, name: str, tensor: torch.nn.Parameter | torch.nn.Buffer) -> None:
        """Gives a weight its name in nested modules; one that cannot be so has underscores for dots."""
        for path in (name, name.replace(".", "_"), f"weight_{len(self._paths)}"):
            if (owner := self._owner(path)) is not None:
                setattr(owner, path.rpartition(".")[2], tensor)
                self._paths[name] = path
                return

    def _owner(self, path: str) -> torch.nn.Module | None:
        """The module that a name belongs to, which may be new; None if the name is not free."""
        *parts, last = path.split(".")
        module: torch.nn.Module = self
        missing: list[str] = []
        for part in parts:
            below = None if missing else module._modules.get(part)
            if below is not None:
                module = below
            elif not part or (hasattr(module, part) if not missing else hasattr(torch.nn.Module, part)):
                return None
            else:
                missing.append(part)
        if not last or (hasattr(torch.nn.Module, last) if missing else hasattr(module, last)):
            return None
        for part in missing:
            module.add_module(part, torch.nn.Module())
            module = module._modules[part] or module
        return module

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Module":
        for kind in set(self._kinds.values()):
            if (changed := fn(torch.empty(0, dtype=DTYPES[kind])).dtype) != DTYPES[kind]:
                raise _wrong_type(changed, kind)
        super()._apply(fn, recurse)
        return self


class _Exported:
    """The model that its author knows, to be written again; the numbers of its weights are torch's."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model

    def copy(self) -> ir.Model:
        """A model that may be changed."""
        return self._model.clone()

    def forget(self, names: Iterable[str]) -> None:
        """Frees the memory of these weights, and reads others that are in files."""
        forget_numbers(self._model.graph, list(names))

    def write(self, path: Path, arrays: Mapping[str, Any]) -> list[Path]:
        """Writes the model with these weights."""
        model = self.copy()
        put_back(model, arrays)
        return save(model, path, path)

    def __deepcopy__(self, memo: Any) -> "_Exported":
        return self

    def __reduce__(self) -> Any:
        return _read, (ir.to_proto(self._model).SerializeToString(),)


def _read(model: bytes) -> _Exported:
    return _Exported(ir.from_proto(onnx.load_from_string(model)))


def _with_free_batch(prepared: Draft, model: _Exported) -> Draft:
    """The model for batches of any size, if it was exported for one, and nothing depends on that."""
    size = fixed_batch(prepared.graph)
    freed = None if size is None else with_free_batch(prepared, size, model.copy)
    return freed or prepared


def _floating(graph: ir.Graph) -> dict[str, Any]:
    """The floating-point weights of a model, by name."""
    return {
        name: value.const_value for name, value in graph.initializers.items()
        if value.const_value is not None and (kind := value.const_value.dtype) in DTYPES and kind.is_floating_point()
    }  # fmt: skip


def _matching(found: Mapping[str, Any], patterns: str | Sequence[str] | None, argument: str) -> set[str]:
    """The weights that names and patterns stand for."""
    chosen: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns or ():
        names = {pattern} if pattern in found else {n for n in found if fnmatch.fnmatchcase(n, pattern)}
        if not names:
            raise ValueError(
                f"{CALLER}: {argument} names {pattern!r}, which is no weight of the model{suggestion(pattern, found)}"
            )
        chosen |= names
    return chosen


def _as_torch(tensor: Any) -> torch.Tensor:
    """A copy in torch's memory."""
    array = np.array(tensor.numpy(), tensor.dtype.numpy())
    made: torch.Tensor = as_tensor(array.reshape(-1), torch).reshape(array.shape)
    return made


def _as_array(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().cpu()
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    return tensor.view(torch.int16).numpy().view(ir.DataType.BFLOAT16.numpy())


def _wrong_type(dtype: torch.dtype, expected: ir.DataType) -> TypeError:
    return TypeError(
        f"{CALLER}: a weight would be {dtype_name(dtype)}, but the model computes in {dtype_name(DTYPES[expected])}: "
        "convert the .onnx file, and keep .half(), .double() and .to(dtype) for the layers around it"
    )


@functools.cache
def _named(names: tuple[str, ...]) -> Any:
    return namedtuple("Outputs", names, rename=True)
