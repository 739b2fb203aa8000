"""weights_aside(): removes large weights from a model while onnx processes it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir

from onnxgrad.graph.tensor import MOST_READ


class Weights:
    """The tensors of initializers that are inputs for the time being, and the order of all initializers."""

    def __init__(self, graph: ir.Graph) -> None:
        self._order = list(graph.initializers)
        self._tensors: dict[str, Any] = {}
        self._declared: set[str] = set()
        for name, value in list(graph.initializers.items()):
            tensor = value.const_value
            if tensor is None or (tensor.size <= MOST_READ and not isinstance(tensor, ir.ExternalTensor)):
                continue
            self._tensors[name] = tensor
            graph.initializers.pop(name)
            value.const_value = None
            value.dtype, value.shape = tensor.dtype, ir.Shape(tensor.shape.numpy())
            if value.is_graph_input():  # as models before IR version 4 declare weights
                self._declared.add(name)
            else:
                graph.inputs.append(value)

    def put_back(self, graph: ir.Graph) -> None:
        """Makes initializers again of the inputs that stand for weights, in the old order."""
        moved = [v for v in graph.inputs if v.name in self._tensors]
        graph.inputs[:] = [v for v in graph.inputs if v.name not in self._tensors or v.name in self._declared]
        for value in moved:
            value.const_value = self._tensors[str(value.name)]
            graph.register_initializer(value)
        for name in self._order:
            if name in graph.initializers:
                graph.register_initializer(graph.initializers.pop(name))


@contextmanager
def weights_aside(graph: ir.Graph) -> Iterator[Weights]:
    """Within it all but small initializers are inputs; `put_back` does the same for a graph made from this one."""
    weights = Weights(graph)
    try:
        yield weights
    finally:
        weights.put_back(graph)
