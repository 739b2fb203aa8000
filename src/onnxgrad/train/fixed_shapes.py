"""fix_shapes(): a graph for batches of given shapes, with numbers for all dimensions that are then known."""

from collections.abc import Mapping, Sequence

import onnx

from onnxgrad.graph.dimension import evaluated


def fix_shapes(graph: onnx.GraphProto, shapes: Mapping[str, Sequence[int]]) -> None:
    """Puts numbers in place of the names of dimensions, given the shapes of inputs.

    onnxruntime would find them by itself, but not behind operators of ours, of which it knows what the graph says.
    """
    sizes: dict[str, int] = {}
    for value in graph.input:
        if value.name not in shapes:
            continue
        dims = value.type.tensor_type.shape.dim
        # The names that passes/prepare.py gives to dimensions of inputs that have none, and the graph's values keep.
        names = [dim.dim_param or f"{value.name}_dim_{k}" for k, dim in enumerate(dims)]
        sizes |= dict(zip(names, shapes[value.name], strict=False))
        value.type.tensor_type.ClearField("shape")
        for size in shapes[value.name]:
            value.type.tensor_type.shape.dim.add().dim_value = size
    for value in (*graph.value_info, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            found = evaluated(dim.dim_param, sizes) if dim.dim_param else None
            if found is not None:
                dim.dim_value = found
