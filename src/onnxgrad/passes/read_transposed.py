"""read_transposed: products that read a frozen weight transposed, in place of a transposed copy of it.

onnxruntime would compute the copy when the session is made and keep it beside the weight, for as long as it trains.
"""

import onnx_ir as ir

from onnxgrad.graph.replace import replace_node
from onnxgrad.passes.draft import Draft
from onnxgrad.schema import MICROSOFT, is_standard


def read_transposed(draft: Draft) -> None:
    """Makes FusedMatMul, an operator of onnxruntime's, of MatMul whose second factor is a weight transposed."""
    for node in [n for n in draft.graph if n.op_type == "Transpose" and is_standard(n.domain)]:
        weight, users = node.inputs[0], [use.node for use in node.outputs[0].uses()]
        if weight is None or weight.const_value is None or weight.is_graph_input():
            continue
        if weight.const_value.dtype != ir.DataType.FLOAT or weight.const_value.shape.rank() != 2:
            continue
        if node.outputs[0].is_graph_output() or not all(_multiplies(user, node.outputs[0]) for user in users):
            continue
        for user in users:
            inputs, attributes = [user.inputs[0], weight], [ir.AttrInt64("transB", 1)]
            replace_node(user, ir.Node(MICROSOFT, "FusedMatMul", inputs, attributes, num_outputs=1, name=user.name))
        draft.graph.remove(node, safe=True)


def _multiplies(node: ir.Node, value: ir.Value) -> bool:
    """Whether a node multiplies something of known rank by the value, from the right."""
    if node.op_type != "MatMul" or not is_standard(node.domain) or node.inputs[1] is not value:
        return False
    left = node.inputs[0]
    return left is not value and left is not None and left.shape is not None and len(left.shape) > 1
