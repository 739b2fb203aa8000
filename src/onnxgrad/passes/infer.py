"""infer(): types and shapes of all values, by onnx's shape inference and additions for its gaps."""

from typing import Any

import onnx
import onnx_ir as ir

from onnxgrad.arguments import check_size
from onnxgrad.functions.add_functions import nodes_within
from onnxgrad.graph.builder import SHAPED_BY
from onnxgrad.graph.tensor import Dim, dims_of
from onnxgrad.graph.validity import one_line
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.weights_aside import weights_aside
from onnxgrad.passes.write_gradients import is_gradient
from onnxgrad.schema import is_standard

SAME_AS_FIRST_INPUT = {"GroupNormalization", "MeanVarianceNormalization"}  # functions that onnx does not look into


def infer(draft: Draft) -> None:
    """Finds the types and shapes of a model's values, as far as they follow from its inputs and weights."""
    with weights_aside(draft.graph):
        proto = ir.to_proto(draft.model)
    declared = _forget_output_shapes(draft.graph, proto)
    _infer_from(draft, proto)
    merged = {value: _merged(dims_of(value), dims, draft.graph) for value, dims in declared.items()}
    if any(_contradict(dims, declared[value]) for value, dims in merged.items()):  # or what is declared inside is wrong
        _forget_inner_shapes(draft.graph, proto)
        _infer_from(draft, proto)
        merged = {value: _merged(dims_of(value), dims, draft.graph) for value, dims in declared.items()}
    for value, dims in merged.items():
        value.shape = ir.Shape(dims)
    if any(isinstance(v.type, ir.SequenceType) for node in draft.graph.all_nodes() for v in node.outputs):
        forget_new_names(draft.graph)
    _expect_sizes(draft)


def _infer_from(draft: Draft, proto: onnx.ModelProto) -> None:
    try:
        inferred = infer_shapes(proto, data_prop=True)
    except Exception as error:  # of any type, from C++
        raise ValueError(f"{draft.caller}: the model's shapes contradict each other: {one_line(error)}") from None
    _take_types(draft.graph, inferred.graph)


def _forget_inner_shapes(graph: ir.Graph, proto: onnx.ModelProto) -> None:
    computed = {value.name: value for node in graph for value in node.outputs}
    for info in proto.graph.value_info:  # weights are there, too
        if info.name in computed and info.type.HasField("tensor_type"):
            info.type.tensor_type.ClearField("shape")
    for value in computed.values():
        value.shape = None


def _contradict(found: tuple[Dim, ...], declared: tuple[Dim, ...]) -> bool:
    if len(found) != len(declared):
        return True
    return any(isinstance(d, int) and f != d for f, d in zip(found, declared, strict=True))


def _forget_output_shapes(graph: ir.Graph, proto: onnx.ModelProto) -> dict[ir.Value, tuple[Dim, ...]]:
    """Lets outputs that no node reads have the shapes that follow; onnxruntime only warns of other declared ones."""
    declared = {}
    for value, info in zip(graph.outputs, proto.graph.output, strict=True):
        dims = dims_of(value)
        if (
            dims is not None
            and value.producer() is not None
            and not value.uses()
            and isinstance(value.type, ir.TensorType)
        ):
            info.type.tensor_type.ClearField("shape")
            declared[value] = dims
            value.shape = None
    return declared


def _merged(found: tuple[Dim, ...] | None, declared: tuple[Dim, ...], graph: ir.Graph) -> tuple[Dim, ...]:
    """What is declared, unless it contradicts what was found."""
    if found is None or len(found) != len(declared):
        return declared if found is None else found
    of_inputs = {d for value in graph.inputs for d in dims_of(value) or ()}
    known = [f is not None and f in of_inputs for f in found]
    return tuple(
        f if isinstance(f, int) or d is None or (isinstance(d, int) and k) else d
        for f, d, k in zip(found, declared, known, strict=True)
    )


def forget_new_names(graph: ir.Graph) -> None:
    """Takes the names off dimensions that onnx gave them.

    It gives all tensors of a sequence the same, and its version converter, which infers one step after the other, gives
    one name to dimensions that have nothing to do with each other.
    """
    for value in (v for node in graph.all_nodes() for v in node.outputs):
        if value.shape is not None and any(str(d).startswith("unk__") for d in value.shape):
            value.shape = ir.Shape([None if str(d).startswith("unk__") else d for d in value.shape])


def _expect_sizes(draft: Draft) -> None:
    """Raises one sentence if a value is so large that its size overflows."""
    for value in (*draft.graph.inputs, *(v for node in draft.graph for v in node.outputs)):
        if value.shape is not None and value.shape.is_static():
            try:
                check_size(repr(value.name), value.shape.numpy())
            except ValueError as error:
                raise ValueError(f"{draft.caller}: {error}") from None


