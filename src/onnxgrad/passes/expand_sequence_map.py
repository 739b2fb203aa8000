"""expand_sequence_map(): replaces SequenceMap by the Loop that defines it, which has a rule.

onnx has the definition as a function, whose body could not read values from outside.
"""

from typing import Any

import onnx_ir as ir

from onnxgrad.graph.builder import Builder, op
from onnxgrad.passes.draft import Draft
from onnxgrad.schema import is_standard


def expand_sequence_map(draft: Draft) -> None:
    """Does so in subgraphs, too."""
    nodes = [n for n in draft.graph.all_nodes() if n.op_type == "SequenceMap" and is_standard(n.domain)]
    if nodes:
        main = Builder(draft.graph)
        for node in nodes:
            _expand(node, main)
        draft.graph.sort()  # what was written came last


def _expand(node: Any, main: Builder) -> None:
    body, read = node.attributes["body"].as_graph(), list(node.inputs)
    outer, inner = Builder(node.graph, main), Builder(body, main)
    with outer.at_work(str(node.name)):
        length = op.SequenceLength(outer.tensor(read[0]))
        empty = [op.SequenceEmpty(dtype=v.dtype).value for v in node.outputs]

    number, more = inner.loop_inputs(str(node.name))
    before = [inner.parameter(f"{node.name}/{v.name}", v.type) for v in node.outputs]
    with inner.at_work(str(node.name)):
        for given, outside in zip(body.inputs, read, strict=True):
            is_sequence = isinstance(outside.type, ir.SequenceType)
            value = op.SequenceAt(outer.tensor(outside), number).value if is_sequence else outside
            given.replace_all_uses_with(value, replace_graph_outputs=True)
        results = [inner.copy(more)]
        results += [
            op.SequenceInsert(so_far, inner.tensor(result)) for so_far, result in zip(before, body.outputs, strict=True)
        ]
    body.inputs[:] = [t.value for t in (number, more, *before)]
    body.outputs[:] = [t.value for t in results]
    node.op_type = "Loop"
    node.resize_inputs(2 + len(empty))
    for k, value in enumerate([length.value, None, *empty]):
        node.replace_input_with(k, value)
