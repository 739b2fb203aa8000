"""forget_sequence_shapes(): gives a sequence that a Loop changes tensors of unknown shape.

onnx infers that all tensors of such a sequence have the shape of those that it begins with, which is wrong of some.
"""

import onnx_ir as ir

from onnxgrad.graph.builder import Builder
from onnxgrad.graph.gradients import forget_shapes
from onnxgrad.passes.draft import Draft
from onnxgrad.schema import is_standard


def forget_sequence_shapes(draft: Draft) -> None:
    """Does so in subgraphs, too; an empty sequence has no shapes."""
    loops = [n for n in draft.graph.all_nodes() if n.op_type == "Loop" and is_standard(n.domain)]
    states = [
        (node, k, value, inside.type)
        for node in loops
        for k, (value, inside) in enumerate(zip(node.inputs, node.attributes["body"].as_graph().inputs, strict=False))
        if value is not None and isinstance(inside.type, ir.SequenceType) and not _is_empty(value)
    ]
    if not states:
        return
    main = Builder(draft.graph)
    for node, k, value, kind in states:
        assert node.graph is not None
        builder = Builder(node.graph, main)
        value.type = value.type or kind
        with builder.at_work(str(node.name)):
            node.replace_input_with(k, forget_shapes(builder.tensor(value)).value)
    draft.graph.sort()  # what was written came last


def _is_empty(value: ir.Value) -> bool:
    producer = value.producer()
    return producer is not None and producer.op_type == "SequenceEmpty"
