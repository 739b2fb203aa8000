"""Initial values of new weights, as in torch's Linear and Conv layers."""

import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad.graph.initializers import add_initializer
from onnxgrad.tensor_types import Array


def uniform(rng: Any, shape: Sequence[int], inputs: int, dtype: ir.DataType) -> Array:
    """Evenly between -1/√n and 1/√n, where a result is a sum of n products."""
    bound = 1 / math.sqrt(max(inputs, 1))
    numbers: Array = rng.uniform(-bound, bound, shape).astype(dtype.numpy())
    return numbers


def new_parameter(graph: ir.Graph, name: str, numbers: Array, dtype: ir.DataType) -> ir.Value:
    """An initializer; its name gets a number if there is something of that name."""
    taken = {v.name for v in (*graph.inputs, *graph.initializers.values(), *(v for n in graph for v in n.outputs))}
    free = next(n for n in (name, *(f"{name}_{k}" for k in range(1, len(taken) + 2))) if n not in taken)
    return add_initializer(graph, free, numbers, dtype)
