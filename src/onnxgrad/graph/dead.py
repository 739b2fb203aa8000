"""drop_dead_nodes(): what nobody uses goes."""

import onnx_ir as ir

from onnxgrad.graph.node import subgraphs
from onnxgrad.op import operator_of


def drop_dead_nodes(graph: ir.Graph) -> None:
    """Removes nodes whose results nobody uses, and blanks optional outputs of our operators that nobody uses."""
    for node in reversed(graph):
        if not any(v.uses() or v.is_graph_output() for v in node.outputs):
            for inner in (n for subgraph in subgraphs(node) for n in subgraph.all_nodes()):
                for k in range(len(inner.inputs)):  # or what they read would count as used
                    inner.replace_input_with(k, None)
            graph.remove(node, safe=True)
            continue
        if (ours := operator_of(node.domain, node.op_type)) is not None:
            for value, declared in zip(node.outputs, ours.outputs, strict=False):
                if declared.optional and not value.uses() and not value.is_graph_output():
                    value.name = ""
        for subgraph in subgraphs(node):
            drop_dead_nodes(subgraph)
