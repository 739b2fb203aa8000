"""round_weights(): weights as integers, dequantized where they are used; the model computes in floating point."""

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.edit.requantize import Blocks
from onnxgrad.graph.initializers import add_initializer
from onnxgrad.graph.new_node import new_node
from onnxgrad.graph.quantization import ends_of, quantized
from onnxgrad.graph.tensor import is_float
from onnxgrad.schema import is_standard
from onnxgrad.tensor_types import Array

OPSET_OF_BLOCKS = 21  # the first with int4, and with several scales along an axis
FEWEST = 64  # numbers of a weight: a smaller one would hardly shrink


class Layout(NamedTuple):
    """Axes of a weight: along which products are summed, and that of the outputs."""

    summed: int | None  # of convolutions there are several
    outputs: int


def weights_of(node: ir.Node) -> list[ir.Value]:
    """Floating-point initializers that a node reads."""
    return [v for v in node.inputs if v is not None and v.is_initializer() and is_float(v)]


def round_weights(graph: ir.Graph, kind: str, per_channel: bool, block_size: int, excluded: Collection[str]) -> None:
    """Stores the weights of products and convolutions as integers of a `kind`, but for those of nodes excluded."""
    dtype = ir.DataType[kind.upper()]
    count = 0
    for value in list(graph.initializers.values()):
        layouts = {None if use.node.name in excluded else _layout(use.node, use.idx) for use in value.uses()}
        layout = layouts.pop() if len(layouts) == 1 else None
        tensor = value.const_value
        if layout is None or value not in weights_of(next(iter(value.uses())).node):
            continue
        if tensor is None or tensor.size < FEWEST or value.is_graph_output():
            continue
        blocks = block_size if layout.summed is not None and dtype.bitwidth == 4 else 0
        _store(graph, value, tensor.numpy(), dtype, layout, per_channel, blocks)
        count += 1
    if not count:
        raise ValueError("quantize: the model has no product or convolution whose weights can be quantized")


def _layout(node: ir.Node, at: int) -> Layout | None:
    """How a node uses its weight; None if it is none of a product or convolution."""
    value = node.inputs[at]
    rank = 0 if value is None or value.shape is None else len(value.shape)
    if not is_standard(node.domain) or at != 1 or rank < 2:
        return None
    if node.op_type == "MatMul":
        return Layout(rank - 2, rank - 1)
    if node.op_type == "Gemm":
        return Layout(1, 0) if node.attributes.get_int("transB", 0) else Layout(0, 1)
    if node.op_type == "ConvTranspose":  # whose outputs are those of a group
        return Layout(None, 1) if node.attributes.get_int("group", 1) == 1 else None
    return Layout(None, 0) if node.op_type == "Conv" else None


def _store(
    graph: ir.Graph, value: ir.Value, numbers: Array, dtype: Any, layout: Layout, per_channel: bool, block_size: int
) -> None:
    """Puts integers, their scales and a DequantizeLinear in the place of an initializer."""
    name = str(value.name)
    axis = layout.summed if block_size and layout.summed is not None else layout.outputs
    blocks = Blocks(numbers.shape, axis if block_size or per_channel else None, block_size)
    low, high = (blocks.reduced(find, numbers).astype(np.float32) for find in (np.minimum, np.maximum))
    scale, zeros = _scale(low, high, dtype)
    scale = scale.astype(numbers.dtype)
    integers = quantized(numbers.astype(np.float32), scale, zeros, dtype, axis, block_size)
    of_scale = ir.DataType.from_numpy(scale.dtype)
    made = {"quantized": (integers, dtype), "scale": (scale, of_scale), "zero_point": (zeros, dtype)}
    inputs = [add_initializer(graph, f"{name}_{what}", *given) for what, given in made.items()]
    attributes = {"axis": axis} if scale.size > 1 else {}
    attributes |= {"block_size": block_size} if block_size else {}
    node = new_node("DequantizeLinear", inputs, f"{name}_DequantizeLinear", attributes, like=value)
    node.outputs[0].name = f"{name}_dequantized"
    graph.insert_before(graph[0], node)
    value.replace_all_uses_with(node.outputs[0])
    graph.initializers.pop(name)


def _scale(low: Array, high: Array, dtype: Any) -> tuple[Array, Array]:
    """Scales and zero points: those of signed integers are 0, others use all levels for what there is."""
    first, last = ends_of(dtype)
    if dtype.is_signed():
        scale = _positive(np.maximum(-low, high) / last)
        return scale, np.zeros(scale.shape, dtype.numpy())
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    scale = _positive((high - low) / (last - first))
    return scale, np.rint(-low / scale).astype(np.uint8).astype(dtype.numpy())


def _positive(scale: Array) -> Array:
    """Of weights that are all 0, any scale will do."""
    found: Array = np.where(scale > np.finfo(np.float16).tiny, scale, 1).astype(np.float32)
    return found
