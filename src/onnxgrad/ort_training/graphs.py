"""The graphs of artifacts as a Module runs them: inputs include parameters; outputs are the user's and the gradients.

In the file every gradient ends in an accumulator that adds it to a buffer, or overwrites the buffer where
lazy_reset_grad says so. Here gradients are outputs, which a session writes to where they are wanted.
"""

import os
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import onnx_ir as ir

from onnxgrad.graph.files import expect_weights, load
from onnxgrad.graph.new_node import identity_of
from onnxgrad.passes.draft import Draft, Pass
from onnxgrad.passes.expand_training import expand_training
from onnxgrad.passes.finish import FOR_SESSIONS, drop_dead
from onnxgrad.passes.fuse_loss import fuse_losses
from onnxgrad.passes.prepare import OLD_GRAPH
from onnxgrad.passes.use_depthwise_conv import use_depthwise_conv
from onnxgrad.passes.use_permuted_matmul import use_permuted_matmul
from onnxgrad.schema import MICROSOFT

BUFFER = "_grad.accumulation.buffer"  # behind the name of a parameter: the input that its gradient is added to
OF_GRADIENTS = (BUFFER, "_grad", "_grad.accumulation.out")  # ends of names that are not the user's
RESET = "lazy_reset_grad"
RUNNING = ((3, 1), (4, 2))  # of BatchNormInternal: a statistic among its inputs, and its next value among its outputs


class Graph(NamedTuple):
    """A model for a session, and what its inputs and outputs are."""

    model: ir.Model
    inputs: list[str]  # the user's
    outputs: list[str]  # the user's
    shapes: dict[str, tuple[int, ...]]  # of the parameters, in the order of the graph's inputs
    gradients: dict[str, str]  # outputs, by parameter
    statistics: dict[str, str]  # outputs, by the parameter whose next value they are


def training_graph(
    path: str | os.PathLike[str], parameters: Collection[str], on_cpu: bool, own_products: bool
) -> Graph:
    """The training model of a file, for a checkpoint with these parameters."""
    draft = Draft(_load(path), "Module")
    inputs = [str(v.name) for v in draft.graph.inputs]
    outputs = [str(v.name) for v in draft.graph.outputs if not str(v.name).endswith(OF_GRADIENTS)]
    shapes = _shapes(draft.graph, parameters)
    gradients = _take_out_accumulators(draft.graph)
    statistics = _keep_statistics(draft.graph, parameters)
    kept = {*outputs, *gradients.values(), *statistics.values()}
    draft.graph.outputs[:] = [v for v in draft.graph.outputs if v.name in kept]
    draft.run(_passes(on_cpu, own_products))
    given = [name for name in inputs if name not in parameters and name != RESET and not name.endswith(OF_GRADIENTS)]
    return Graph(draft.model, given, outputs, shapes, gradients, statistics)


def evaluation_graph(path: str | os.PathLike[str], parameters: Collection[str], on_cpu: bool) -> Graph:
    """The evaluation model of a file."""
    draft = Draft(load_evaluation(path), "Module").run(_passes(on_cpu, own_products=False))
    graph = draft.graph
    given = [str(v.name) for v in graph.inputs if v.name not in parameters]
    return Graph(draft.model, given, [str(v.name) for v in graph.outputs], _shapes(graph, parameters), {}, {})


def load_evaluation(path: str | os.PathLike[str]) -> ir.Model:
    """The evaluation model as its file has it, made valid.

    generate_artifacts puts BatchNormalization into inference mode and leaves it outputs of train mode.
    """
    model = _load(path)
    for node in model.graph:
        if node.op_type != "BatchNormalization" or node.attributes.get_int("training_mode", 0) == 1:
            continue
        if not any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
            node.resize_outputs(1)
    return model


def _passes(on_cpu: bool, own_products: bool) -> list[Pass]:
    found: list[Callable[[Draft], Any]] = [
        *OLD_GRAPH,
        expand_training,
        drop_dead,
        *([use_permuted_matmul] if own_products else []),
        *([use_depthwise_conv] if on_cpu else []),
        fuse_losses,
        *FOR_SESSIONS,
    ]
    return found


def _load(path: str | os.PathLike[str]) -> ir.Model:
    model = load(os.fspath(path), "Module")
    expect_weights(model, "Module")
    return model


def _shapes(graph: ir.Graph, parameters: Collection[str]) -> dict[str, tuple[int, ...]]:
    found = {}
    for value in graph.inputs:
        if value.name in parameters:
            if value.shape is None or not value.shape.is_static():
                raise ValueError(f"Module: the model does not say what shape its parameter {value.name!r} has")
            found[str(value.name)] = tuple(value.shape.numpy())
    return found


def _take_out_accumulators(graph: ir.Graph) -> dict[str, str]:
    """Makes outputs of the gradients; their names by parameter."""
    found: dict[str, str] = {}
    for node in list(graph):
        if node.op_type != "InPlaceAccumulatorV2" or node.domain != MICROSOFT:
            continue
        buffer, gradient = node.inputs[0], node.inputs[1]
        assert buffer is not None and gradient is not None
        if not str(buffer.name).endswith(BUFFER) or any(v.uses() for v in node.outputs):
            continue
        name = str(buffer.name).removesuffix(BUFFER)
        for value in node.outputs:
            if value.is_graph_output():
                graph.outputs.remove(value)
        if gradient.is_graph_output() or gradient.is_graph_input():  # which can have one name only
            copy = identity_of(gradient, f"{name}_grad.copy")
            graph.insert_before(node, copy)
            gradient = copy.outputs[0]
        graph.outputs.append(gradient)
        graph.remove(node, safe=True)
        found[name] = str(gradient.name)
    for value in list(graph.inputs):
        if not value.uses() and (value.name == RESET or str(value.name).endswith(BUFFER)):
            graph.inputs.remove(value)
    return found


def _keep_statistics(graph: ir.Graph, parameters: Collection[str]) -> dict[str, str]:
    """Makes outputs of the next running means and variances, which 1.19.2 writes over the current ones."""
    found: dict[str, str] = {}
    for node in graph:
        if node.op_type != "BatchNormInternal" or node.domain != MICROSOFT:
            continue
        for source, target in RUNNING:
            current, following = node.inputs[source], node.outputs[target]
            if current is not None and current.name in parameters and current.is_graph_input():
                following.name = following.name or f"{current.name}_next"
                following.type, following.shape = current.type, current.shape
                if not following.is_graph_output():
                    graph.outputs.append(following)
                found[str(current.name)] = following.name
    return found
