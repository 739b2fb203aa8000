"""Removes nodes that change nothing: on a GPU they copy tensors, and they prevent fusion.

Exporters write Identity for Dropout and for copies, Slices of everything, Reshapes to the same shape, Casts to the same
type, and Transposes that leave all axes where they are. The Identity of torch's detach() ends a gradient, and stays.
"""

import onnx_ir as ir

from onnxgrad.graph.builder import Builder
from onnxgrad.graph.node import is_transpose, permutation
from onnxgrad.graph.tensor import dims_of
from onnxgrad.graph.torch_export import is_detach
from onnxgrad.passes.draft import Draft
from onnxgrad.schema import is_standard

NO_END = 2**31 - 1  # and more: exporters' ends of slices that have none


def drop_identities(draft: Draft) -> int:
    """Has the readers of each such node read what it reads, unless it gives an output of the graph; how many."""
    builder = Builder(draft.graph)
    count = 0
    for node in [n for n in draft.graph if _changes_nothing(builder, n)]:
        source, result = node.inputs[0], node.outputs[0]
        if source is None or result.is_graph_output():
            continue
        result.replace_all_uses_with(source)
        draft.graph.remove(node, safe=True)
        count += 1
    return count


def _changes_nothing(builder: Builder, node: ir.Node) -> bool:
    if not is_standard(node.domain) or not node.inputs or node.inputs[0] is None:
        return False
    kind, source = node.op_type, node.inputs[0]
    if kind == "Cast":
        return source.dtype is not None and source.dtype.value == node.attributes["to"].as_int()
    if kind == "Transpose":
        return is_transpose(node) and permutation(node) == sorted(permutation(node))
    if kind == "Reshape":
        before, after = dims_of(source), dims_of(node.outputs[0])
        return before is not None and before == after and None not in before
    return (kind == "Identity" and not is_detach(node)) or (kind == "Slice" and _takes_everything(builder, node))


def _takes_everything(builder: Builder, node: ir.Node) -> bool:
    """Whether a Slice begins at 0, takes each element, and has no end."""
    starts, ends, _, *steps = (*(None if v is None else builder.constant_of(v) for v in node.inputs[1:]), None, None)
    if starts is None or ends is None or starts.any() or (ends < NO_END).any():
        return False
    return len(node.inputs) < 5 or node.inputs[4] is None or (steps[0] is not None and bool((steps[0] == 1).all()))
