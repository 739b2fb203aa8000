"""Cross entropies as one operator: replaces SoftmaxCrossEntropyLoss, which onnxruntime runs as several nodes."""

import onnx_ir as ir

from onnxgrad.graph.builder import Builder
from onnxgrad.graph.new_node import new_node
from onnxgrad.graph.replace import replace_node
from onnxgrad.ops.softmax_cross_entropy_loss import NEVER_COUNTED
from onnxgrad.passes.draft import Draft
from onnxgrad.schema import MICROSOFT, is_standard


def fuse_losses(draft: Draft) -> int:
    """Puts SoftmaxCrossEntropyLossInternal in place of every SoftmaxCrossEntropyLoss of the graph; how many.

    A graph that is to be differentiated should keep them until then: so the gradients are those of the standard
    operator.
    """
    graph = draft.graph
    builder = Builder(graph)
    losses = [node for node in graph if node.op_type == "SoftmaxCrossEntropyLoss" and is_standard(node.domain)]
    for node in losses:
        _fuse(builder, node)
    return len(losses)


def _fuse(builder: Builder, node: ir.Node) -> None:
    scores, labels, *weights = node.inputs
    # Always there, since nodes that share an ONNX function had better agree on what they have.
    number = node.attributes.get_int("ignore_index", NEVER_COUNTED)
    ignored = new_node("Constant", [], builder.fresh_value_name(f"{node.name}_ignored"), {"value_int": number})
    value = ignored.outputs[0]
    value.dtype, value.shape = ir.DataType.INT64, ir.Shape([])
    builder.graph.insert_before(node, ignored)
    inputs = [scores, labels, weights[0] if weights else None, value]
    reduction = [node.attributes[name] for name in ("reduction",) if name in node.attributes]
    kind, count = "SoftmaxCrossEntropyLossInternal", len(node.outputs)
    replace_node(node, ir.Node(MICROSOFT, kind, inputs, reduction, num_outputs=count, name=f"{node.name}_fused"))
