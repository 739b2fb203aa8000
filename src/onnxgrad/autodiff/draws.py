"""Draws: what a model draws at random, as inputs of it, so that its runs can be compared with each other."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnxgrad.graph.builder import RANDOM
from onnxgrad.schema import is_standard


def is_random(node: NodeProto) -> bool:
    """Whether its results differ from run to run; a Dropout that is not told to be in train mode drops nothing."""
    if not is_standard(node.domain) or node.op_type not in RANDOM:
        return False
    return node.op_type != "Dropout" or (len(node.input) > 2 and node.input[2] != "")


def with_draws(model: ModelProto, draws: Mapping[str, Any] | None = None) -> ModelProto:
    """A copy of a float64 model that takes its draws as inputs; without `draws` one whose only outputs are its draws.

    A draw is named after the output that it decides. That of Dropout is what it multiplies its data by.
    """
    copy = ModelProto()
    copy.CopyFrom(model)
    graph, names = copy.graph, []
    del graph.node[:]
    for k, node in enumerate(model.graph.node):
        if not is_random(node):
            graph.node.append(node)
            continue
        name = f"{node.output[0]} drawn"
        names.append(name)
        if draws is None:
            graph.node.extend(_drawing(node, name, k))
        graph.node.extend(_decided(node, name))
    if draws is None:
        del graph.output[:]
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
        return copy
    for name in names:
        kind = helper.np_dtype_to_tensor_dtype(draws[name].dtype)
        graph.input.append(helper.make_tensor_value_info(name, kind, draws[name].shape))
    return copy


def _drawing(node: NodeProto, name: str, k: int) -> list[NodeProto]:
    """The node, with its draw in place of its outputs."""
    made = NodeProto()
    made.CopyFrom(node)
    made.output[:] = [name]
    if node.op_type != "Dropout":
        return [made]
    shape, ones = f"{name} shape {k}", f"{name} ones {k}"
    made.input[0] = ones
    one = numpy_helper.from_array(np.ones(1))
    return [
        helper.make_node("Shape", [node.input[0]], [shape]),
        helper.make_node("ConstantOfShape", [shape], [ones], value=one),
        made,
    ]


def _decided(node: NodeProto, name: str) -> list[NodeProto]:
    """The outputs of the node, given its draw."""
    if node.op_type != "Dropout":
        return [helper.make_node("Identity", [name], [node.output[0]])]
    found = [helper.make_node("Mul", [node.input[0], name], [node.output[0]])]
    if len(node.output) > 1 and node.output[1]:
        found.append(helper.make_node("Cast", [name], [node.output[1]], to=TensorProto.BOOL))
    return found
