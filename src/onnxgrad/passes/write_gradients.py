"""write_gradients: replaces ONNX's operator Gradient by the nodes of the gradient.

Gradient names values of its graph: xs and zs, which a function depends on, and y, its result. Its inputs say where the
gradient of y with respect to xs is taken: at the named values themselves, or at others in their place.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from onnxgrad.graph.builder import Builder, op
from onnxgrad.graph.gradients import whole_gradient
from onnxgrad.graph.node import needed_for, subgraphs, values_read
from onnxgrad.graph.replace import take_place
from onnxgrad.graph.suggest import suggestion
from onnxgrad.passes.draft import Draft
from onnxgrad.rules.engine import NoRuleError, write_gradient
from onnxgrad.schema import PREVIEW_TRAINING


def bind_names(draft: Draft) -> None:
    """Makes further inputs of each Gradient of the values that it names, so that no pass drops or renames them."""
    _expect_none_inside(draft)
    for body in (draft.graph, *draft.model.functions.values()):
        if nodes := [node for node in body if is_gradient(node)]:
            known = {str(v.name): v for v in body.inputs}
            known |= {str(v.name): v for v in draft.graph.initializers.values() if body is draft.graph}
            known |= {str(v.name): v for node in body for v in node.outputs if v.name}
            for node in nodes:
                _bind(draft, node, known)


def _expect_none_inside(draft: Draft) -> None:
    inside = [node for graph in draft.graph.subgraphs() for node in graph if is_gradient(node)]
    if inside:
        raise ValueError(f"{_where(draft, inside[0])} is inside a subgraph, expected it in the main graph")


def _bind(draft: Draft, node: ir.Node, known: Mapping[str, ir.Value]) -> None:
    names = [*_names(node, "xs"), *_names(node, "zs")]
    if len(node.inputs) != len(names) or None in node.inputs:
        raise ValueError(
            f"{_where(draft, node)} has {sum(v is not None for v in node.inputs)} inputs, expected {len(names)}, "
            "one for each name of xs and zs"
        )
    for k, name in enumerate([*names, node.attributes["y"].as_string()]):
        if name not in known:
            raise ValueError(
                f"{_where(draft, node)} names {name!r}, which is not a value of its graph{suggestion(name, known)}"
            )
        node.resize_inputs(len(names) + k + 1)
        node.replace_input_with(len(names) + k, known[name])


def unbind_names(draft: Draft) -> None:
    """Undoes bind_names() in a model that is handed back: what a Gradient reads is named, as it is called by now."""
    for body in (draft.graph, *draft.model.functions.values()):
        for node in [node for node in body if is_gradient(node)]:
            given = len(node.inputs) // 2
            *names, y = [str(v.name) for v in node.inputs[given:] if v is not None]
            count = len(_names(node, "xs"))
            for attribute, values in (("xs", names[:count]), ("zs", names[count:])):
                if values:
                    node.attributes[attribute] = ir.AttrStrings(attribute, values)
            node.attributes["y"] = ir.AttrString("y", y)
            for k in range(given, len(node.inputs)):
                node.replace_input_with(k, None)
            node.resize_inputs(given)


def write_gradients(draft: Draft) -> None:
    """Writes the gradient that each Gradient stands for, in the order of the graph: one may be another's y."""
    _expect_none_inside(draft)
    nodes = [node for node in draft.graph if is_gradient(node)]
    if not nodes:
        return
    builder = Builder(draft.graph)
    for node in nodes:
        with builder.at_work(str(node.name)):
            try:
                _write(builder, node)
            except (ValueError, NoRuleError) as error:
                raise type(error)(f"{_where(draft, node)}: {error}") from None
        draft.graph.sort()
    draft.graph.opset_imports.pop(PREVIEW_TRAINING, None)


def is_gradient(node: ir.Node | onnx.NodeProto) -> bool:
    """Whether it is ONNX's operator."""
    return bool(node.op_type == "Gradient" and node.domain == PREVIEW_TRAINING)


def _write(builder: Builder, node: ir.Node) -> None:
    values: list[Any] = list(node.inputs)
    count = len(values) // 2
    given, named, y = values[:count], values[count:-1], values[-1]
    nodes = _function(builder.graph, y, named)
    if given != named:  # one that is given may depend on another, or be the same: each gets a name of its own
        given = [builder.copy(builder.tensor(v)).value for v in given]
        y = _at(builder, nodes, dict(zip(named, given, strict=True)), y)
    xs = given[: len(_names(node, "xs"))]
    of = builder.tensor(y)
    found = write_gradient(builder, {y: op.Expand(builder.constant(1, of.dtype), op.Shape(of))}, xs)
    for old, x in zip(node.outputs, xs, strict=False):
        if old.name:
            take_place(builder.copy(whole_gradient(builder.tensor(x), found[x])).value, old)
    builder.graph.remove(node, safe=True)


def _function(graph: ir.Graph, y: ir.Value, named: Sequence[ir.Value]) -> list[ir.Node]:
    """The nodes that compute y, from the values that are named on."""
    starts = {n for v in named if (n := v.producer()) is not None}
    nodes = needed_for(graph, {y})
    before = needed_for(graph, {v for n in starts for v in values_read(n)})
    read = {v for n in before | starts for v in values_read(n)}
    for value in named:
        if value in read:
            raise ValueError(f"xs and zs name {value.name!r} and a value that depends on it, expected independent ones")
    return [n for n in graph if n in nodes and n not in before and n not in starts]


def _at(builder: Builder, nodes: Sequence[ir.Node], given: dict[ir.Value, ir.Value], y: ir.Value) -> ir.Value:
    """What the nodes compute in place of y, given other values."""
    again = {old: new for old, new in given.items() if old is not new}
    for old, new in again.items():
        if old.dtype != new.dtype:
            raise ValueError(f"the input in place of {old.name!r} holds {new.dtype}, expected {old.dtype}")
    shapes_differ = any(old.shape != new.shape for old, new in again.items())
    for node in nodes:
        if any(v in again for v in values_read(node)):
            copy = builder.copy_of_node(node, again)
            if shapes_differ and not _forget_shapes_inside(copy):
                builder.infer_again(copy)
            again |= zip(node.outputs, copy.outputs, strict=True)
    return again.get(y, y)


def _forget_shapes_inside(node: ir.Node) -> bool:
    """Leaves the ranks alone known of a node with subgraphs, and of all in these; false for any other node."""
    graphs = [inner for graph in subgraphs(node) for inner in (graph, *graph.subgraphs())]
    values = [v for graph in graphs for n in graph for v in n.outputs] + [v for graph in graphs for v in graph.inputs]
    for value in (*values, *node.outputs) if graphs else ():
        value.shape = None if value.shape is None else ir.Shape([None] * len(value.shape))
    return bool(graphs)


def _names(node: ir.Node, attribute: str) -> Sequence[str]:
    return node.attributes.get_strings(attribute, [])


def _where(draft: Draft, node: ir.Node) -> str:
    return f"{draft.caller}: Gradient (node {node.name!r})"
