"""fold_shapes(): what a model computes about shapes, computed beforehand where it is constant."""

import itertools

import onnx_ir as ir

from onnxgrad.domains import is_standard
from onnxgrad.graph.builder import FOLDED, Builder
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.infer import infer


def fold_shapes(draft: Draft) -> None:
    """Puts constants in the place of nodes whose inputs are constant integers.

    Exporters write axes, pads and shapes as long computations, which neither shape inference nor rules look through.
    """
    while _fold_once(draft.graph):
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
        added = [*itertools.takewhile(lambda n: n is not last, reversed(graph))][::-1]  # noqa: B023 (used at once)
        if added:
            graph.remove(added)
            graph.insert_before(node, added)
        for old, new in zip(node.outputs, results, strict=True):
            old.replace_all_uses_with(new.value)
        graph.remove(node, safe=True)
        folded = True
    return folded
