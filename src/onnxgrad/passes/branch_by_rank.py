"""branch_by_rank(): moves nodes into an If whose branches have results of different ranks, if they read these.

Rules need to know the ranks of what they differentiate, and in each branch they are known.
"""

from typing import Any

import onnx_ir as ir

from onnxgrad.graph.builder import RANDOM, Builder
from onnxgrad.graph.node import descendants, needed_for, subgraphs, values_read
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.fold_shapes import fold_shapes
from onnxgrad.passes.infer import infer
from onnxgrad.schema import is_standard

BRANCHES = ("then_branch", "else_branch")
STAYS = RANDOM | {"BatchNormalization"}  # what training changes, and what may not be computed twice


def branch_by_rank(draft: Draft) -> None:
    """Does so in subgraphs, too."""
    while _take_in_once(draft.graph):
        infer(draft)
        fold_shapes(draft)


def _take_in_once(main: ir.Graph) -> bool:
    """Whether there was such an If."""
    if not any(subgraphs(node) for node in main):
        return False
    builder = Builder(main)
    for graph in (main, *main.subgraphs()):
        for node in graph:
            if node.op_type != "If" or not is_standard(node.domain):
                continue
            if any(_rank_is_unknown(v) and v.uses() for v in node.outputs) and _branches_decide(node):
                readers = _readers(graph, node)
                if not any(inner.op_type in STAYS for inner in _with_subgraphs(readers)):
                    _take_in(builder, graph, node, readers)
                    main.sort()  # it may read what came after it
                    return True
    return False


def _rank_is_unknown(value: ir.Value) -> bool:
    return isinstance(value.type, ir.TensorType) and value.shape is None


def _branches_decide(node: ir.Node) -> bool:
    """In a branch the ranks are known, or an If there decides them."""
    results = [v for name in BRANCHES for v in node.attributes[name].as_graph().outputs if _rank_is_unknown(v)]
    return all(isinstance(v.producer(), ir.Node) and v.producer().op_type == "If" for v in results)  # type: ignore[union-attr]


def _readers(graph: ir.Graph, node: ir.Node) -> list[ir.Node]:
    """What reads the results of unknown rank, or others that follow from them, and all that lies in between."""
    later = list(graph)[list(graph).index(node) + 1 :]
    unknown, moved = {v for v in node.outputs if _rank_is_unknown(v)}, set()
    for other in later:
        if any(v in unknown for v in values_read(other)):
            moved.add(other)
            unknown.update(filter(_rank_is_unknown, other.outputs))
    results, read = {v for n in moved for v in n.outputs}, {v for n in moved for v in values_read(n)}
    moved |= descendants(later, results) & needed_for(later, read)
    return [n for n in later if n in moved]


def _with_subgraphs(nodes: list[ir.Node]) -> set[ir.Node]:
    return {n for outer in nodes for n in (outer, *(i for g in subgraphs(outer) for i in g.all_nodes()))}


def _take_in(builder: Builder, graph: ir.Graph, node: Any, nodes: list[ir.Node]) -> None:
    everything = _with_subgraphs(nodes)
    first = len(node.outputs)
    results = [v for n in nodes for v in n.outputs if v.is_graph_output() or {u for u, _ in v.uses()} - everything]
    node.resize_outputs(first + len(results))
    for new, result in zip(node.outputs[first:], results, strict=True):
        new.name, new.type = result.name, result.type
        result.name = builder.fresh_value_name(f"{node.name}/{result.name}")
        for user, k in list(result.uses()):
            if user not in everything:
                user.replace_input_with(k, new)
        for k, output in enumerate(graph.outputs):
            if output is result:
                graph.outputs[k] = new
    graph.remove(nodes)
    given = [ir.Value(name=builder.fresh_value_name(f"{node.name}/{v.name}")) for v in node.outputs[:first]]
    for inner in everything:
        for k, value in enumerate(inner.inputs):
            if value in node.outputs:
                inner.replace_input_with(k, given[node.outputs.index(value)])
    tail = ir.Graph(given, results, nodes=nodes, name="tail")
    for name in BRANCHES:
        branch = Builder(node.attributes[name].as_graph(), builder)
        with branch.at_work(str(node.name)):
            ends = branch.inline(tail, [branch.tensor(v) for v in branch.graph.outputs])
        branch.graph.outputs.extend(t.value for t in ends)
    for inner in everything:
        for k in range(len(inner.inputs)):  # or what they read would count as used
            inner.replace_input_with(k, None)
