"""Layers that a user writes, as a model or as ONNX text, for replace_head()."""

import math
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.edit.initial import new_parameter, uniform
from onnxgrad.graph.files import load
from onnxgrad.graph.tensor import dims_of
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.find_parameters import COMBINED, role_at
from onnxgrad.passes.validate import validate
from onnxgrad.passes.write_gradients import bind_names
from onnxgrad.tensor_types import Array

CONSTANT = {"bias": 0.0, "scale": 1.0, "slope": 0.25}  # what new parameters of other roles than weights begin as


def read_layers(given: Any, model: Draft, rng: Any) -> Draft:
    """A model of one input: the first; others become weights. Text has the opsets of the model that it is for."""
    caller = f"{model.caller}: layers"
    if isinstance(given, str) and "=>" in given:
        given = _parsed(given, model, caller)
    draft = Draft(load(given, caller), caller)
    graph = draft.graph
    if not any(v.name not in graph.initializers for v in graph.inputs) or not graph.outputs:
        raise ValueError(f"{caller} have no input or no output, expected an input, which is what the old head read")
    draft.run([validate, bind_names])
    for value in [v for v in graph.inputs if v.name not in graph.initializers][1:]:
        _make_weight(draft, value, rng)
    return draft


def _parsed(text: str, model: Draft, caller: str) -> onnx.ModelProto:
    """A model's text, or that of a graph alone."""
    try:
        if text.lstrip().startswith("<"):
            return onnx.parser.parse_model(text)
        graph = onnx.parser.parse_graph(text)
    except onnx.parser.ParseError as error:
        (told,) = error.args
        reason = " ".join((told.decode() if isinstance(told, bytes) else str(told)).split())
        raise ValueError(f"{caller} are not ONNX text: {reason}") from None
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in model.graph.opset_imports.items()]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=max(model.model.ir_version, 4))


def _make_weight(draft: Draft, value: ir.Value, rng: Any) -> None:
    """An initializer of random numbers in place of an input."""
    dims = dims_of(value)
    if dims is None or not all(isinstance(d, int) for d in dims) or value.dtype is None:
        raise ValueError(
            f"{draft.caller} have an input {value.name!r} of the shape {list(dims or ())}, expected sizes: inputs but "
            "the first become new weights"
        )
    sizes = [int(d) for d in dims if isinstance(d, int)]
    dtype, name = value.dtype, str(value.name)
    numbers = _initial(value, sizes, dtype, rng)
    draft.graph.inputs.remove(value)
    value.name = None
    value.replace_all_uses_with(new_parameter(draft.graph, name, numbers, dtype), replace_graph_outputs=True)


def _role(value: ir.Value) -> tuple[str, int]:
    """What a new weight is for its first reader, and the axis of a matrix along which products are added up."""
    for node, at in value.uses():
        role = role_at(node, at) or COMBINED.get(node.op_type)
        if role is not None:
            is_last = at == 0 or bool(node.attributes.get_int("transB", 0))
            return role, int(is_last)
    return "weight", 0


def _initial(value: ir.Value, sizes: list[int], dtype: ir.DataType, rng: Any) -> Array:
    """Weights are random; a bias begins as 0, a scale as 1."""
    role, axis = _role(value)
    if role in CONSTANT:
        return np.full(sizes, CONSTANT[role], dtype.numpy())
    return uniform(rng, sizes, sizes[axis] if len(sizes) == 2 else math.prod(sizes[1:]), dtype)
