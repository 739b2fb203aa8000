"""put_back(): trained numbers go into the model as its author knows it, which leaves train mode."""

from collections.abc import Mapping

import onnx_ir as ir

from onnxgrad.graph.initializers import set_numbers
from onnxgrad.passes.expand_ml import write_attributes
from onnxgrad.passes.store_integers import store_integers
from onnxgrad.passes.train_mode import to_inference_mode
from onnxgrad.tensor_types import Array


def put_back(model: ir.Model, arrays: Mapping[str, Array]) -> None:
    """Writes parameters and statistics, by name, where the model has them: attributes, integers or initializers."""
    written = write_attributes(model.graph, arrays) | store_integers(model.graph, arrays)
    for name in arrays.keys() - written:
        set_numbers(model.graph.initializers[name], arrays[name])
    to_inference_mode(model)
