"""Graphs: a model whose weights are torch tensors, as a network in train mode and one in inference mode."""

import threading
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

from onnxgrad.autodiff.differentiate import weights_to_inputs
from onnxgrad.graph.builder import Builder
from onnxgrad.graph.new_node import identity_of
from onnxgrad.graph.torch_export import PRODUCER
from onnxgrad.passes.draft import Draft, without_garbage_collection
from onnxgrad.passes.finish import drop_dead
from onnxgrad.passes.fuse_gelu import fuse_gelu
from onnxgrad.passes.sample_variance import use_sample_variance
from onnxgrad.passes.sink_transposes import sink_transposes
from onnxgrad.passes.train_mode import SEED, to_inference_mode, to_train_mode
from onnxgrad.torch.autograd import differentiable
from onnxgrad.torch.network import Network
from onnxgrad.train.devices import Cpu


class Graphs:
    """A prepared model, and the names of the weights that calls give; it does not change, so that copies share it."""

    def __init__(self, prepared: Draft, weights: Collection[str]) -> None:
        self._prepared, self._weights = prepared, set(weights)
        self.outputs = [str(v.name) for v in prepared.graph.outputs]
        forget_numbers(prepared.graph, self._weights)
        self._modes: dict[tuple[bool, frozenset[str]], _Mode] = {}
        self._lock = threading.RLock()

    def run(
        self,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        *,
        training: bool,
        frozen: Collection[str] = (),
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """The outputs, and in train mode the next running statistics, by their names; those `frozen` stay."""
        mode = self._mode(training, frozenset(frozen) if training else frozenset())
        # As they were: the caller overwrites them before gradients are asked for.
        tensors = {**tensors, **{name: tensors[name].clone() for name in mode.following}}
        if mode.drops:
            tensors = {**tensors, SEED: torch.randint(1 << 62, (1,))}
        wrt = [n for n in mode.network.inputs if tensors[n].requires_grad] if torch.is_grad_enabled() else []
        plan = mode.network.plan(wrt, device)
        found = differentiable(plan, tensors) if plan.gradients else plan.forward(tensors)
        return [found[n] for n in mode.outputs], {now: found[then] for now, then in mode.following.items()}

    def _mode(self, training: bool, frozen: frozenset[str]) -> "_Mode":
        with self._lock:
            if (training, frozen) not in self._modes:
                with without_garbage_collection():
                    self._modes[training, frozen] = _Mode(self._prepared.clone(), self._weights, training, frozen)
            return self._modes[training, frozen]

    def __deepcopy__(self, memo: Any) -> "Graphs":
        return self

    def __reduce__(self) -> Any:
        draft = self._prepared
        return _read, (ir.to_proto(draft.model).SerializeToString(), draft.caller, sorted(self._weights))


def _read(model: bytes, caller: str, weights: list[str]) -> Graphs:
    return Graphs(Draft(ir.from_proto(onnx.load_from_string(model)), caller), weights)


class _Mode:
    """The model in train mode or inference mode."""

    def __init__(self, draft: Draft, weights: Collection[str], training: bool, frozen: Collection[str]) -> None:
        graph, statistics = draft.graph, []
        _give_outputs_nodes(graph)
        self.outputs = [str(v.name) for v in graph.outputs]
        if training:
            statistics = to_train_mode(graph, frozen=frozen)
        else:
            to_inference_mode(draft.model)
        fuse_gelu(draft)
        if Cpu().own_products:
            sink_transposes(draft)
        if draft.model.producer_name == PRODUCER:
            statistics = use_sample_variance(Builder(graph), statistics)
        drop_dead(draft)
        weights_to_inputs(graph, weights)
        self.drops = any(v.name == SEED for v in graph.inputs)
        self.following = {now: then for s in statistics for now, then in zip(s.current, s.following, strict=True)}
        self.network = Network(draft, self.outputs, list(self.following.values()))


def _give_outputs_nodes(graph: ir.Graph) -> None:
    """Has a node compute each output, also those that are inputs, weights or another output."""
    for k, value in enumerate(graph.outputs):
        if value.producer() is None or value in graph.outputs[:k]:
            node = identity_of(value, f"{value.name}_given_{k}")
            graph.append(node)
            graph.outputs[k] = node.outputs[0]


def forget_numbers(graph: ir.Graph, names: Collection[str]) -> None:
    """Frees the memory of weights that are torch's: a name of a file that is not there takes the place of each.

    Others that are in files are read, so that the model can go anywhere.
    """
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and name not in names:
            value.const_value = ir.Tensor(np.array(tensor.numpy()), dtype=tensor.dtype, name=name)
        elif tensor is not None and name in names:
            shape = ir.Shape(tensor.shape.numpy())
            value.const_value = ir.ExternalTensor("elsewhere", 0, tensor.nbytes, tensor.dtype, shape=shape, name=name)
