"""fold_shapes(): evaluates constant shape computations, and the Ifs that depend on them."""

import onnx_ir as ir

from onnxgrad.graph.builder import FOLDED, Builder
from onnxgrad.graph.replace import move_written, take_place
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.infer import infer
from onnxgrad.schema import is_standard


def fold_shapes(draft: Draft) -> None:
    """Puts constants in the place of nodes whose inputs are constant integers.

    Exporters write axes, pads and shapes as long computations, which neither shape inference nor rules look through. Of
    an If whose condition is among them, one branch is left.
    """
    while _fold_once(draft.graph) | _choose_branches(draft.graph):
        infer(draft)  # what is known by now may make more of them constant


def _fold_once(graph: ir.Graph) -> bool:
    """Whether there were any."""
    builder = Builder(graph)
    folded = False
    for node in list(graph):
        if node.op_type not in FOLDED or not is_standard(node.domain):
            continue
        if any(v.is_graph_output() for v in node.outputs):
            continue
        last = graph[-1]
        with builder.at_work(str(node.name)):
            results = builder.fold(node.op_type, "", list(node.inputs), node.attributes, len(node.outputs))
        if results is None:
            continue
        move_written(last, node)
        for old, new in zip(node.outputs, results, strict=True):
            old.replace_all_uses_with(new.value)
        graph.remove(node, safe=True)
        folded = True
    return folded


def _choose_branches(graph: ir.Graph) -> bool:
    """Whether there were any whose condition is known."""
    builder = Builder(graph)
    chosen = False
    for node in list(graph):
        if node.op_type != "If" or not is_standard(node.domain) or node.inputs[0] is None:
            continue
        condition = builder.constant_of(node.inputs[0])
        if condition is None:
            continue
        last = graph[-1]
        with builder.at_work(str(node.name)):
            branch = node.attributes["then_branch" if condition.item() else "else_branch"].as_graph()
            for old, new in zip(node.outputs, builder.inline(branch), strict=True):
                take_place(builder.copy(new).value, old)
        move_written(last, node)
        graph.remove(node, safe=True)
        chosen = True
    return chosen
