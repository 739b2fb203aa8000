"""Replaces operators without a rule by their ONNX function bodies."""

from collections.abc import Callable
from typing import Any

import onnx
import onnx_ir as ir
from onnx import defs
from onnx_ir.passes import common

from onnxgrad.graph.tensor import dims_of
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.infer import infer
from onnxgrad.passes.name_nodes import name_nodes
from onnxgrad.rules.registry import RULES
from onnxgrad.schema import is_standard

DOMAIN = "onnxgrad.expanded"  # of the functions, for as long as it takes to inline them


def expand(draft: Draft) -> None:
    """Puts the bodies of such operators in their place, and those of the operators that these bodies use."""
    while _expand_once(draft):
        name_nodes(draft)
        infer(draft)


def _expand_once(draft: Draft) -> bool:
    """Whether there were any."""
    model, graph, found = draft.model, draft.graph, False
    opset = graph.opset_imports[""]
    for number, node in enumerate(list(graph.all_nodes())):
        if not is_standard(node.domain) or ("", node.op_type) in RULES or not defs.has(node.op_type):
            continue
        body = _body_of(node, opset)
        if body is None:
            continue
        body.domain, body.name = DOMAIN, f"{node.op_type}_{number}"
        function: Any = ir.from_proto(body)
        function.opset_imports[""] = opset
        model.functions[function.identifier()] = function
        _write_out_defaults(node, opset)
        for k, value in enumerate(node.outputs):
            value.name = value.name or f"{node.name}_unused_{k}"
        node.domain, node.op_type = DOMAIN, body.name
        found = True
    if found:
        graph.opset_imports[DOMAIN] = 1
        draft.model = common.InlinePass(lambda f: f.domain == DOMAIN)(model).model
        del draft.graph.opset_imports[DOMAIN]
    return found


def _body_of(node: ir.Node, opset: int) -> onnx.FunctionProto | None:
    schema: Any = defs.get_schema(node.op_type, max_inclusive_version=opset)
    if schema.has_context_dependent_function:
        types = [_type_bytes(v) for v in node.inputs]
        if any(t is None for t in types):
            return None  # its definition depends on types that are not known
        proto: Any = ir.to_proto(node)
        text = _newest(
            opset,
            schema.since_version,
            schema.get_context_dependent_function_with_opset_version,
            proto.SerializeToString(),
            types,
        )
    elif schema.has_function:
        text = _newest(opset, schema.since_version, schema.get_function_with_opset_version)
    else:
        return None
    if not text:
        return None
    body = onnx.FunctionProto()
    body.ParseFromString(text)
    del body.output[len(node.outputs) :]  # what a node does not ask for its definition may not compute
    made = {name for inner in body.node for name in inner.output}
    for name in body.output:
        if name not in made:  # left out by the node, though not at the end: anything will do
            body.node.append(onnx.helper.make_node("Constant", [], [name], value_float=0.0))
    return body


def _newest(opset: int, oldest: int, body: Callable[..., Any], *given: Any) -> bytes:
    """The body for an opset or, as onnx does not repeat it in opsets that only widen types, for one before; or none."""
    found = (bytes(body(version, *given)) for version in range(opset, oldest - 1, -1))
    return next((text for text in found if text), b"")


def _type_bytes(value: ir.Value | None) -> bytes | None:
    if value is None:
        return b""
    if value.dtype is None:
        return None
    proto = onnx.helper.make_tensor_type_proto(value.dtype.value, dims_of(value))
    return bytes(proto.SerializeToString())


def _write_out_defaults(node: ir.Node, opset: int) -> None:
    """A function's body reads attributes of the node, and knows no defaults."""
    schema: Any = defs.get_schema(node.op_type, max_inclusive_version=opset)
    for name, attribute in schema.attributes.items():
        if name not in node.attributes and attribute.default_value.name:
            node.attributes[name] = ir.from_proto(attribute.default_value)
