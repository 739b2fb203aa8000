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

    def new_input(name: str, kind: Any) -> ir.Value:
        name = inner.fresh_value_name(f"{node.name}/{name}")
        return ir.Value(name=name, type=kind, shape=ir.Shape([]) if isinstance(kind, ir.TensorType) else None)

    number, more = (new_input(n, ir.TensorType(k)) for n, k in (("k", ir.DataType.INT64), ("more", ir.DataType.BOOL)))
    before = [new_input(str(v.name), v.type) for v in node.outputs]
    with inner.at_work(str(node.name)):
        for given, outside in zip(body.inputs, read, strict=True):
            is_sequence = isinstance(outside.type, ir.SequenceType)
            value = op.SequenceAt(outer.tensor(outside), inner.tensor(number)).value if is_sequence else outside
            given.replace_all_uses_with(value, replace_graph_outputs=True)
        results = [inner.copy(inner.tensor(more))]
        results += [
            op.SequenceInsert(inner.tensor(so_far), inner.tensor(result))
            for so_far, result in zip(before, body.outputs, strict=True)
        ]
    body.inputs[:] = [number, more, *before]
    body.outputs[:] = [t.value for t in results]
    node.op_type = "Loop"
    node.resize_inputs(2 + len(empty))
    for k, value in enumerate([length.value, None, *empty]):
        node.replace_input_with(k, value)