def _take_types(graph: Any, proto: onnx.GraphProto) -> None:
    """Gives the values of a graph the types that were found for its proto, in which its nodes are in the same order."""
    found = {info.name: info for info in (*proto.value_info, *proto.output)}
    for node, node_proto in zip(graph, proto.node, strict=True):
        for value in node.outputs:
            info = found.get(value.name)
            if info is not None:
                _take_type(value, info)
        attributes = {a.name: a for a in node_proto.attribute}
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                _take_types(attribute.value, attributes[attribute.name].g)
            elif attribute.type == ir.AttributeType.GRAPHS:
                for inner, inner_proto in zip(attribute.value, attributes[attribute.name].graphs, strict=True):
                    _take_types(inner, inner_proto)


def _take_type(value: ir.Value, info: onnx.ValueInfoProto) -> None:
    if not info.type.HasField("tensor_type"):
        ir.serde.deserialize_value_info_proto(info, value)
        return
    tensor = info.type.tensor_type
    if tensor.elem_type:
        value.dtype = ir.DataType(tensor.elem_type)
    if tensor.HasField("shape"):
        dims = [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in tensor.shape.dim]
        if value.shape is None or list(value.shape) != dims:
            value.shape = ir.Shape(dims)


def infer_shapes(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    """onnx.shape_inference.infer_shapes, and what it leaves out.

    That is as many dimensions as a shape has entries, where these are not known, and what Gradient gives.
    """
    inferred = _inferred(model, **options)
    while _declare_ranks(inferred.graph) or _declare_gradients(inferred.graph):
        inferred = _inferred(inferred, **options)
    return inferred


def _declare_ranks(graph: onnx.GraphProto) -> bool:
    """Gives results of Reshape, Squeeze and the like dimensions that are named; whether there were such results."""
    types = {v.name: v.type.tensor_type for v in (*graph.input, *graph.output, *graph.value_info)}
    lengths = {name: _length(kind) for name, kind in types.items()}
    lengths |= {t.name: t.dims[0] for t in graph.initializer if len(t.dims) == 1}
    changed = False
    for node in graph.node:
        if node.op_type == "Squeeze" and is_standard(node.domain) and len(node.input) == 1:
            changed |= _declare_squeezed(graph, node, types)
        at = SHAPED_BY.get(node.op_type)
        if at is None or not is_standard(node.domain) or len(node.input) <= at:
            continue
        (name,), length = node.output, lengths.get(node.input[at])
        kind = types.get(name)
        if length is None or (kind is not None and kind.HasField("shape")):
            continue
        source = types.get(node.input[0])
        if node.op_type == "Expand":
            if source is None or not source.HasField("shape"):
                continue
            length = max(length, len(source.shape.dim))
        if kind is None:
            if source is None:
                continue
            kind = graph.value_info.add(name=name).type.tensor_type
            kind.elem_type = source.elem_type
        for k in range(length):
            kind.shape.dim.add(dim_param=f"{name}_dim_{k}")
        types[name], changed = kind, True
    return changed


def _declare_gradients(graph: onnx.GraphProto) -> bool:
    """Gives results of Gradient the types and shapes of its inputs; whether there were such results."""
    nodes = [node for node in graph.node if is_gradient(node)]
    if not nodes:
        return False
    types = {v.name: v.type for v in (*graph.input, *graph.output, *graph.value_info)}
    changed = False
    for node in nodes:
        for name, source in zip(node.output, node.input, strict=False):
            if name and name not in types and source in types:
                graph.value_info.add(name=name).type.CopyFrom(types[source])
                changed = True
    return changed


def _declare_squeezed(graph: onnx.GraphProto, node: onnx.NodeProto, types: dict[str, Any]) -> bool:
    """Of what is squeezed without axes: a dimension that is not known is one that its author did not mean."""
    source, kind = types.get(node.input[0]), types.get(node.output[0])
    if source is None or not source.HasField("shape") or (kind is not None and kind.HasField("shape")):
        return False
    if kind is None:
        kind = graph.value_info.add(name=node.output[0]).type.tensor_type
        kind.elem_type = source.elem_type
    kind.shape.SetInParent()
    kind.shape.dim.extend(d for d in source.shape.dim if d.dim_value != 1)
    types[node.output[0]] = kind
    return True


def _length(kind: Any) -> int | None:
    """Of a vector."""
    if not kind.HasField("shape") or len(kind.shape.dim) != 1 or not kind.shape.dim[0].HasField("dim_value"):
        return None
    return int(kind.shape.dim[0].dim_value)


def _inferred(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    """onnx.shape_inference.infer_shapes, where nodes that it does not know stand in as Identity meanwhile."""
    if not any(_unknown(node) for node in nodes_within(model.graph)):
        return onnx.shape_inference.infer_shapes(model, **options)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node in filter(_unknown, nodes_within(copy.graph)):
        node.op_type = "Identity"
        del node.input[1:], node.attribute[:]
    inferred = onnx.shape_inference.infer_shapes(copy, **options)
    for node, before in zip(nodes_within(inferred.graph), nodes_within(model.graph), strict=True):
        if _unknown(before):
            node.CopyFrom(before)
    return inferred


def _unknown(node: onnx.NodeProto) -> bool:
    return node.op_type in SAME_AS_FIRST_INPUT and is_standard(node.domain)
