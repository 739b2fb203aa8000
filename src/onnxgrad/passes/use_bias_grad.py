"""Sums over all axes but the last become BiasGrad on GPUs: gradients of biases, which onnxruntime sums slowly."""

import onnx_ir as ir

from onnxgrad.graph.builder import Builder
from onnxgrad.graph.replace import replace_node
from onnxgrad.graph.tensor import is_float
from onnxgrad.passes.draft import Draft
from onnxgrad.schema import OWN, is_standard


def use_bias_grad(draft: Draft) -> int:
    """Puts BiasGrad in place of such ReduceSums; how many."""
    builder = Builder(draft.graph)
    sums = [node for node in draft.graph if _is_bias_grad(builder, node)]
    for node in sums:
        new = ir.Node(OWN, "BiasGrad", node.inputs[:1], num_outputs=1, name=f"{node.name}_of_bias")
        replace_node(node, new)
    return len(sums)


def _is_bias_grad(builder: Builder, node: ir.Node) -> bool:
    if node.op_type != "ReduceSum" or not is_standard(node.domain) or node.attributes.get_int("keepdims", 1) != 0:
        return False
    X, axes = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    if X is None or X.shape is None or axes is None or not is_float(X):
        return False
    given, rank = builder.constant_of(axes), len(X.shape)
    return given is not None and rank > 1 and sorted(int(a) % rank for a in given) == list(range(rank - 1))
