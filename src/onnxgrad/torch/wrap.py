"""wrap(): a PyTorch module whose forward and backward passes run in onnxruntime."""

import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from onnxgrad.graph.files import load
from onnxgrad.passes.draft import without_garbage_collection
from onnxgrad.passes.prepare import prepare
from onnxgrad.torch.graphs import Graphs
from onnxgrad.torch.signature import Signature, common_device

CALLER = "wrap"
INSIDE = "module."  # what names of the module's weights begin with in an export


def wrap(module: torch.nn.Module) -> torch.nn.Module:
    """The module, run by onnxruntime, as ORTModule of onnxruntime-training does it; training goes on as before.

    Parameters, buffers and submodules are the module's own, under their names, so optimizers and checkpoints of either
    serve both. The first call with inputs of new types or shapes exports the module with torch.onnx.export, which needs
    onnxscript; the first dimension of each input is free where the exporter can have it so, and others are once they
    have had two sizes. What forward() takes and returns stays as it is: tensors in tuples, dicts and the like, and
    constants among them. What else Python does in forward() is done when it is exported, and not again; torch.no_grad()
    in it is not seen, .detach() is.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"{CALLER}: module is a {type(module).__name__}, expected a torch.nn.Module")
    return module if isinstance(module, _Wrapped) else _Wrapped(module)


class _Wrapped(torch.nn.Module):
    """Has the weights and submodules of another module, and its attributes."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.__dict__["_original"] = module  # no submodule, or names would change
        for what in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[what] = module.__dict__[what]
        self.training = module.training
        self._forget()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own forward() returns."""
        leaves, spec = pytree.tree_flatten(_in_order(self._original, args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        constants = [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves]
        modes = [m.training for m in self._original.modules()]
        call = _Call(spec, repr(constants), tuple((t.dtype, t.ndim) for t in tensors), tuple(modes))
        with self._lock:
            exports = self._exports.setdefault(call, [])
            export = next((e for e in exports if e.takes(tensors)), None)
            if export is None:
                export = _Export(self._original, leaves, spec, _free(tensors, [e.shapes for e in exports]))
                exports.insert(0, export)  # it is the one that takes the most
        return export.run(self._original, tensors)

    def train(self, mode: bool = True) -> "_Wrapped":
        """Switches both to train mode, or to inference mode."""
        self._original.train(mode)
        self.training = mode
        return self

    def extra_repr(self) -> str:
        """That of the module."""
        return self._original.extra_repr()

    def _get_name(self) -> str:
        return f"wrap:{type(self._original).__name__}"

    def _forget(self) -> None:
        self._exports: dict[_Call, list[_Export]] = {}
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_original" not in self.__dict__:  # it is being unpickled
                raise
            return getattr(self._original, name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_exports", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()


class _Call(NamedTuple):
    """What an export is for, shapes aside."""

    spec: pytree.TreeSpec
    constants: str
    kinds: tuple[tuple[torch.dtype, int], ...]
    modes: tuple[bool, ...]


def _in_order(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Arguments and keywords, these in the order of the signature, so that each call is told by what it gives."""
    parameters = inspect.signature(module.forward).parameters
    known = [name for name in parameters if name in kwargs]
    return tuple(args), {name: kwargs[name] for name in (*known, *(n for n in kwargs if n not in known))}


def _free(tensors: Sequence[torch.Tensor], seen: Sequence[Sequence[tuple[int, ...]]]) -> list[set[int]]:
    """The dimensions to be left free: the first of each tensor, and those that have had other sizes before."""
    return [
        {d for d, size in enumerate(tensor.shape) if d == 0 or any(shapes[k][d] != size for shapes in seen)}
        for k, tensor in enumerate(tensors)
    ]


