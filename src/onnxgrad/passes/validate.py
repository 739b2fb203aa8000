"""validate(): reports an invalid model in one sentence, before any other pass reads it."""

from typing import Any

import onnx
import onnx_ir as ir

from onnxgrad.graph.builder import Builder, size_of_result
from onnxgrad.graph.files import weight_files
from onnxgrad.graph.validity import objection
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.weights_aside import weights_aside
from onnxgrad.schema import OF_ONNXRUNTIME, is_standard

BLOCKED_LAYOUT = "com.microsoft.nchwc"
MOST_NODES = 1_000_000  # of a model whose functions are written out
MOST_INTEGERS = 1 << 26  # in a vector that nodes make; onnx's shape inference holds every one of them as a dimension


def validate(draft: Draft) -> None:
    """Raises unless onnx accepts the model."""
    newest = onnx.defs.onnx_opset_version()
    opset = draft.graph.opset_imports.get("", newest)
    if not 1 <= opset <= newest:
        raise ValueError(
            f"{draft.caller}: the model imports opset {opset}, expected 1 to {newest}, the newest that the installed "
            "onnx knows"
        )
    _expect_no_blocked_layout(draft)
    _expect_finite_functions(draft)
    _expect_short_vectors(draft)
    with weights_aside(draft.graph):
        proto = ir.to_proto(draft.model)
    if weight_files(draft.model):  # which the checker would look for in the working directory
        for graph in (proto.graph, *proto.functions):
            _empty_external_tensors(graph)
    _hide_layer_norms(proto, opset)
    found = objection(proto)
    if found is not None:
        raise ValueError(f"{draft.caller}: the model is not valid: {found}")


def _expect_no_blocked_layout(draft: Draft) -> None:
    """onnxruntime optimizes with convolutions whose channels are in blocks as wide as a processor's registers."""
    for node in draft.graph.all_nodes():
        if node.domain == BLOCKED_LAYOUT:
            raise ValueError(
                f"{draft.caller}: {node.op_type} (node {node.name!r}) is of {BLOCKED_LAYOUT}, which onnxruntime writes "
                "for the processor at hand alone and which has no gradient, expected the file from before, or one "
                "optimized by GraphOptimizationLevel.ORT_ENABLE_EXTENDED"
            )


def _hide_layer_norms(proto: onnx.ModelProto, opset: int) -> None:
    """onnxruntime had LayerNormalization among ONNX's operators before ONNX did, and its optimizer writes it."""
    if onnx.defs.has("LayerNormalization", opset):
        return
    for node in proto.graph.node:
        if node.op_type == "LayerNormalization" and is_standard(node.domain):
            node.domain = OF_ONNXRUNTIME
    proto.opset_import.append(onnx.helper.make_opsetid(OF_ONNXRUNTIME, 1))


def _expect_finite_functions(draft: Draft) -> None:
    """Functions take the place of the nodes that call them: each that calls another one twice doubles the model."""
    sizes: dict[Any, int] = {}

    def size(nodes: Any, calling: tuple[Any, ...]) -> int:
        total = 0
        for node in nodes:
            key = node.op_identifier()
            if key in calling:
                raise ValueError(f"{draft.caller}: the model is not valid: the function {node.op_type!r} calls itself")
            if key in draft.model.functions and key not in sizes:
                sizes[key] = size(draft.model.functions[key].all_nodes(), (*calling, key))
            total += sizes.get(key, 1)
        return total

    found = size(draft.graph.all_nodes(), ())
    if draft.model.functions and found > MOST_NODES:
        raise ValueError(
            f"{draft.caller}: the model has {found:.3g} nodes once its functions are expanded, expected at most "
            f"{MOST_NODES:,}"
        )


def _expect_short_vectors(draft: Draft) -> None:
    """A range or a constant of a trillion integers is a few bytes in a file."""
    builder = Builder(draft.graph)
    for node in draft.graph:
        if node.op_type not in ("ConstantOfShape", "Range") or not is_standard(node.domain):
            continue
        inputs: list[Any] = [None if v is None else builder.constant_of(v) for v in node.inputs]
        if any(a is None for a in inputs) or (node.op_type == "ConstantOfShape" and inputs[0].size != 1):
            continue  # not a vector
        size = size_of_result(node.op_type, inputs)
        if size is not None and size > MOST_INTEGERS:
            raise ValueError(
                f"{draft.caller}: {node.op_type}{f' (node {node.name!r})' if node.name else ''} has a result of "
                f"{size:.3g} numbers, expected at most {MOST_INTEGERS:,}"
            )


def _empty_external_tensors(graph: Any) -> None:
    tensors = list(getattr(graph, "initializer", ()))
    for attribute in (a for node in graph.node for a in node.attribute):
        tensors += [*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors]
        for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            _empty_external_tensors(inner)
    for tensor in tensors:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            tensor.CopyFrom(onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=[0]))
