"""What blocks ask of a graph, and do to all of it; people's own blocks import this module by its old name, too."""

import copy
import itertools
import math
from collections.abc import Iterable, Sequence

import onnx

from onnxgrad.ort_training.onnxblock import model_accessor

MOST_READ = 1024  # elements of a weight that inference of shapes may read: more is never a shape
_numbers = itertools.count(1)


def generate_graph_name(token: str) -> str:
    """A name that nothing in the current model has, with the token in it."""
    accessor = model_accessor.ACCESSOR.get()
    name = f"onnx::{token}::{next(_numbers)}"
    while accessor is not None and node_arg_exists(accessor.model, name):  # made by another process
        name = f"onnx::{token}::{next(_numbers)}"
    return name


def node_arg_exists(model: onnx.ModelProto, node_arg_name: str) -> bool:
    """Whether the graph has a value of this name."""
    graph = model.graph
    return any(node_arg_name in node.input or node_arg_name in node.output for node in graph.node) or any(
        value.name == node_arg_name for value in (*graph.input, *graph.initializer)
    )


def get_input_from_input_name(onnx_model: onnx.ModelProto, input_name: str) -> onnx.ValueInfoProto:
    """The graph input of this name."""
    return _found(input_name, onnx_model.graph.input, "input")


def get_output_from_output_name(onnx_model: onnx.ModelProto, output_name: str) -> onnx.ValueInfoProto:
    """The graph output of this name."""
    return _found(output_name, onnx_model.graph.output, "output")


def get_value_info_for_name(onnx_model: onnx.ModelProto, name: str) -> onnx.ValueInfoProto:
    """Type and shape of any value of the graph, which are inferred unless they are declared."""
    graph = onnx_model.graph
    declared = [value for value in (*graph.output, *graph.input, *graph.value_info) if value.name == name]
    return declared[0] if declared else _found(name, _inferred(onnx_model).value_info, "value")


def _found(name: str, values: Iterable[onnx.ValueInfoProto], what: str) -> onnx.ValueInfoProto:
    for value in values:
        if value.name == name:
            return value
    raise LookupError(f"the graph has no {what} {name!r} whose type is known")


def register_graph_outputs(model: onnx.ModelProto, output_names: str | Sequence[str]) -> None:
    """Makes values of these names the graph's outputs, in this order and no others."""
    names = [output_names] if isinstance(output_names, str) else output_names
    outputs = [copy.deepcopy(get_value_info_for_name(model, name)) for name in names]
    model.graph.value_info.extend(value for value in model.graph.output if value.name not in names)
    del model.graph.output[:]
    model.graph.output.extend(outputs)


def with_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which the types and shapes of all values are declared, as far as onnx can infer them."""
    inferred, model = _inferred(model), copy.deepcopy(model)
    for kind in ("value_info", "output"):
        values = getattr(model.graph, kind)
        del values[:]
        values.extend(getattr(inferred, kind))
    return model


def check(model: onnx.ModelProto) -> None:
    """Raises what onnx's checker has against the model."""
    onnx.checker.check_model(_without_weights(model), full_check=True)


def _inferred(model: onnx.ModelProto) -> onnx.GraphProto:
    return onnx.shape_inference.infer_shapes(_without_weights(model)).graph


def _without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same with inputs for large weights: onnx gets models as bytes, of which there are at most 2 GB."""
    graph = onnx.GraphProto(
        name=model.graph.name,
        node=model.graph.node,
        input=model.graph.input,
        output=model.graph.output,
        value_info=model.graph.value_info,
        sparse_initializer=model.graph.sparse_initializer,
    )
    inputs = {value.name for value in graph.input}
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) <= MOST_READ:
            graph.initializer.append(tensor)
        elif tensor.name not in inputs:  # where it is if the model is older than IR version 4
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return onnx.ModelProto(
        ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions, graph=graph
    )
