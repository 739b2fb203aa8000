"""The fields of a model and its loss: types and shapes of inputs and targets; worker processes do not import this."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.files import load
from onnxgrad.graph.tensor import dims_of
from onnxgrad.sources.request import Dims, Field


class _Prediction(NamedTuple):
    """As much of a value as a loss asks to say what its target is like."""

    dtype: ir.DataType
    shape: tuple[Any, ...] | None
    rank: int


def fields_of(model: Any, loss: Any, caller: str) -> tuple[Field, ...]:
    """The inputs of a model and the targets of its loss; `model` is a path, an onnx.ModelProto or an onnx_ir.Model."""
    graph = (model if isinstance(model, ir.Model) else load(model, caller)).graph
    values = {str(v.name): v for node in graph for v in node.outputs}
    targets = {part.target: _target(part, values.get(part.prediction)) for part in getattr(loss, "parts", ())}
    found = {}
    for value in graph.inputs:
        name = str(value.name)
        if name not in graph.initializers:
            known = targets.get(name)
            ignore = None if known is None else known.ignore
            dtype = None if value.dtype is None else value.dtype
            found[name] = Field(name, _numpy(dtype), _example(dims_of(value)), known is not None, ignore)
    found |= {n: f for n, f in targets.items() if n not in found and n not in graph.initializers}
    return tuple(found.values())


def _target(part: Any, value: ir.Value | None) -> Field:
    ignore = getattr(part, "ignore_index", None)
    shape = None if value is None else dims_of(value)
    # Of a value whose shape is unknown, a loss of classes still says that it takes classes.
    rank = len(shape) if shape is not None else max(2, getattr(part, "axis", 1) + 1)
    dtype = ir.DataType.FLOAT if value is None or value.dtype is None else value.dtype
    try:
        kind, dims = part.target_like(_Prediction(dtype, shape, rank))
    except (ValueError, AttributeError):  # the trainer says what is wrong with it, or the loss asks for more
        return Field(part.target, is_target=True)
    return Field(part.target, _numpy(kind), None if shape is None else _example(dims), True, ignore)


def _numpy(dtype: ir.DataType | None) -> np.dtype[Any] | None:
    try:
        return None if dtype is None else dtype.numpy()
    except TypeError:  # text, which no batch can hold: the trainer refuses it
        return None


def _example(dims: Iterable[Any] | None) -> Dims | None:
    """The dimensions of one example."""
    return None if dims is None else tuple(d if isinstance(d, int) else None for d in dims)[1:]
