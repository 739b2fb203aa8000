"""infer_shapes(): onnx's shape inference, and what it leaves out."""

from collections.abc import Iterator
from typing import Any

import onnx

SAME_AS_FIRST_INPUT = {"GroupNormalization", "MeanVarianceNormalization"}  # functions that onnx does not look into


def infer_shapes(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    """onnx.shape_inference.infer_shapes, where nodes that it does not know stand in as Identity meanwhile."""
    if not any(_unknown(node) for node in _nodes(model.graph)):
        return onnx.shape_inference.infer_shapes(model, **options)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node in filter(_unknown, _nodes(copy.graph)):
        node.op_type = "Identity"
        del node.input[1:], node.attribute[:]
    inferred = onnx.shape_inference.infer_shapes(copy, **options)
    for node, before in zip(_nodes(inferred.graph), _nodes(model.graph), strict=True):
        if _unknown(before):
            node.CopyFrom(before)
    return inferred


def _unknown(node: onnx.NodeProto) -> bool:
    return node.op_type in SAME_AS_FIRST_INPUT and node.domain in ("", "ai.onnx")


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)
