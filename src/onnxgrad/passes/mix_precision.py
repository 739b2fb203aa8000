"""Mixed precision: products and convolutions in a half type, as PyTorch's autocast has them; the rest in float32.

Parameters stay float32 and are cast where they are used, once. Operators that lose nothing by it go on in the half type
that their inputs come in; norms, softmax, sums, losses and everything else get float32. Gradients follow by themselves,
each in the type of what it is the gradient of.
"""

from collections.abc import Container
from typing import Any

import onnx_ir as ir

from onnxgrad.passes.draft import Draft
from onnxgrad.passes.use_channels_last import is_conv, is_max_pool
from onnxgrad.schema import MICROSOFT, OWN, is_standard

NARROWED = {"MatMul", "Gemm", "Conv", "ConvTranspose"}
ATTENTION = {"FlashAttention": 3, "PackedAttention": 1}  # how many inputs come before the mask
NARROWED_OF_OTHERS = {(MICROSOFT, "FusedMatMul"), *((OWN, name) for name in ATTENTION)}
# Element-wise, with kernels of onnxruntime for both half types on CUDA, or operators that only move numbers.
FOLLOWING = {
    "Add", "Sub", "Mul", "Neg", "Relu", "Gelu", "Tanh", "Sigmoid", "HardSigmoid", "HardSwish", "Where",
    "Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose",
    "Unsqueeze",
}  # fmt: skip


def mix_precision(draft: Draft, dtype: ir.DataType) -> int:
    """Brings the nodes of a forward graph that gain by it to `dtype`; how many."""
    graph = draft.graph
    twins: dict[ir.Value, ir.Value] = {}  # casts, by what they cast
    changed: set[ir.Node] = set()
    narrow: dict[ir.Value, None] = {}  # values that were float32, in the order of the graph

    def cast(value: ir.Value, to: ir.DataType) -> ir.Value:
        if value not in twins:
            producer, kind, attributes, sources = value.producer(), "Cast", [ir.AttrInt64("to", to.value)], [value]
            if producer is not None and to == dtype and _rearranges_weights(producer):  # these are cast before all else
                kind, attributes = producer.op_type, list(producer.attributes.values())
                sources = [cast(weight, to) for weight in producer.inputs if weight is not None]
            node = ir.Node("", kind, sources, attributes, num_outputs=1)
            node.name, out = f"{value.name}_to_{to.name.lower()}", node.outputs[0]
            out.name, out.type, out.shape = f"{value.name}_{to.name.lower()}", ir.TensorType(to), value.shape
            if producer is None:
                graph.insert_before(graph[0], node)
            else:
                graph.insert_after(producer, node)
            twins[value] = out
        return twins[value]

    for node in list(graph):
        if not _changes(node, narrow) or (dtype == ir.DataType.BFLOAT16 and _has_no_bfloat16(node)):
            continue
        changed.add(node)
        for k, value in enumerate(node.inputs[: _inputs_cast(node)]):
            if value is not None and value.dtype == ir.DataType.FLOAT:
                node.replace_input_with(k, cast(value, dtype))
        for value in node.outputs[:1] if _has_statistics(node) else node.outputs:
            if value.dtype == ir.DataType.FLOAT:
                value.type = ir.TensorType(dtype)
                narrow[value] = None
    for value in narrow:
        others = [(user, k) for user, k in value.uses() if user not in changed]
        wide = cast(value, ir.DataType.FLOAT) if others or value.is_graph_output() else value
        for user, k in others:
            user.replace_input_with(k, wide)
        if value.is_graph_output():  # which keeps its type and its name
            value.name, wide.name = f"{value.name}_{dtype.name.lower()}", value.name
            graph.outputs[list(graph.outputs).index(value)] = wide
    return len(changed)


def _changes(node: ir.Node, narrow: Container[Any]) -> bool:
    """Whether a node computes in the half type."""
    if _has_statistics(node):
        return node.inputs[0] in narrow
    kind, numbers = node.op_type, [v for v in node.inputs if v is not None and v.dtype == ir.DataType.FLOAT]
    if (is_standard(node.domain) and kind in NARROWED) or (node.domain, kind) in NARROWED_OF_OTHERS:
        return bool(numbers) or any(v in narrow for v in node.inputs)
    follows = (is_standard(node.domain) and kind in FOLLOWING) or (node.domain, kind) == (OWN, "SeededDropout")
    follows = follows or is_max_pool(node)  # on CUDA, where onnxruntime has none for bfloat16, it will be ours
    return follows and any(v in narrow for v in node.inputs) and all(map(_is_weight, numbers))


def _rearranges_weights(node: ir.Node | None) -> bool:
    """Whether it transposes initializers, or puts them together."""
    if node is None or not is_standard(node.domain) or node.op_type not in ("Concat", "Transpose"):
        return False
    return all(v is not None and (v.is_initializer() or _rearranges_weights(v.producer())) for v in node.inputs)


def _inputs_cast(node: ir.Node) -> int | None:
    """How many inputs are cast if they are float32: masks of attention stay so. None: all of them."""
    return 0 if _has_statistics(node) else ATTENTION.get(node.op_type) if node.domain == OWN else None


def _has_no_bfloat16(node: ir.Node) -> bool:
    """Whether it convolves, but not images: ONNX has these for bfloat16 since opset 22 only."""
    return node.op_type in ("Conv", "ConvTranspose") and not is_conv(node)


def _is_weight(value: ir.Value) -> bool:
    """Whether it does not depend on the batch, so that it may be cast without a loss."""
    producer = value.producer()
    if value.is_initializer() or _rearranges_weights(producer):
        return True
    return producer is not None and producer.op_type == "Constant"


def _has_statistics(node: ir.Node) -> bool:
    """Whether only its first input and output have the half type: statistics and weights are float32."""
    return is_standard(node.domain) and node.op_type == "BatchNormalization"
