"""Models some of whose values are maps, as ZipMap of ai.onnx.ml makes them: onnx_ir has no such type."""

from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

MAP_TYPE = "onnxgrad.map_type"  # in the meta of an input or output that is a map, or a sequence of maps


def from_proto(proto: onnx.ModelProto) -> ir.Model:
    """ir.from_proto, of models with maps, too: save() gives inputs and outputs their types again."""
    types = {value.name: value.type for value in _maps(proto.graph)}
    if not types:
        return ir.from_proto(proto)
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for value in _maps(copy.graph):
        value.ClearField("type")
    model = ir.from_proto(copy)
    for found in (*model.graph.inputs, *model.graph.outputs):
        if found.name in types:
            found.meta[MAP_TYPE] = types[found.name]
    return model


def save(model: ir.Model, path: Path, external_data: str | None = None) -> None:
    """ir.save, with the types of maps."""
    ir.save(model, path, external_data=external_data)
    if any(MAP_TYPE in v.meta for v in model.graph.outputs):
        proto = onnx.load(path, load_external_data=False)
        _give_types(model, proto)
        onnx.save(proto, path)


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """ir.to_proto, with the types of maps."""
    proto = ir.to_proto(model)
    _give_types(model, proto)
    return proto


def _give_types(model: ir.Model, proto: onnx.ModelProto) -> None:
    types = {v.name: v.meta[MAP_TYPE] for v in model.graph.outputs if MAP_TYPE in v.meta}
    for output in proto.graph.output:
        if output.name in types:
            output.type.CopyFrom(types[output.name])


def _maps(graph: onnx.GraphProto) -> list[Any]:
    found = (*graph.input, *graph.output, *graph.value_info)
    return [v for v in found if v.type.HasField("map_type") or v.type.sequence_type.elem_type.HasField("map_type")]
