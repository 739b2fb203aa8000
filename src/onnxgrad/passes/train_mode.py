"""Train mode, in which Dropout drops and BatchNormalization measures its batch, and inference mode."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from onnxgrad.graph.new_node import new_node
from onnxgrad.graph.replace import replace_node
from onnxgrad.passes.batch_slice import COUNT, FIRST
from onnxgrad.schema import OWN, is_standard

MOMENTUM = 0.9  # of BatchNormalization, unless a node says otherwise
SEED = "dropout_seed"  # an input in train mode
TRAINING_MODE = 2  # of the inputs of Dropout, since opset 12
OLDEST_WITHOUT_IS_TEST = 7  # older opsets have an attribute for inference
APART = 1 << 40  # between the seeds of two nodes: more numbers than either draws


@dataclass(frozen=True)
class Statistics:
    """Running statistics of one BatchNormalization: the initializers, and the outputs with their next values."""

    node: str
    current: tuple[str, str]
    following: tuple[str, str]
    unread: str | None = None  # an output that only the graph itself reads


def to_train_mode(
    graph: ir.Graph, place: ir.Value | None = None, frozen: Collection[str] = (), by_weights: bool = False
) -> list[Statistics]:
    """Switches Dropout and BatchNormalization to train mode; returns the running statistics, which become outputs.

    A BatchNormalization whose statistics are `frozen`, or `by_weights` its scale and bias, normalizes with them.
    Dropout then depends on the input SEED, so that a run can be repeated and resumed. `place` says which examples of a
    batch these are, if not all (batch_slice.py): what is dropped of them is what would be dropped of them in the whole.
    """
    found = []
    dropouts = [n for n in graph if n.op_type == "Dropout" and is_standard(n.domain)]
    if dropouts:
        seed = ir.Value(name=SEED, shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT64))
        graph.inputs.append(seed)
        for number, node in enumerate(dropouts):
            _drop_by_seed(graph, node, seed, number, place)
    for node in list(graph):
        if _has_running_statistics(node):
            if _keeps_statistics(node, frozen, by_weights):
                _switch_off(node)
                continue
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
            found.append(_ask_for_statistics(graph, node))
    return found


def _keeps_statistics(node: ir.Node, frozen: Collection[str], by_weights: bool) -> bool:
    names = [None if v is None else v.name for v in node.inputs]
    weights, statistics = names[1:3], names[3:5]
    return any(n in frozen for n in statistics) or (by_weights and all(n in frozen for n in weights))


def to_inference_mode(model: ir.Model) -> None:
    """Switches BatchNormalization to inference and Dropout off; both stay, so that the model can be trained again."""
    parts: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for part in parts:
        opset = part.opset_imports.get("", OLDEST_WITHOUT_IS_TEST)
        for node in list(part.all_nodes()):
            if _has_running_statistics(node) or (node.op_type == "Dropout" and is_standard(node.domain)):
                _switch_off(node)
                if opset < OLDEST_WITHOUT_IS_TEST:
                    node.attributes["is_test"] = ir.AttrInt64("is_test", 1)


def _switch_off(node: ir.Node) -> None:
    """Leaves out what asks for train mode: inference is the default of all opsets that have a choice."""
    if node.op_type == "Dropout":
        asked = node.inputs[TRAINING_MODE] if len(node.inputs) > TRAINING_MODE else None
        node.resize_inputs(min(len(node.inputs), TRAINING_MODE))
        if asked is not None:
            _remove_unused(asked)
        return
    node.attributes.pop("training_mode", None)
    for value in node.outputs[1:]:
        if value.uses() or value.is_graph_output():
            raise ValueError(
                f"the model uses the running statistics that BatchNormalization (node {node.name!r}) computes "
                "in training: it cannot run in inference mode"
            )
    node.resize_outputs(1)


def _remove_unused(value: ir.Value) -> None:
    """An initializer that nothing uses any more makes onnxruntime complain."""
    producer, graph = value.producer(), value.graph
    if value.uses() or value.is_graph_input() or value.is_graph_output() or graph is None:
        return
    if value.is_initializer():
        graph.initializers.pop(str(value.name), None)
    elif producer is not None and producer.op_type == "Constant":
        graph.remove(producer, safe=True)


def _drop_by_seed(graph: ir.Graph, node: ir.Node, seed: ir.Value, number: int, place: ir.Value | None) -> None:
    """Puts SeededDropout in place of a Dropout; each node draws from numbers of its own."""
    ratio = _constant(node, 1, 0.5, "ratio")
    if len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
        raise ValueError(f"the model uses the mask of Dropout (node {node.name!r}): it cannot be trained")
    data = node.inputs[0]
    assert data is not None
    seeds = _Integers(graph, node)
    total = seeds.made("seed", "Add", seed, seeds.constant("number", [number * APART]))
    # Draws follow the elements, so a part draws what the whole draws from the part's first element on. What has no free
    # dimension, a weight say, is not an example's.
    if place is not None and not (data.shape is not None and data.shape.is_static()):
        first, count = (seeds.made(name, "Gather", place, seeds.constant(f"{name}_at", [at]))
                        for name, at in (("first", FIRST), ("count", COUNT)))  # fmt: skip
        elements = seeds.made("elements", "Mul", seeds.made("size", "Size", data), first)
        total = seeds.made("seed_here", "Add", total, seeds.made("before", "Div", elements, count))
    drop = ir.Node(OWN, "SeededDropout", [data, total], [ir.AttrFloat32("ratio", ratio)], num_outputs=1)
    drop.name = f"{node.name}_drop"
    drop.metadata_props.update(node.metadata_props)  # which module it is in
    replace_node(node, drop)


class _Integers:
    """Computes with a few integers, before a node."""

    def __init__(self, graph: ir.Graph, node: ir.Node) -> None:
        self._graph, self._node = graph, node

    def constant(self, name: str, numbers: list[int]) -> ir.Value:
        return self.made(name, "Constant", value=ir.Tensor(np.array(numbers)))

    def made(self, name: str, op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        made = new_node(op_type, inputs, f"{self._node.name}_{name}", attributes)
        (result,) = made.outputs
        result.type = ir.TensorType(ir.DataType.INT64)
        result.shape = ir.Shape([] if op_type == "Size" else [1])
        self._graph.insert_before(self._node, made)
        return result


def _constant(node: ir.Node, at: int, default: float, what: str) -> float:
    """An input that must be known: a weight, or a Constant."""
    value = node.inputs[at] if at < len(node.inputs) else None
    if value is None:
        return default
    tensor = get_const_tensor(value)
    if tensor is None:
        raise ValueError(f"the {what} of {node.op_type} (node {node.name!r}) is computed, expected a constant")
    return float(tensor.numpy().item())


def _has_running_statistics(node: ir.Node) -> bool:
    """Whether it is a BatchNormalization that behaves differently in the two modes.

    Where other nodes compute the statistics, as in weight standardization, it does what it says in either mode.
    """
    if node.op_type != "BatchNormalization" or not is_standard(node.domain):
        return False
    return all(v is not None and v.producer() is None for v in node.inputs[3:5])


def _ask_for_statistics(graph: ir.Graph, node: ir.Node) -> Statistics:
    mean, variance = node.inputs[3], node.inputs[4]
    if mean is None or variance is None or not (mean.is_initializer() and variance.is_initializer()):
        raise ValueError(
            f"BatchNormalization (node {node.name!r}) takes its statistics from inputs of the model, expected "
            "initializers"
        )
    if len(node.outputs) < 3:
        node.resize_outputs(3)
    names = []
    for value, source, what in zip(node.outputs[1:], (mean, variance), ("running_mean", "running_var"), strict=True):
        value.name = value.name or f"{node.name}_{what}"
        value.type, value.shape = source.type, source.shape
        if not value.is_graph_output():
            graph.outputs.append(value)
        names.append(str(value.name))
    return Statistics(str(node.name), (str(mean.name), str(variance.name)), (names[0], names[1]))
