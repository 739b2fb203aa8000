"""fake_quantize: weights that are stored as integers become floating-point ones that every step rounds.

A trained weight is what the integers stand for, and goes through QuantizeLinear and DequantizeLinear, whose gradient
passes straight through (rules/quantization.py); biases of 32 bits are not rounded. store_integers.py is the way back.
Products of integers, as dynamic quantization has them, become products of what the integers stand for.
"""

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.adapters import adapters_of
from onnxgrad.graph.files import OLDEST_WITH_WEIGHTS_APART
from onnxgrad.graph.initializers import add_initializer
from onnxgrad.graph.new_node import new_node
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.stored_weights import PRODUCTS, IntegerProduct, StoredWeight, numbers_of, stored_weights


def fake_quantize(draft: Draft) -> None:
    """Changes how weights are stored, nothing of what the model computes; a remark says so.

    Weights that have adapters beside them stay as they are: the adapters are trained in their place.
    """
    if adapters_of(draft.model):
        return
    graph = draft.graph
    weights = stored_weights(graph)
    if not weights:
        return
    order = list(graph.initializers)
    draft.model.ir_version = max(draft.model.ir_version, OLDEST_WITH_WEIGHTS_APART)  # the new ones are not inputs
    for weight in weights:
        parameter = _parameter(weight)
        if weight.integers.is_graph_input():
            graph.inputs.remove(weight.integers)
        order[order.index(str(weight.integers.name))] = weight.name
        graph.initializers.pop(str(weight.integers.name))
        _reroute(graph, weight, parameter)
        graph.register_initializer(parameter)
    for name in [name for name in order if name in graph.initializers]:
        graph.register_initializer(graph.initializers.pop(name))
    graph.sort()
    kinds = sorted({w.integers.dtype.name.lower() for w in weights if w.integers.dtype is not None})
    draft.remarks.append(
        f"{len(weights)} weights are stored as {' and '.join(kinds)}: they are trained in floating point, rounded in "
        "every step as they will be stored"
    )


def _parameter(weight: StoredWeight) -> ir.Value:
    """A floating-point initializer of the same numbers."""
    numbers = weight.numbers(numbers_of(weight.scheme.scale))
    tensor = ir.Tensor(numbers, name=weight.name)
    value = ir.Value(name=weight.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(numbers.shape))
    value.const_value = tensor
    value.metadata_props.update(weight.integers.metadata_props)
    return value


def _reroute(graph: ir.Graph, weight: StoredWeight, parameter: ir.Value) -> None:
    """Lets all that read the integers read the parameter, rounded to them."""
    names = [node.outputs[0].name for node in weight.dequantizers]
    for node in weight.dequantizers:  # their names are free for the parameter
        node.outputs[0].name = None
    rounded = _rounded(graph, weight, parameter) if weight.is_rounded else parameter
    for product in weight.products:
        _as_product_of_floats(product, rounded, f"{weight.name}_factor")
    for node, _ in list(weight.integers.uses()):
        for value in node.outputs:
            value.type = rounded.type  # of a Gather or Reshape
    weight.integers.replace_all_uses_with(rounded)
    for node, name in zip(weight.dequantizers, names, strict=True):
        source, result = node.inputs[0], node.outputs[0]
        assert source is not None and node.graph is not None
        source.type = rounded.type
        if result.is_graph_output():  # what was moved on its way there takes its name
            source.name = name
        result.replace_all_uses_with(source, replace_graph_outputs=True)
        node.graph.remove(node, safe=True)


def _rounded(graph: ir.Graph, weight: StoredWeight, parameter: ir.Value) -> ir.Value:
    """What QuantizeLinear and DequantizeLinear make of a parameter."""
    scale, zero_point, axis, block_size = weight.scheme
    if zero_point is None:  # QuantizeLinear would write uint8
        zero_point = _zeros_like(graph, weight)
    attributes = {"axis": axis} if numbers_of(scale).size > 1 or block_size else {}
    attributes |= {"block_size": block_size} if block_size else {}
    domain = weight.dequantizers[0].domain if weight.dequantizers else ""
    value, dtypes = parameter, (weight.integers.dtype, parameter.dtype)
    for op_type, dtype in zip(("QuantizeLinear", "DequantizeLinear"), dtypes, strict=True):
        node = new_node(op_type, [value, scale, zero_point], f"{weight.name}_{op_type}", attributes, like=parameter)
        node.domain, value = domain, node.outputs[0]
        value.name = f"{weight.name}_{op_type}_fake"
        value.type = None if dtype is None else ir.TensorType(dtype)
        graph.append(node)  # and sorted later
    return value


def _zeros_like(graph: ir.Graph, weight: StoredWeight) -> ir.Value:
    scale, dtype = numbers_of(weight.scheme.scale), weight.integers.dtype
    assert dtype is not None
    return add_initializer(graph, f"{weight.name}_zeros", np.zeros(scale.shape, np.int8), dtype)


def _as_product_of_floats(product: IntegerProduct, weight: ir.Value, name: str) -> None:
    """Lets a product of what the integers stand for take the place of that of integers, its Cast and its scaling."""
    node, result = product.node, product.result
    graph, scaling = node.graph, result.producer()
    assert graph is not None and scaling is not None
    zero_point = [node.inputs[2]] if len(node.inputs) > 2 else []
    factor = new_node("DequantizeLinear", [node.inputs[0], product.other, *zero_point], f"{result.name}_{name}")
    factors = [factor.outputs[0], weight]
    whole = new_node(PRODUCTS[node.op_type], factors, str(result.name), node.attributes, like=result)
    factor.name, whole.name = f"{node.name or name}_DequantizeLinear", node.name or f"{name}_product"
    result.name = None
    for new in (factor, whole):
        graph.insert_before(scaling, new)
    result.replace_all_uses_with(whole.outputs[0], replace_graph_outputs=True)
    cast = next(iter(node.outputs[0].uses())).node
    for old in (scaling, cast, node):
        graph.remove(old, safe=True)
