"""Weights that lie in subgraphs or in Constant nodes become initializers of the main graph."""

from collections import Counter

import onnx_ir as ir

from onnxgrad.graph.new_node import identity_of
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.stored_weights import is_dequantize


def lift_initializers(draft: Draft) -> None:
    """Makes initializers of subgraphs the main graph's, where gradients and training look for parameters."""
    subgraphs = list(draft.graph.subgraphs())
    if not any(graph.initializers for graph in subgraphs):
        return
    taken = set(draft.graph.initializers)
    taken |= {str(v.name) for node in draft.graph.all_nodes() for v in node.outputs}
    taken |= {str(v.name) for graph in (draft.graph, *subgraphs) for v in graph.inputs}
    for graph in subgraphs:
        for name, value in list(graph.initializers.items()):
            if value.is_graph_input():
                continue
            for k, output in enumerate(graph.outputs):
                if output is value:  # which has to be a node's
                    copy = identity_of(value, f"{value.name}_given")
                    graph.append(copy)
                    graph.outputs[k] = copy.outputs[0]
            graph.initializers.pop(name)
            while value.name in taken:  # two branches may each have one of the same name
                value.name = f"{value.name}_"
            taken.add(str(value.name))
            draft.graph.register_initializer(value)


def lift_constants(draft: Draft) -> None:
    """Makes initializers of Constant nodes with several floating-point numbers, and of integers that are dequantized.

    Some exporters keep weights there, in branches and loops too.
    """
    main = draft.graph
    taken: Counter[str] | None = None
    for graph in (main, *main.subgraphs()):
        for node in list(graph):
            if node.op_type != "Constant" or "value" not in node.attributes:  # Pad's, before opset 11, is a number
                continue
            tensor = node.attributes["value"].as_tensor()
            if tensor.size < 2:
                continue
            (result,) = node.outputs
            is_weight = tensor.dtype.is_floating_point() or any(is_dequantize(use.node) for use in result.uses())
            if result.is_graph_output() or not is_weight:
                continue
            name = str(result.name)
            if graph is not main:  # two branches may each have one of the same name
                taken = taken or _names_of_values(main)
                while taken[name] > (name == result.name):
                    name += "_"
                taken[name] += 1
            weight = ir.Value(name=name, type=ir.TensorType(tensor.dtype), const_value=tensor)
            weight.shape, result.name = ir.Shape(tensor.shape.numpy()), None
            main.register_initializer(weight)
            result.replace_all_uses_with(weight)
            graph.remove(node, safe=True)


def _names_of_values(main: ir.Graph) -> Counter[str]:
    """How often each name is given, in all graphs."""
    graphs = (main, *main.subgraphs())
    named = (v for graph in graphs for v in (*graph.inputs, *graph.initializers.values()))
    return Counter(str(v.name) for v in (*named, *(v for node in main.all_nodes() for v in node.outputs)))
