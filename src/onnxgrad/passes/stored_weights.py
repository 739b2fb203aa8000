"""stored_weights(): which initializers are weights that a model stores as integers, with their scales and readers."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from onnxgrad.graph.quantization import dequantized
from onnxgrad.schema import MICROSOFT, is_standard
from onnxgrad.tensor_types import Array

ROUNDED = {"INT4", "UINT4", "INT8", "UINT8", "INT16", "UINT16"}  # what QuantizeLinear writes
EXACT = {"INT32"}  # of biases: so many levels that rounding to them is lost in float32
MOVING = {"Flatten", "Gather", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}  # no arithmetic
PRODUCTS = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}  # and what they are of floating-point numbers
# What onnxruntime's quantizers append to a weight's own name.
SUFFIXES = ("_quantized", "_DQ_Q4")


class Scheme(NamedTuple):
    """How integers stand for numbers: (integer - zero point) · scale."""

    scale: ir.Value
    zero_point: ir.Value | None
    axis: int  # of the scales, where there are several
    block_size: int  # how many numbers along the axis share a scale; 0: all, or each index has its own

    def zero_points(self) -> Array:
        """The integers that stand for 0."""
        return np.zeros((), np.int64) if self.zero_point is None else numbers_of(self.zero_point)


@dataclass
class IntegerProduct:
    """A product of integers, the Cast of its result, and the Mul with the scales of both, as dynamic quantization has.

    `other` is the scale of the first factor.
    """

    node: ir.Node
    result: ir.Value
    other: ir.Value


@dataclass
class StoredWeight:
    """A weight that is stored as integers."""

    name: str  # that it is trained under
    integers: ir.Value
    scheme: Scheme
    dequantizers: list[ir.Node] = field(default_factory=list)
    products: list[IntegerProduct] = field(default_factory=list)

    @property
    def is_rounded(self) -> bool:
        """Whether training has to round it, too."""
        return self.integers.dtype is not None and self.integers.dtype.name in ROUNDED

    def numbers(self, scale: Array) -> Array:
        """What its integers stand for by such scales, in their type."""
        scheme = self.scheme
        return dequantized(numbers_of(self.integers), scale, scheme.zero_points(), scheme.axis, scheme.block_size)


def stored_weights(graph: ir.Graph) -> list[StoredWeight]:
    """Those whose every reader dequantizes them by the same scale, each under a name that nothing else has."""
    taken = {str(v.name) for node in graph.all_nodes() for v in node.outputs}
    taken |= {str(v.name) for v in (*graph.inputs, *graph.initializers.values())}
    found = []
    for name, value in graph.initializers.items():
        if value.dtype is None or value.dtype.name not in ROUNDED | EXACT or value.const_value is None:
            continue
        weight = _weight(value)
        if weight is None:
            continue
        short = next((name.removesuffix(s) for s in SUFFIXES if name.endswith(s)), name)
        gone = {str(node.outputs[0].name) for node in weight.dequantizers if not _is_output(node)}
        weight.name = short if short not in taken - gone else name
        taken.add(weight.name)
        found.append(weight)
    return found


def _weight(value: ir.Value) -> StoredWeight | None:
    dequantizers, products, schemes = [], [], set()
    for reader, at in _readers(value):
        scheme: Scheme | None = None
        if reader is None:
            return None
        if is_dequantize(reader) and at == 0:
            scheme = _scheme_of(reader, reader.inputs[0])
            dequantizers.append(reader)
            is_moved = reader.inputs[0] is not value
            if scheme is None or not (_is_per_tensor(scheme) if is_moved else not _is_output(reader)):
                return None
        elif (found := _product(reader, at)) is not None:
            product, scheme = found
            products.append(product)
        if scheme is None:
            return None
        schemes.add(scheme)
    if len(schemes) != 1:
        return None
    return StoredWeight("", value, schemes.pop(), dequantizers, products)


def _readers(value: ir.Value) -> Iterator[tuple[ir.Node | None, int]]:
    """Who reads a value, or what only moved its numbers, and as which of the inputs; None if it is an output."""
    if value.is_graph_output():
        yield None, 0
    for node, at in value.uses():
        if node.op_type in MOVING and is_standard(node.domain) and at == 0:
            yield from _readers(node.outputs[0])
        else:
            yield node, at


def is_dequantize(node: ir.Node) -> bool:
    """Whether it is a DequantizeLinear, of ONNX or of onnxruntime."""
    return node.op_type == "DequantizeLinear" and (is_standard(node.domain) or node.domain == MICROSOFT)


def _scheme_of(node: ir.Node, integers: ir.Value | None) -> Scheme | None:
    _, scale, *zero_point = node.inputs
    if scale is None or get_const_tensor(scale) is None or integers is None:
        return None
    zero = zero_point[0] if zero_point else None
    if zero is not None and get_const_tensor(zero) is None:
        return None
    return Scheme(scale, zero, node.attributes.get_int("axis", 1), node.attributes.get_int("block_size", 0))


def _product(node: ir.Node, at: int) -> tuple[IntegerProduct, Scheme] | None:
    """An integer product whose second factor is a weight, if what follows scales it."""
    if node.op_type not in PRODUCTS or not is_standard(node.domain) or at != 1 or node.inputs[1] is None:
        return None
    cast = _only_reader(node, "Cast")
    scaled = _only_reader(cast, "Mul")
    if cast is None or scaled is None:
        return None
    both = next((v for v in scaled.inputs if v is not None and v is not cast.outputs[0]), None)
    scales = None if both is None else both.producer()
    if scales is None or scales.op_type != "Mul" or None in scales.inputs:
        return None
    own = next((v for v in scales.inputs if v is not None and get_const_tensor(v) is not None), None)
    other = next((v for v in scales.inputs if v is not own), None)
    zero = node.inputs[3] if len(node.inputs) > 3 else None
    if own is None or other is None or (zero is not None and get_const_tensor(zero) is None):
        return None
    scheme = Scheme(own, zero, -1, 0)
    if not _is_per_tensor(scheme) and node.op_type != "MatMulInteger":
        return None
    return IntegerProduct(node, scaled.outputs[0], other), scheme


def _only_reader(node: ir.Node | None, op_type: str) -> ir.Node | None:
    uses = [] if node is None else list(node.outputs[0].uses())
    return uses[0].node if len(uses) == 1 and uses[0].node.op_type == op_type else None


def _is_per_tensor(scheme: Scheme) -> bool:
    return numbers_of(scheme.scale).size == 1


def _is_output(node: ir.Node) -> bool:
    return any(v.is_graph_output() for v in node.outputs)


def numbers_of(value: ir.Value) -> Array:
    """The numbers of an initializer or a Constant."""
    tensor = get_const_tensor(value)
    assert tensor is not None
    return tensor.numpy()


def is_scale_of_bias(weight: StoredWeight, of_factors: Array) -> bool:
    """Whether a bias is stored with the scale of a product: integer kernels add it to sums of such products."""
    scale = numbers_of(weight.scheme.scale)
    return math.prod(scale.shape) == of_factors.size and np.allclose(scale.ravel(), of_factors.ravel(), 1e-3, 0)
