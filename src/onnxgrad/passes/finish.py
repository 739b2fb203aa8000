"""The end of every pipeline: removes dead nodes, restores dimensions, imports domains, adds functions."""

import onnx_ir as ir

from onnxgrad.functions.add_functions import add_functions
from onnxgrad.graph.dead import drop_dead_nodes
from onnxgrad.op import operator_of
from onnxgrad.passes.draft import Draft, Pass
from onnxgrad.passes.expand_training import expand_training
from onnxgrad.passes.weights_aside import weights_aside
from onnxgrad.schema import MICROSOFT


def drop_dead(draft: Draft) -> None:
    """Removes nodes and initializers that nobody uses, and blanks optional outputs of our operators."""
    graph = draft.graph
    drop_dead_nodes(graph)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            graph.initializers.pop(name)


def restore_dimensions(draft: Draft) -> None:
    """Takes the names off dimensions that had none."""
    for value in draft.graph.inputs:
        if str(value.name) in draft.unnamed:
            value.shape = draft.unnamed[str(value.name)]


def import_domains(draft: Draft) -> None:
    """Declares the versions of onnxruntime's domain and of ONNX functions.

    Where our kernels are registered, onnxruntime uses its own com.microsoft operators in models that import it only.
    """
    draft.graph.opset_imports.setdefault(MICROSOFT, 1)
    draft.model.ir_version = max(draft.model.ir_version, 8)


def add_own_functions(draft: Draft) -> None:
    """Adds our operators as functions of standard ones, so that any runtime runs the model."""
    nodes = [(node, operator_of(node.domain, node.op_type)) for node in draft.graph.all_nodes()]
    for node, ours in nodes:
        if ours is not None:  # onnxruntime wants all outputs of a function, but onnx_ir drops empty names at the end
            node.resize_outputs(len(ours.outputs))
            node.outputs[-1].name = node.outputs[-1].name or f"{node.name}_unused"
    if any(ours is not None for _, ours in nodes):
        with weights_aside(draft.graph) as weights:
            proto = ir.to_proto(draft.model)
        draft.model = ir.from_proto(add_functions(proto))
        weights.put_back(draft.graph)


# Where our kernels are registered.
FOR_SESSIONS: list[Pass] = [expand_training, drop_dead, restore_dimensions, import_domains]
FINISH: list[Pass] = [*FOR_SESSIONS, add_own_functions]
