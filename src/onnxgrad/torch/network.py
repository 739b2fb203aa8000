"""Network: a model that torch.autograd runs and can differentiate any number of times."""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxgrad.autodiff.differentiate import Gradient, add_gradient
from onnxgrad.graph.tensor import is_float
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.finish import FINISH, FOR_SESSIONS, drop_dead
from onnxgrad.passes.prepare import prepare
from onnxgrad.passes.save_batch_statistics import save_batch_statistics
from onnxgrad.passes.use_depthwise_conv import use_depthwise_conv
from onnxgrad.passes.use_permuted_matmul import use_permuted_matmul
from onnxgrad.rules.engine import depends_on, influences
from onnxgrad.torch.keep import cut, keep_outputs
from onnxgrad.torch.session import TensorSession, place_of

Tensors = Mapping[str, torch.Tensor]


class Network:
    """A prepared model whose inputs are all tensors that it is called with; parameters are among them.

    Of its outputs, gradients flow through the first ones alone, `smooth`; `results` are those that are returned.
    """

    def __init__(self, draft: Draft, smooth: Sequence[str], more: Sequence[str] = ()) -> None:
        self._draft, self._smooth, self.results = draft, list(smooth), [*smooth, *more]
        self.inputs = [str(v.name) for v in draft.graph.inputs]
        self._plans: dict[tuple[tuple[str, ...], torch.device], Plan] = {}
        self._lock = threading.RLock()

    def plan(self, wrt: Sequence[str], device: torch.device) -> "Plan":
        """How a device computes the results, and afterwards the gradients of `wrt`, which are inputs."""
        key = tuple(wrt), device
        with self._lock:
            if key not in self._plans:
                self._plans[key] = Plan(self, *key)
            return self._plans[key]

    def copy(self) -> Draft:
        """The model, to be changed."""
        return self._draft.clone()

    def differentiated(self, wrt: Sequence[str]) -> tuple[Draft, Gradient | None]:
        """The model with the gradients that there are of `wrt` as further outputs; None if there are none."""
        draft = self.copy()
        graph = draft.graph
        nodes, results = list(graph), [v for v in graph.outputs if v.name in self._smooth]
        moved = depends_on(nodes, {v for v in graph.inputs if v.name in wrt})
        smooth = [v for v in results if v in moved and is_float(v)]
        reached = {v.name for v in influences(nodes, set(smooth))}
        wanted = [name for name in wrt if name in reached]
        gradient = None
        if smooth and wanted:
            of = [str(v.name) for v in smooth]
            gradient = add_gradient(draft, wanted, of, parameters_as_inputs=False, scalars_have_seeds=True)
        return draft, gradient


class Plan:
    """The sessions of a network on a device: one forward, and one backward, for the gradients of some inputs."""

    def __init__(self, network: Network, wrt: tuple[str, ...], device: torch.device) -> None:
        self._network, self.wrt, self.device = network, wrt, device
        self.inputs, self.results = network.inputs, network.results
        draft, gradient = network.differentiated(wrt)
        self.gradients: dict[str, str] = {} if gradient is None else gradient.outputs
        self.seeds: dict[str, str] = {} if gradient is None else gradient.seeds
        self.read = _inputs_of(draft, self.gradients.values()) - set(self.seeds.values())
        others = [str(v.name) for v in draft.graph.outputs if v.name not in self.gradients.values()]
        draft.run(_for_sessions(device))
        halves = cut(draft.model, others, self.seeds.values())
        self.kept = halves.kept
        self._forward = TensorSession(halves.forward, device)
        self._backward: ir.Model | TensorSession = halves.backward
        self._gradient: Network | None = None
        self._lock = threading.RLock()

    def forward(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The results and what is kept for the gradients."""
        return self._forward(tensors)

    def backward(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The gradients by input, given what `read` names, what was kept, and cotangents by the names in `seeds`."""
        with self._lock:  # made when it is first needed: many a forward pass is never differentiated
            if isinstance(self._backward, ir.Model):
                self._backward = TensorSession(self._backward, self.device)
        found = self._backward(tensors)
        return {name: found[output] for name, output in self.gradients.items()}

    def network_of_gradient(self) -> Network:
        """The gradients as a network of its own, of what `read` names and the cotangents."""
        with self._lock:
            if self._gradient is None:
                self._gradient = self._make_network_of_gradient()
            return self._gradient

    def _make_network_of_gradient(self) -> Network:
        draft, gradient = self._network.differentiated(self.wrt)
        assert gradient is not None
        keep_outputs(draft.graph, gradient.outputs.values())
        # A gradient is a model as any other.
        return Network(prepare(draft.run(FINISH).model, draft.caller), list(gradient.outputs.values()))


def _inputs_of(draft: Draft, outputs: Collection[str]) -> set[str]:
    """The inputs that some outputs are computed from."""
    copy = draft.clone()
    keep_outputs(copy.graph, outputs)
    return {str(v.name) for v in copy.graph.inputs}


def _for_sessions(device: torch.device) -> Iterator[Callable[[Draft], Any]]:
    """The passes of a training step (train/graphs.py) that work on any graph."""
    yield drop_dead
    yield save_batch_statistics
    place = place_of(device)
    if place.own_products:
        yield use_permuted_matmul
    if place.name == "cpu":
        yield use_depthwise_conv
    yield from FOR_SESSIONS
