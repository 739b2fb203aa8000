"""Cross entropies as one operator: replaces SoftmaxCrossEntropyLoss, which onnxruntime runs as several nodes."""

import onnx_ir as ir

from onnxgrad.graph.builder import Builder
from onnxgrad.graph.replace import take_place
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
    if losses:
        graph.opset_imports.setdefault(MICROSOFT, 1)
    return len(losses)


def _fuse(builder: Builder, node: ir.Node) -> None:
    scores, labels, *weights = node.inputs
    given, reduction = node.attributes.get("ignore_index"), node.attributes.get("reduction")
    # Always there, since nodes that share an ONNX function had better agree on what they have.
    number = ir.AttrInt64("value_int", NEVER_COUNTED if given is None else given.as_int())
    ignored = ir.Node("", "Constant", [], [number], num_outputs=1, name=f"{node.name}_ignored")
    value = ignored.outputs[0]
    value.name, value.dtype, value.shape = (
        builder.fresh_value_name(f"{node.name}_ignored"),
        ir.DataType.INT64,
        ir.Shape([]),
    )
    fused = ir.Node(
        MICROSOFT,
        "SoftmaxCrossEntropyLossInternal",
        [scores, labels, weights[0] if weights else None, value],
        [] if reduction is None else [ir.AttrString("reduction", reduction.as_string())],
        num_outputs=len(node.outputs),
        name=f"{node.name}_fused",
    )
    builder.graph.insert_before(node, [ignored, fused])
    for old, new in zip(node.outputs, fused.outputs, strict=True):
        take_place(new, old)
    builder.graph.remove(node, safe=True)
