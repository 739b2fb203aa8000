"""Adapters: what a model's file says about the LoRA adapters that are in its graph."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import onnx_ir as ir

LORA = "onnxgrad.lora"  # in the model's metadata, which every tool keeps
LINEAR, CONV, EMBEDDING = "linear", "conv", "embedding"  # kinds


class Adapter(NamedTuple):
    """A product A·B of low rank, times a scale, beside a weight.

    Of a linear layer A is [inputs, rank] and B [rank, outputs], of an embedding [rows, rank] and [rank, columns]; of a
    convolution they are weights of two convolutions, the second one 1×1.
    """

    module: str  # the name of the layer
    kind: str
    A: str  # names of initializers
    B: str
    rank: int
    scale: float  # alpha / rank
    dropout: float = 0.0


def adapters_of(model: ir.Model) -> list[Adapter]:
    """The adapters that a model has."""
    return [Adapter(**entry) for entry in json.loads(model.metadata_props.get(LORA, "[]"))]


def note_adapters(model: ir.Model, adapters: Sequence[Adapter]) -> None:
    """Says in the model's file which adapters it has."""
    if adapters:
        model.metadata_props[LORA] = json.dumps([adapter._asdict() for adapter in adapters])
    else:
        model.metadata_props.pop(LORA, None)


def names_of(adapters: Sequence[Adapter]) -> list[str]:
    """Of their initializers."""
    return [name for adapter in adapters for name in (adapter.A, adapter.B)]


def array_of(graph: ir.Graph, name: str) -> Any:
    """The numbers of an initializer."""
    tensor = graph.initializers[name].const_value
    assert tensor is not None
    return tensor.numpy()
