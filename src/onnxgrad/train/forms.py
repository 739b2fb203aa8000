"""The two forms of a model: as in training, where Dropout drops and BatchNormalization measures, and for inference."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

STANDARD = ("", "ai.onnx")


@dataclass(frozen=True)
class Statistics:
    """Running statistics of one BatchNormalization: the initializers, and the outputs with their next values."""

    node: str
    current: tuple[str, str]
    following: tuple[str, str]


def to_training_form(graph: ir.Graph) -> list[Statistics]:
    """Switches Dropout and BatchNormalization to training; gives the running statistics, which become outputs."""
    found = []
    for node in list(graph):
        if node.domain not in STANDARD:
            continue
        if node.op_type == "Dropout":
            _set_training_mode(graph, node, on=True)
        elif node.op_type == "BatchNormalization":
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
            found.append(_ask_for_statistics(graph, node))
    return found


def to_inference_form(graph: ir.Graph) -> None:
    """The other way round; Dropout nodes go."""
    for node in list(graph):
        if node.domain not in STANDARD:
            continue
        if node.op_type == "BatchNormalization":
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 0)
            for value in node.outputs[1:]:
                if value.uses() or value.is_graph_output():
                    raise ValueError(
                        f"the model uses the running statistics that BatchNormalization (node {node.name!r}) gives in "
                        "training: there is no inference form of it"
                    )
            node.resize_outputs(1)
        elif node.op_type == "Dropout":
            if len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
                _set_training_mode(graph, node, on=False)
            else:
                _bypass(graph, node)


def _set_training_mode(graph: ir.Graph, node: ir.Node, *, on: bool) -> None:
    constant = ir.Node("", "Constant", [], [ir.AttrTensor("value", ir.Tensor(np.array(on)))], num_outputs=1)
    constant.name = f"{node.name}_training_mode"
    (value,) = constant.outputs
    value.name, value.dtype, value.shape = str(constant.name), ir.DataType.BOOL, ir.Shape([])
    graph.insert_before(node, constant)
    node.resize_inputs(3)
    node.replace_input_with(2, value)


def _bypass(graph: ir.Graph, node: ir.Node) -> None:
    """Without the node: what it was given goes where its output went."""
    source, result = node.inputs[0], node.outputs[0]
    assert source is not None
    if result.is_graph_output():  # an output keeps its name
        identity = ir.Node("", "Identity", [source], num_outputs=1)
        identity.name, name = node.name, result.name
        new = identity.outputs[0]
        new.type, new.shape = result.type, result.shape
        graph.insert_before(node, identity)
        result.name = f"{name}_dropped"
        new.name = name
        result.replace_all_uses_with(new, replace_graph_outputs=True)
    else:
        result.replace_all_uses_with(source)
    graph.remove(node, safe=True)


def _ask_for_statistics(graph: ir.Graph, node: ir.Node) -> Statistics:
    mean, variance = node.inputs[3], node.inputs[4]
    if mean is None or variance is None or not (mean.is_initializer() and variance.is_initializer()):
        raise ValueError(
            f"BatchNormalization (node {node.name!r}) takes its statistics from other nodes, not from weights"
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
