"""Groups of element-wise nodes become one FusedElementwise each: on a GPU such nodes do little but read and write.

A group has nodes whose results have one shape, and that are joined by what they read: one reads what another one
gives, or both read the same. No path leads from a group through other nodes back into it. Products, sums and whatever
changes shapes stay outside, but not LayerNormalization along the last dimension, nor the gradient of its input.
"""

from collections.abc import Sequence

import onnx_ir as ir

from onnxgrad.graph.builder import Builder
from onnxgrad.graph.node import needed_for
from onnxgrad.graph.replace import take_place
from onnxgrad.graph.tensor import dims_of
from onnxgrad.ops.families.elementwise_program import NAME, ROW_MEAN
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.fuse_elementwise.fusible import ROW_WISE, inputs_of, is_fusible
from onnxgrad.passes.fuse_elementwise.groups import Groups
from onnxgrad.passes.fuse_elementwise.place_casts import place_casts
from onnxgrad.passes.fuse_elementwise.program_writer import ProgramWriter
from onnxgrad.schema import MICROSOFT, OWN, is_standard

__all__ = ["fuse_elementwise"]

MOST_PROGRAMS = 32  # of a node


def fuse_elementwise(draft: Draft, loss: str) -> int:
    """Fuses all that can be fused in the graph of a step, whose loss is an output; how many nodes were."""
    graph = draft.graph
    builder = Builder(graph)
    _split_gradients(graph)
    place_casts(builder)
    _read_shapes_above(builder)
    graph.sort()
    groups = Groups(builder)
    groups.compute_again()
    groups.give_again(needed_for(graph, {v for v in graph.outputs if v.name == loss}))
    fused = 0
    for nodes in groups.found():
        _replace(graph, groups, nodes)
        fused += len(nodes)
    graph.sort()
    _bundle(builder)
    return fused


def _split_gradients(graph: ir.Graph) -> None:
    """Has a node of its own for the input's gradient of each LayerNormalization: its other ones are sums of columns."""
    for node in [n for n in graph if n.op_type == "LayerNormalizationGrad" and n.domain == MICROSOFT]:
        if node.outputs[0].uses() and any(v.uses() or v.is_graph_output() for v in node.outputs[1:]):
            attributes = list(node.attributes.values())
            alone = ir.Node(node.domain, node.op_type, node.inputs, attributes, num_outputs=1, name=f"{node.name}_rows")
            graph.insert_before(node, alone)
            take_place(alone.outputs[0], node.outputs[0])
            node.outputs[0].name = ""


def _read_shapes_above(builder: Builder) -> None:
    """Has Shape read what an element-wise node reads, if that has the same shape, and not what it gives.

    Else a group would have to write it for that.
    """
    for node in [n for n in builder.graph if n.op_type == "Shape" and is_standard(n.domain)]:
        (value,) = inputs_of(node)
        while (producer := value.producer()) is not None and is_fusible(builder, producer):
            same = [v for v in inputs_of(producer) if dims_of(v) == dims_of(value)]
            if not same:
                break
            value = same[0]
        node.replace_input_with(0, value)


def _replace(graph: ir.Graph, groups: Groups, nodes: Sequence[ir.Node]) -> None:
    """One node in place of a group."""
    results = groups.results(nodes)
    program, inputs = _program(groups.builder, nodes, results)
    _put(graph, nodes, [program], inputs, results)


def _program(builder: Builder, nodes: Sequence[ir.Node], results: Sequence[ir.Value]) -> tuple[str, list[ir.Value]]:
    """What nodes compute, and from what."""
    if nodes[0].op_type == NAME:
        return nodes[0].attributes["program"].as_string(), inputs_of(nodes[0])
    writer = ProgramWriter(builder)
    for node in nodes:
        writer.write(node)
    return writer.program(results).text(), list(writer.inputs)


def _put(
    graph: ir.Graph,
    nodes: Sequence[ir.Node],
    programs: Sequence[str],
    inputs: Sequence[ir.Value],
    results: Sequence[ir.Value],
) -> None:
    """One node in place of several."""
    program = ir.AttrString("program", "\n\n".join(programs))
    fused = ir.Node(OWN, NAME, inputs, [program], num_outputs=len(results), name=f"{nodes[-1].name}_fused")
    graph.insert_after(nodes[-1], fused)
    for new, old in zip(fused.outputs, results, strict=True):
        take_place(new, old)
    graph.remove(nodes, safe=True)
    graph.opset_imports.setdefault(OWN, 1)


def _bundle(builder: Builder) -> None:
    """Has one launch for many groups, of any shapes, that give nothing but outputs of the graph.

    So are casts of gradients and updates of running statistics, of which there are hundreds, most of them short.
    """
    graph = builder.graph
    found = [n for n in graph if all(v.is_graph_output() and not v.uses() for v in n.outputs)]
    found = [n for n in found if (n.op_type == NAME and n.domain == OWN) or is_fusible(builder, n)]
    found = [n for n in found if n.op_type not in ROW_WISE and ROW_MEAN not in str(n.attributes.get("program", ""))]
    for start in range(0, len(found), MOST_PROGRAMS):
        nodes = found[start : start + MOST_PROGRAMS]
        if len(nodes) > 1:
            written = [_program(builder, [node], node.outputs) for node in nodes]
            inputs = [v for _, values in written for v in values]
            _put(graph, nodes, [text for text, _ in written], inputs, [v for node in nodes for v in node.outputs])
    graph.sort()
