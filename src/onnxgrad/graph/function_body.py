"""An operator's ONNX function written into a graph, where a rule has to differentiate what it computes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.functions.body import Body, Operand, Value
from onnxgrad.graph.builder import Builder
from onnxgrad.graph.tensor import Tensor
from onnxgrad.schema import MICROSOFT


class GraphBody(Body):
    """What the files of functions/ write with, on tensors of a builder: their types are known."""

    def __init__(self, builder: Builder) -> None:
        super().__init__()
        self.builder = builder

    def nodes(self, op_type: str, results: int, *inputs: Operand, **attributes: Any) -> list[Any]:
        """Adds a node with several results."""
        return list(self.builder.node(op_type, inputs, attributes, results))

    def like(self, value: Operand, typed: Any) -> Any:
        """A number as a scalar of the type of `typed`; tensors as they are."""
        return value if isinstance(value, Tensor) else self.builder.constant(value, typed.dtype)

    def numbers(self, values: Sequence[float], typed: Any) -> Any:
        """A vector of the type of `typed`."""
        return self.builder.constant(values, typed.dtype)

    def add_rows(self, rows: Any, numbers: Any, shape: Any) -> Any:
        """Zeros of that shape, a matrix, to which rows are added at their numbers: by a kernel of ours."""
        flat = self.node("Reshape", numbers, [-1])
        return self.builder.node("GatherGrad", [shape, flat, rows], domain=MICROSOFT)[0]

    def _constant(self, kind: int, dims: list[int], values: tuple[float, ...]) -> Value:
        constant: Any = self.builder.constant(np.reshape(values, dims), ir.DataType(kind))
        return constant  # type: ignore[no-any-return]
