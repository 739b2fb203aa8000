"""Frozen weights: one array each, shared by all sessions of a trainer; the rest of their file is not kept."""

from typing import Any

import numpy as np
import onnx_ir as ir


def read_weights(*models: ir.Model) -> None:
    """Reads the initializers of models that are in the memory of a proto; those in files are mapped.

    A tensor of a proto makes a copy whenever it is asked for its numbers, and keeps the whole file in memory.
    """
    read: dict[int, tuple[Any, ir.Tensor[Any]]] = {}
    for model in models:
        for graph in model.graphs():
            for value in graph.initializers.values():
                tensor: Any = value.const_value
                if tensor is None or isinstance(tensor, (ir.ExternalTensor, ir.Tensor)):
                    continue
                if tensor.dtype is ir.DataType.STRING:  # of a proto, small, and no numbers
                    continue
                if id(tensor) not in read:
                    array = np.array(tensor.numpy(), order="C")
                    read[id(tensor)] = tensor, ir.Tensor(array, dtype=tensor.dtype, name=tensor.name)
                value.const_value = read[id(tensor)][1]
