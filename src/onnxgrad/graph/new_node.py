"""Nodes that passes write at a place of their own choice; the builder writes at the end of a graph."""

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir


def new_node(
    op_type: str,
    inputs: Sequence[ir.Value | None],
    name: str,
    attributes: Mapping[str, Any] | None = None,
    like: ir.Value | None = None,
) -> ir.Node:
    """A node of ONNX with one output, which has its name, and the type and shape of another value; in no graph yet."""
    node = ir.node(op_type, inputs, attributes, name=name)
    (result,) = node.outputs
    result.name = name
    if like is not None:
        result.type, result.shape = like.type, like.shape
    return node


def identity_of(value: ir.Value, name: str) -> ir.Node:
    """What gives a value under another name."""
    return new_node("Identity", [value], name, like=value)
