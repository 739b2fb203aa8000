"""known_values(): the values of a model with the types and shapes that follow from its inputs and weights."""

import onnx_ir as ir

from onnxgrad.passes.draft import Draft
from onnxgrad.passes.infer import infer
from onnxgrad.passes.prepare import prepare, read_small_tensors


def known_values(draft: Draft) -> dict[str, ir.Value]:
    """By name, those of the main graph; the draft stays as it is."""
    found = _values(draft.clone().run([read_small_tensors, infer]).graph)
    if all(v.type is not None and v.shape is not None for v in found.values()):
        return found
    # Of what onnx has no shape functions for, operators of onnxruntime say, more is known once it is written out.
    try:
        prepared = _values(prepare(draft.model.clone(), draft.caller).graph)
    except ValueError:  # whoever needs a type that is missing says so
        return found
    for name, value in found.items():
        if name in prepared:
            value.type = value.type or prepared[name].type
            value.shape = prepared[name].shape if value.shape is None else value.shape
    return found


def named_dims(value: ir.Value) -> ir.Shape | None:
    """A shape without the names that onnx made up for dimensions."""
    if value.shape is None:
        return None
    return ir.Shape(None if str(d).startswith("unk__") else d for d in value.shape)


def _values(graph: ir.Graph) -> dict[str, ir.Value]:
    inside = (v for node in graph for v in node.outputs)
    return {str(v.name): v for v in (*graph.initializers.values(), *graph.inputs, *inside) if v.name}