class _Export:
    """A module as an ONNX model, for inputs of some structure and types."""

    def __init__(
        self, module: torch.nn.Module, leaves: Sequence[Any], spec: pytree.TreeSpec, free: Sequence[set[int]]
    ) -> None:
        returned: list[tuple[pytree.TreeSpec, list[Any]]] = []

        def note(spec: pytree.TreeSpec, constants: list[Any]) -> None:  # the exporter undoes what modules note
            returned.append((spec, constants))

        flat = _Flat(module, leaves, spec, note)
        tensors = tuple(leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor))
        self.shapes = [tuple(t.shape) for t in tensors]
        model = _exported(flat, tensors, free)
        with without_garbage_collection():
            prepared = prepare(load(model, CALLER), CALLER)
        self._signature = Signature(prepared.graph.inputs, CALLER)
        self._returned, self._constants = returned[-1]
        weights = dict(_floating(module))
        self._weights = [n for n in prepared.graph.initializers if n.removeprefix(INSIDE) in weights]
        self._graphs = Graphs(prepared, self._weights)
        self._is_trained = any(m.training for m in module.modules())
        # As PyTorch does it: a module in inference mode, within others in train mode, keeps its statistics.
        self._frozen = [
            f"{INSIDE}{name}.{what}".replace("..", ".")
            for name, m in module.named_modules() if not m.training for what in ("running_mean", "running_var")
        ]  # fmt: skip
        self._counted = [name for name, m in module.named_modules() if m.training and hasattr(m, "num_batches_tracked")]

    def takes(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether it is for inputs of these shapes."""
        shapes = [tuple(t.shape) for t in tensors]
        return shapes == self.shapes or self._signature.takes(shapes)

    def run(self, module: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> Any:
        """What the module would return."""
        given = dict(zip(self._signature.names, tensors, strict=True))
        weights = dict(_floating(module))
        given |= {name: weights[name.removeprefix(INSIDE)] for name in self._weights}
        device = common_device(given, CALLER)
        outputs, statistics = self._graphs.run(given, device, training=self._is_trained, frozen=self._frozen)
        with torch.no_grad():
            for name, following in statistics.items():
                given[name].copy_(following)
            for name in self._counted:
                counter = module.get_submodule(name).num_batches_tracked
                if isinstance(counter, torch.Tensor):
                    counter.add_(1)
        found: Iterator[torch.Tensor] = (tensor.to(device) for tensor in outputs)
        leaves = [next(found) if constant is None else constant[0] for constant in self._constants]
        return pytree.tree_unflatten(leaves, self._returned)


class _Flat(torch.nn.Module):
    """A module that takes tensors and returns a tuple of tensors, and notes what else the module returned."""

    def __init__(
        self,
        module: torch.nn.Module,
        leaves: Sequence[Any],
        spec: pytree.TreeSpec,
        note: Callable[[pytree.TreeSpec, list[Any]], None],
    ) -> None:
        super().__init__()
        self.training = module.training
        self.module = module
        self._leaves = [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves]
        self._spec, self._note = spec, note

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors among what the module returns."""
        given = iter(tensors)
        leaves = [next(given) if constant is None else constant[0] for constant in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        results, spec = pytree.tree_flatten(self.module(*args, **kwargs))
        self._note(spec, [None if isinstance(r, torch.Tensor) else (r,) for r in results])
        return tuple(r for r in results if isinstance(r, torch.Tensor))


def _exported(flat: _Flat, tensors: tuple[torch.Tensor, ...], free: Sequence[set[int]]) -> Any:
    """The model, with dimensions free where the exporter can have it so."""
    dims = tuple(dict.fromkeys(found, torch.export.Dim.AUTO) for found in free)
    kind = tensors[0].device.type if tensors else "cpu"
    try:
        with warnings.catch_warnings(), torch.autocast(kind, enabled=False):
            warnings.simplefilter("ignore")  # of the exporter, about itself
            program = torch.onnx.export(
                flat, tensors, dynamo=True, optimize=False, verbose=False, dynamic_shapes=(dims,)
            )
    except ImportError as error:
        raise ImportError(
            f"{CALLER}: torch.onnx.export needs onnxscript: pip install 'onnxgrad[torch]' ({error})"
        ) from None
    except Exception as error:  # of any type: the exporter runs forward()
        raise RuntimeError(
            f"{CALLER}: torch.onnx.export cannot export {type(flat.module).__name__}: {_reason(error)}"
        ) from error
    assert program is not None
    return program.model


def _reason(error: BaseException) -> str:
    """The first cause, which the exporter wraps in pages about itself."""
    while error.__cause__ is not None:
        error = error.__cause__
    first, _, _ = str(error).partition("\n")
    return f"{first.rstrip('.')} ({type(error).__name__})"


def _floating(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers that a graph is given at each call, those that have several names by each of them."""
    yield from module.named_parameters(remove_duplicate=False)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if buffer.is_floating_point():
            yield name, buffer
