"""expand_training: operators of onnxruntime-training that we have no kernels for become standard ones, and ours.

So they run in stock onnxruntime, on the CPU and on CUDA, and it can fuse what they consist of. The files of this folder
have a function for each operator, as expand_nodes.py asks for it.
"""

import importlib
import pkgutil
from collections.abc import Collection

import onnx_ir as ir

from onnxgrad.graph.node import subgraphs
from onnxgrad.op import operator_of
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.expand_nodes import expand_nodes
from onnxgrad.passes.expand_training.registry import IN_PLACE, WRITERS
from onnxgrad.rules.registry import RULES
from onnxgrad.schema import MICROSOFT, STRAYS, is_standard

__all__ = ["WRITERS", "adopt_strays", "expand_before_gradient", "expand_training", "show_updates"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def adopt_strays(draft: Draft) -> None:
    """Moves operators that onnxruntime-training has put among ONNX's own, which onnx refuses, to its other ones."""
    for node in draft.model.graph.all_nodes():
        if node.op_type in STRAYS and is_standard(node.domain):
            node.domain = MICROSOFT
            draft.graph.opset_imports.setdefault(MICROSOFT, 1)


def show_updates(draft: Draft) -> None:
    """Makes an output `<input>.updated` of what an operator would write into an input of the graph.

    Sessions do not write to what they are fed.
    """
    for node in draft.graph:
        updates = node.domain == MICROSOFT and node.attributes.get_int("training_mode", 1) != 0
        for k, source in IN_PLACE.get(node.op_type, {}).items() if updates else ():
            value = node.inputs[source] if source < len(node.inputs) else None
            if value is None or not value.is_graph_input():
                continue
            node.resize_outputs(max(len(node.outputs), k + 1))
            result = node.outputs[k]
            if not result.is_graph_output():
                result.name, result.type, result.shape = f"{value.name}.updated", value.type, value.shape
                draft.graph.outputs.append(result)


def expand_training(draft: Draft) -> None:
    """Writes other operators in place of those that have a writer here."""
    _expand_all(draft, WRITERS)


def expand_before_gradient(draft: Draft) -> None:
    """Those of them that have no rule, which would say more than the rules of what they consist of."""
    _expand_all(draft, {name for name in WRITERS if (MICROSOFT, name) not in RULES or operator_of(MICROSOFT, name)})


def _expand_all(draft: Draft, names: Collection[str]) -> None:
    def is_old(node: ir.Node) -> bool:
        if node.domain != MICROSOFT or node.op_type not in names:
            return False
        # Ours have no results of another type.
        return operator_of(MICROSOFT, node.op_type) is None or "output_type" in node.attributes

    for node in draft.graph:
        for inner in (n for graph in subgraphs(node) for n in graph.all_nodes() if is_old(n)):
            raise ValueError(
                f"{draft.caller}: {inner.op_type} (node {inner.name!r}) is in a subgraph of {node.op_type} (node "
                f"{node.name!r}), expected such operators in the main graph alone"
            )
    expand_nodes(draft, WRITERS, is_old)
