"""infer_subgraphs(): types and shapes inside If, Scan and Loop, where onnx sees no constants from outside."""

from collections.abc import Sequence
from contextlib import suppress

import onnx_ir as ir
from onnx import defs

from onnxgrad.graph.builder import Builder
from onnxgrad.graph.node import subgraphs
from onnxgrad.graph.tensor import Dim, dims_of
from onnxgrad.passes.draft import Draft
from onnxgrad.schema import is_standard

Dims = Sequence[Dim] | None


def infer_subgraphs(draft: Draft) -> None:
    """Finds them node by node, in all graphs that have subgraphs or are some."""
    if any(subgraphs(node) for node in draft.graph):
        _infer(Builder(draft.graph))


def _infer(builder: Builder) -> None:
    for node in builder.graph:
        if is_standard(node.domain) and node.op_type == "If":
            branches = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
            for graph in branches:
                _infer(Builder(graph, builder))
            for value, *results in zip(node.outputs, *(graph.outputs for graph in branches), strict=True):
                value.type = value.type or results[0].type
                _learn(value, _common(*map(dims_of, results)))
        elif is_standard(node.domain) and node.op_type == "Scan":
            _infer_scan(builder, node)
        elif is_standard(node.domain) and node.op_type == "Loop":
            _infer_loop(builder, node)
        elif not subgraphs(node) and any(v.shape is None or not v.shape.is_static() for v in node.outputs):
            known = all(v is None or v.dtype is not None for v in node.inputs)
            if known and defs.has(node.op_type, "" if is_standard(node.domain) else node.domain):
                before = [dims_of(v) for v in node.outputs]
                with suppress(ValueError):  # whoever needs it is told that it is not known
                    builder.infer_again(node)
                for value, dims in zip(node.outputs, before, strict=True):
                    _learn(value, dims)


def _infer_scan(builder: Builder, node: ir.Node) -> None:
    """What a step reads is a slice of the node's input, and what it gives one of the node's output."""
    body, attributes = node.attributes["body"].as_graph(), node.attributes
    first = len(node.inputs) - attributes["num_scan_inputs"].as_int()
    inputs, outputs = ([0] * len(values) for values in (node.inputs[first:], body.outputs[first:]))
    if "scan_input_axes" in attributes:
        inputs = list(attributes["scan_input_axes"].as_ints())
    if "scan_output_axes" in attributes:
        outputs = list(attributes["scan_output_axes"].as_ints())
    steps: Dim = None
    for k, (value, outer) in enumerate(zip(body.inputs, node.inputs, strict=True)):
        dims = None if outer is None else dims_of(outer)
        if outer is None or dims is None:
            continue
        if k >= first:
            axis = inputs[k - first] % len(dims)
            steps, dims = steps or dims[axis], (*dims[:axis], *dims[axis + 1 :])
        inner = dims_of(value)
        value.type, value.shape = value.type or outer.type, ir.Shape(dims)
        _learn(value, inner)
    _infer(Builder(body, builder))
    for k, (value, result) in enumerate(zip(node.outputs, body.outputs, strict=False)):
        value.type = value.type or result.type
        dims = dims_of(result)
        if dims is not None and k >= first:
            axis = outputs[k - first] % (len(dims) + 1)
            dims = (*dims[:axis], steps, *dims[axis:])
        _learn(value, dims)


def _infer_loop(builder: Builder, node: ir.Node) -> None:
    """A state has the dimensions that it begins with where a step, given these, gives them again."""
    body = node.attributes["body"].as_graph()
    states = [v for v in node.inputs[2:] if v is not None]
    for value, outer in zip(body.inputs[2:], states, strict=True):
        value.type = value.type or outer.type
    dims: list[Dims] = [
        dims_of(value if isinstance(outer.type, ir.SequenceType) and outer.shape is None else outer)  # it may be empty
        for value, outer in zip(body.inputs[2:], states, strict=True)
    ]
    while True:
        trial = body.clone(allow_outer_scope_values=True)
        _declare(builder, trial, dims)
        after = [_common(d, dims_of(v)) for d, v in zip(dims, trial.outputs[1:], strict=False)]
        if [d and list(d) for d in after] == [d and list(d) for d in dims]:
            break
        dims = after
    _declare(builder, body, dims)
    for k, (value, result) in enumerate(zip(node.outputs, body.outputs[1:], strict=False)):
        value.type = value.type or result.type
        found = dims_of(result)
        _learn(value, found if k < len(states) or found is None else (None, *found))


def _declare(builder: Builder, body: ir.Graph, dims: Sequence[Dims]) -> None:
    for value, known in zip(body.inputs, [(), (), *dims], strict=True):
        value.shape = None if known is None else ir.Shape(known)
    _infer(Builder(body, builder))


def _learn(value: ir.Value, dims: Dims) -> None:
    """Takes over dimensions that are not known of a value; numbers rather than names."""
    known = dims_of(value)
    if dims is not None and (known is None or len(known) == len(dims)):
        known = known or (None,) * len(dims)
        value.shape = ir.Shape([d if k is None or isinstance(d, int) else k for k, d in zip(known, dims, strict=True)])


def _common(then: Dims, other: Dims) -> Dims:
    if then is None or other is None or len(then) != len(other):
        return None
    return [a if a == b else None for a, b in zip(then, other, strict=True)]
