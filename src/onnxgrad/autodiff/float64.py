"""in_float64(): a model with every floating-point type in it made float64, to see a gradient without rounding."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, defs, helper, numpy_helper

from onnxgrad.schema import is_standard

NARROW = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
NAMES_A_TYPE = {"Cast": "to", "EyeLike": "dtype", "RandomNormal": "dtype", "RandomUniform": "dtype",
                "RandomNormalLike": "dtype", "RandomUniformLike": "dtype", "Bernoulli": "dtype",
                "SequenceEmpty": "dtype", "GroupNormalization": "stash_type",
                "Attention": "softmax_precision", "FlexAttention": "softmax_precision"}  # fmt: skip


def in_float64(model: ModelProto) -> ModelProto:
    """A copy that computes in float64; weights must be in the model."""
    copy = ModelProto()
    copy.CopyFrom(model)
    _widen(copy.graph, copy)
    for function in copy.functions:
        _widen_nodes(function.node, copy)
    return copy


def _widen(graph: GraphProto, model: ModelProto) -> None:
    # Types are inferred anew, save those of operators that only their owner knows.
    foreign = {name for node in graph.node if not defs.has(node.op_type, node.domain) for name in node.output}
    kept = [info for info in graph.value_info if info.name in foreign]
    del graph.value_info[:]
    graph.value_info.extend(kept)
    for info in (*graph.input, *graph.output, *graph.value_info):
        _widen_type(info.type)
    single = {node.input[k] for node in graph.node for k in _float32_inputs(node)}
    before = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if tensor.name in single}
    for tensor in graph.initializer:
        tensor.CopyFrom(_widened(tensor))
    _widen_nodes(graph.node, model)
    _leave_in_float32(graph, before)


def _widen_nodes(nodes: Iterable[NodeProto], model: ModelProto) -> None:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                attribute.t.CopyFrom(_widened(attribute.t))
            elif attribute.type == AttributeProto.TYPE_PROTO:
                _widen_type(attribute.tp)
            elif attribute.type == AttributeProto.INT and NAMES_A_TYPE.get(node.op_type) == attribute.name:
                attribute.i = TensorProto.DOUBLE if attribute.i in NARROW else attribute.i
            # Only one that is there: to touch an absent graph is to add it.
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _widen(inner, model)
        _write_out(node)
        if node.op_type == "GroupNormalization" and any(o.domain == "" and o.version > 20 for o in model.opset_import):
            _stash_in_float64(node)


def _float32_inputs(node: NodeProto) -> list[int]:
    """Inputs that an operator takes in float32 only, such as Resize's scales."""
    if not defs.has(node.op_type, node.domain):
        return []
    declared = defs.get_schema(node.op_type, domain=node.domain).inputs[: len(node.input)]
    return [k for k, formal in enumerate(declared) if formal.type_str == "tensor(float)" and node.input[k]]


def _leave_in_float32(graph: GraphProto, constants: dict[str, Any]) -> None:
    """Gives such inputs a copy in float32: of an initializer, or by a Cast; casts results that are never wider."""
    nodes = list(graph.node)
    del graph.node[:]
    there = set()
    for node in nodes:
        for k in _float32_inputs(node):
            name = node.input[k]
            node.input[k] = f"{name}_in_float32"
            if node.input[k] in there:
                continue
            there.add(node.input[k])
            if name in constants:
                graph.initializer.append(numpy_helper.from_array(constants[name], node.input[k]))
            else:
                graph.node.append(helper.make_node("Cast", [name], [node.input[k]], to=TensorProto.FLOAT))
        narrow = [k for k, name in enumerate(node.output) if name and _is_always_float32(node, k)]
        results = {k: node.output[k] for k in narrow}
        for k, name in results.items():
            node.output[k] = f"{name}_in_float32"
        graph.node.append(node)
        for k, name in results.items():
            graph.node.append(helper.make_node("Cast", [node.output[k]], [name], to=TensorProto.DOUBLE))


def _is_always_float32(node: NodeProto, output: int) -> bool:
    """Whether an operator of ai.onnx.ml gives float32 whatever it is given, as OneHotEncoder does."""
    if is_standard(node.domain):
        return False
    declared = defs.get_schema(node.op_type, domain=node.domain).outputs if defs.has(node.op_type, node.domain) else []
    return output < len(declared) and declared[output].type_str == "tensor(float)"


def _write_out(node: NodeProto) -> None:
    """Constants and zeros that are float32 without saying so."""
    for attribute in node.attribute:
        if attribute.ref_attr_name:  # a function's, whose value stands at the call
            continue
        if node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
            content: Any = attribute.f if attribute.name == "value_float" else list(attribute.floats)
            attribute.CopyFrom(
                onnx.helper.make_attribute("value", numpy_helper.from_array(np.array(content, np.float64)))
            )
    untyped = node.op_type in ("RandomNormal", "RandomUniform", "SequenceEmpty")
    if untyped and not any(a.name == "dtype" for a in node.attribute):
        node.attribute.append(onnx.helper.make_attribute("dtype", TensorProto.DOUBLE))
    if node.op_type == "ConstantOfShape" and not node.attribute:
        node.attribute.append(onnx.helper.make_attribute("value", numpy_helper.from_array(np.zeros(1, np.float64))))


def _stash_in_float64(node: onnx.NodeProto) -> None:
    """float32 is what statistics are computed in by default."""
    if not any(a.name == "stash_type" for a in node.attribute):
        node.attribute.append(onnx.helper.make_attribute("stash_type", TensorProto.DOUBLE))


def _widen_type(kind: TypeProto) -> None:
    for nested in ("sequence_type", "optional_type"):
        if kind.HasField(nested):
            _widen_type(getattr(kind, nested).elem_type)
    if kind.HasField("tensor_type") and kind.tensor_type.elem_type in NARROW:
        kind.tensor_type.elem_type = TensorProto.DOUBLE


def _widened(tensor: TensorProto) -> TensorProto:
    if tensor.data_type not in NARROW:
        return tensor
    return numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name)
