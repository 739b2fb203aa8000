"""store_integers(): stores trained weights as integers again; see fake_quantize.py."""

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.initializers import set_numbers
from onnxgrad.graph.quantization import quantized
from onnxgrad.passes.stored_weights import (
    StoredWeight,
    is_dequantize,
    is_scale_of_bias,
    numbers_of,
    stored_weights,
)
from onnxgrad.tensor_types import Array


def store_integers(graph: ir.Graph, arrays: Mapping[str, Array]) -> set[str]:
    """Puts trained numbers into the integers of the original model, by scales that may be trained, too.

    Returns the names among `arrays` that it has written: weights, and their scales.
    """
    weights = stored_weights(graph)
    before = {id(w): (numbers_of(w.scheme.scale), _scale_of_product(w)) for w in weights}
    scales = {node.inputs[1] for node in graph.all_nodes() if is_dequantize(node)} | {w.scheme.scale for w in weights}
    written = {str(v.name) for v in scales if v is not None} & arrays.keys()
    for name in written:
        set_numbers(graph.initializers[name], arrays[name])
    for weight in sorted(weights, key=lambda w: not w.is_rounded):  # biases last: their scales follow from the others
        scale, of_product = before[id(weight)]
        follows = of_product is not None and is_scale_of_bias(weight, of_product)
        changed = follows and _follow(weight, of_product)
        if weight.name in arrays or changed or weight.scheme.scale.name in written:
            numbers = arrays[weight.name] if weight.name in arrays else weight.numbers(scale)
            set_numbers(weight.integers, _integers(weight, numbers))
            written |= {weight.name} & arrays.keys()
    return written


def _integers(weight: StoredWeight, numbers: Array) -> Array:
    """What QuantizeLinear makes of them, and for biases of 32 bits would make if it wrote these."""
    scheme, dtype = weight.scheme, weight.integers.dtype
    scale = numbers_of(scheme.scale)
    wide = np.promote_types(scale.dtype, np.float32) if weight.is_rounded else np.dtype(np.float64)
    given = numbers.astype(scale.dtype).astype(wide)
    return quantized(given, scale, scheme.zero_points(), dtype, scheme.axis, scheme.block_size)


def _scale_of_product(weight: StoredWeight) -> Array | None:
    """The scale of the first two factors of what a bias is added to, if both are dequantized by fixed scales."""
    users = [use.node for node in weight.dequantizers for use in node.outputs[0].uses()]
    if weight.is_rounded or len(users) != 1 or users[0].op_type not in ("Conv", "ConvTranspose", "Gemm"):
        return None
    producers = [v.producer() if v is not None else None for v in users[0].inputs[:2]]
    scales = [node.inputs[1] for node in producers if node is not None and is_dequantize(node)]
    if len(scales) != 2 or any(v is None or v.const_value is None for v in scales):
        return None
    x, w = (numbers_of(v) for v in scales if v is not None)
    product: Array = x * w
    return product


def _follow(weight: StoredWeight, before: Array | None) -> bool:
    """Gives a bias the scale that products have by now; whether that is another than before."""
    now = _scale_of_product(weight)
    if now is None or before is None or np.array_equal(now, before):
        return False
    scale = weight.scheme.scale
    set_numbers(scale, now.reshape(numbers_of(scale).shape))
    return True
