"""One value, or one node, in the place of another."""

import itertools

import onnx_ir as ir


def take_place(new: ir.Value, old: ir.Value) -> None:
    """Lets `new` go where `old` went, with its name, and its type and shape as far as they are known."""
    new.type = old.type or new.type
    new.shape = new.shape if old.shape is None else old.shape
    new.name, old.name = old.name, f"{old.name}_replaced"
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def replace_node(old: ir.Node, new: ir.Node) -> None:
    """Puts a node where another one is, whose domain the graph then imports; further outputs are the new one's own."""
    graph = old.graph
    assert graph is not None
    graph.insert_before(old, new)
    for made, gone in zip(new.outputs, old.outputs, strict=False):
        take_place(made, gone)
    graph.remove(old, safe=True)
    if new.domain:
        graph.opset_imports.setdefault(new.domain, 1)


def put_behind(value: ir.Value, node: ir.Node, name: str) -> None:
    """Lets the result of a node that reads a value first go where that went, under its name; the value gets another."""
    result = node.outputs[0]
    value.replace_all_uses_with(result, replace_graph_outputs=True)
    node.replace_input_with(0, value)
    result.name, value.name, result.type = value.name, name, value.type


def move_written(last: ir.Node, to: ir.Node) -> None:
    """Moves what was written after the node that was the last one to behind another node."""
    graph = to.graph
    assert graph is not None
    written = [*itertools.takewhile(lambda n: n is not last, reversed(graph))][::-1]
    graph.remove(written)
    graph.insert_after(to, written)
