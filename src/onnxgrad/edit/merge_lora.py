"""merge_lora(): merges adapters into their weights; the model then has its original nodes."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.edit.requantize import Blocks, Quantized, packed, unpacked
from onnxgrad.edit.targets import weight_behind
from onnxgrad.graph.adapters import CONV, EMBEDDING, Adapter, adapters_of, array_of, note_adapters
from onnxgrad.graph.files import as_given, expect_weights, load
from onnxgrad.graph.initializers import tensor_of
from onnxgrad.graph.quantization import ends_of
from onnxgrad.graph.replace import take_place
from onnxgrad.tensor_types import Array

MERGED = "_merged"  # what names end with where the weight without the adapter stays, too
_WHOLE = {"INT8", "UINT8", "INT4", "UINT4", "INT2", "UINT2", "INT16", "UINT16"}


def merge_lora(model: Any) -> Any:
    """Returns the model without adapters, with their products added to its weights.

    `model` is a path, an onnx.ModelProto or an onnx_ir.Model, which gives an onnx_ir.Model; it is not changed. Half
    types are rounded once. Quantized weights are quantized again, in the same type and the same blocks with new scales.
    This rounds what an adapter has learned: compare the accuracy before and after.
    """
    loaded = load(model, "merge_lora")
    expect_weights(loaded, "merge_lora")
    adapters = adapters_of(loaded)
    if not adapters:
        raise ValueError(
            "merge_lora: the model has no adapters, expected a model from lora(), or one exported "
            "after training such a model"
        )
    for adapter in adapters:
        _merge(loaded.graph, adapter)
    note_adapters(loaded, [])
    return as_given(loaded, model)


class Branch(NamedTuple):
    """The nodes of an adapter beside one node."""

    base: ir.Node
    nodes: list[ir.Node]  # its own, the Add last


def branches_of(graph: ir.Graph, adapter: Adapter) -> list[Branch]:
    """An adapter's nodes, one branch for each node that it is beside."""
    down, up = graph.initializers.get(adapter.A), graph.initializers.get(adapter.B)
    if down is None or up is None:
        raise ValueError(f"the adapter of {adapter.module!r} is not in the graph: its weights {adapter.A!r} are gone")
    return [_branch(use.node, up, adapter) for use in down.uses()]


def _branch(first: ir.Node, up: ir.Value, adapter: Adapter) -> Branch:
    nodes = [first]
    before = first.inputs[0].producer() if first.inputs[0] is not None else None
    if before is not None and before.op_type == "Dropout" and adapter.dropout:
        nodes.insert(0, before)
    for expected in ("Mul", first.op_type if adapter.kind == CONV else "MatMul", "Add"):
        users = [use.node for use in nodes[-1].outputs[0].uses()]
        if len(users) != 1 or users[0].op_type != expected:
            raise ValueError(
                f"the nodes of the adapter of {adapter.module!r} have changed since it was added: expected {expected} "
                f"after {nodes[-1].name!r}"
            )
        nodes.append(users[0])
    last = nodes[-1]
    base = next((v.producer() for v in last.inputs if v is not None and v is not nodes[-2].outputs[0]), None)
    if up not in nodes[-2].inputs or base is None:
        raise ValueError(f"the nodes of the adapter of {adapter.module!r} have changed since it was added")
    return Branch(base, nodes)


def _merge(graph: ir.Graph, adapter: Adapter) -> None:
    branches = branches_of(graph, adapter)
    nodes = [branch.base for branch in branches]
    if nodes:
        product = _product(adapter, nodes[0], array_of(graph, adapter.A), array_of(graph, adapter.B))
        _substitute(graph, nodes, _changed(nodes[0], adapter, product))
    for branch in branches:
        _remove(graph, branch)


def _product(adapter: Adapter, node: ir.Node, a: Array, b: Array) -> Array:
    """What is added to the weight, as the node reads it."""
    kind = np.promote_types(a.dtype if a.dtype.kind == "f" else np.float32, np.float32)  # bfloat16 is none to NumPy
    a, b = a.astype(kind), b.astype(kind)
    if adapter.kind == CONV:
        groups = node.attributes.get_int("group", 1)
        low, high = a.reshape(groups, len(a) // groups, -1), b.reshape(groups, len(b) // groups, -1)
        windows: Array = (high @ low).reshape(len(b), *a.shape[1:]) * kind.type(adapter.scale)
        return windows
    product: Array = a @ b * kind.type(adapter.scale / node.attributes.get_float("alpha", 1.0))
    return product.T if node.attributes.get_int("transB", 0) or node.op_type == "MatMulNBits" else product


def _changed(node: ir.Node, adapter: Adapter, product: Array) -> dict[ir.Value, ir.Tensor[Any]]:
    """The new numbers of initializers: of a weight, or of what it is quantized to."""
    if node.op_type == "MatMulNBits":
        return _changed_bits(node, adapter, product)
    value = node.inputs[0 if adapter.kind == EMBEDDING else 1]
    found = None if value is None else weight_behind(value)
    if found is None:
        raise ValueError(f"merge_lora: the weight of {adapter.module!r} is computed, expected an initializer")
    weight, path = found
    rounds = next((at for at in path if at.op_type == "QuantizeLinear"), None)
    if rounds is not None:
        raise ValueError(
            f"merge_lora: the weight of {adapter.module!r} is rounded by QuantizeLinear (node {rounds.name!r}) "
            "whenever the model runs, expected integers: keep the adapter, or quantize the merged model"
        )
    for at in reversed(path):
        if at.op_type == "Transpose":
            perm = at.attributes.get_ints("perm", range(product.ndim)[::-1])
            product = product.transpose(np.argsort(perm))
        elif at.op_type == "DequantizeLinear":
            return _dequantized(at, adapter, product)
    tensor: Any = weight.const_value
    total = tensor.numpy().astype(product.dtype) + product
    return {weight: tensor_of(total, tensor.dtype, weight.name)}


def _dequantized(node: ir.Node, adapter: Adapter, product: Array) -> dict[ir.Value, ir.Tensor[Any]]:
    """Of the inputs of DequantizeLinear."""
    inputs = [*node.inputs, None][:3]
    tensors: list[Any] = [None if v is None else v.const_value for v in inputs]
    weight, scale, zero = tensors
    computed = any(v is not None and t is None for v, t in zip(inputs, tensors, strict=True))
    if computed or weight.dtype.name not in _WHOLE:
        why = "scales are computed" if computed else f"numbers are {weight.dtype.name.lower()}, expected integers"
        raise ValueError(f"merge_lora: the weight of {adapter.module!r} cannot be quantized again: its {why}")
    levels, scales = weight.numpy(), scale.numpy()
    axis = node.attributes.get_int("axis", 1) % max(levels.ndim, 1)
    size = node.attributes.get_int("block_size", 0)
    blocks = Blocks(levels.shape, axis if size or scales.size > 1 else None, size)
    zeros = np.zeros(scales.shape, np.int32) if zero is None else zero.numpy().astype(np.int32)
    old = Quantized(levels.astype(np.int32), scales, zeros, *ends_of(weight.dtype), blocks)
    new = old.plus(product)
    if zero is None and new.zero.any():
        raise ValueError(
            f"merge_lora: the weight of {adapter.module!r} is quantized to {weight.dtype.name.lower()} without a zero "
            "point, which has no room for negative numbers: keep the adapter"
        )
    made = {0: (new.levels, weight), 1: (new.scale, scale), 2: (new.zero, zero)}
    return {
        value: tensor_of(array, like.dtype, value.name)
        for at, (array, like) in made.items()
        if (value := inputs[at]) is not None
    }


def _changed_bits(node: ir.Node, adapter: Adapter, product: Array) -> dict[ir.Value, ir.Tensor[Any]]:
    """Of the inputs of MatMulNBits."""
    rows, columns, size, bits = (int(node.attributes.get_int(n, 4)) for n in ("N", "K", "block_size", "bits"))
    inputs = [*node.inputs, *[None] * 5][:5]
    weight, scale, zero, order = (None if v is None else v.const_value for v in inputs[1:5])
    if weight is None or scale is None or bits not in (2, 4, 8) or bool(node.attributes.get_int("weight_prepacked", 0)):
        raise ValueError(f"merge_lora: the weight of {adapter.module!r} is packed in a way that is not known here")
    blocks, middle = -(-columns // size), 1 << (bits - 1)
    if order is not None and (order.numpy()[:columns] != np.arange(columns) // size).any():
        raise ValueError(f"merge_lora: the blocks of {adapter.module!r} are in an order of their own (g_idx)")
    if zero is not None and zero.dtype != ir.DataType.UINT8:
        raise ValueError(f"merge_lora: {adapter.module!r} has zero points of {zero.dtype.name.lower()}, expected uint8")
    levels = unpacked(weight.numpy(), rows, bits)
    zeros = np.full((rows, blocks), middle, np.int32)
    if zero is not None:
        zeros = unpacked(zero.numpy(), rows, bits)[:, :blocks]
    scales = scale.numpy()
    old = Quantized(
        levels[:, :columns], scales.reshape(rows, blocks), zeros, 0, 2**bits - 1, Blocks((rows, columns), 1, size)
    )
    new = old.plus(product)
    filled = np.concatenate([new.levels, levels[:, columns:]], 1)
    made: dict[int, Array] = {1: packed(filled, bits).reshape(weight.shape.numpy())}
    made[2] = new.scale.reshape(scales.shape)
    if zero is not None:
        made[3] = packed(new.zero, bits).reshape(zero.shape.numpy())
    result = {}
    for at, array in made.items():
        value = inputs[at]
        assert value is not None and value.const_value is not None
        result[value] = tensor_of(array, value.const_value.dtype, value.name)
    return result


def _substitute(graph: ir.Graph, nodes: Sequence[ir.Node], changed: Mapping[ir.Value, ir.Tensor[Any]]) -> None:
    """Gives nodes weights with other numbers; where other nodes use the old ones, both stay."""
    copies: dict[ir.Value, ir.Value] = {}
    for value, tensor in changed.items():
        name = f"{value.name}{MERGED}"
        while name in graph.initializers:
            name += "_"
        copy = ir.Value(name=name, type=value.type, shape=value.shape, const_value=tensor)
        copies[value] = copy
        copy.metadata_props.update(value.metadata_props)
        graph.register_initializer(copy)
    for node in nodes:
        for at, given in enumerate(node.inputs):
            if given is not None:
                node.replace_input_with(at, _copied(given, copies))
    for value, copy in reversed(copies.items()):
        if not _is_gone(graph, value):
            continue
        before, made = value.producer(), copy.producer()
        if before is not None and made is not None:
            made.name, copy.name = before.name, value.name
        else:
            graph.initializers.pop(str(copy.name))
            copy.name = value.name
            graph.register_initializer(copy)


def _copied(value: ir.Value, copies: dict[ir.Value, ir.Value]) -> ir.Value:
    """The value, or what it is once those it is made from are others; nodes between get copies."""
    if value in copies:
        return copies[value]
    found = weight_behind(value)
    path = [] if found is None else found[1]
    if found is None or not (found[0] in copies or any(v in copies for node in path for v in node.inputs)):
        return value
    node = path[-1]
    inputs = [None if v is None else _copied(v, copies) for v in node.inputs]
    copy = ir.Node(node.domain, node.op_type, inputs, list(node.attributes.values()), num_outputs=1)
    copy.name, copy.outputs[0].name = f"{node.name}{MERGED}", f"{value.name}{MERGED}"
    copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
    owner = node.graph
    assert owner is not None
    owner.insert_after(node, copy)
    copies[value] = copy.outputs[0]
    return copies[value]


def _is_gone(graph: ir.Graph, value: ir.Value) -> bool:
    """Removes a value that nobody uses, with the node that makes it; whether it did."""
    producer = value.producer()
    if producer is None:
        return _forget(graph, value)
    if value.uses() or value.is_graph_output() or producer.graph is None:
        return False
    inputs = [v for v in producer.inputs if v is not None]
    producer.graph.remove(producer, safe=True)
    for one in inputs:
        _forget(graph, one)
    return True


def _forget(graph: ir.Graph, value: ir.Value) -> bool:
    """Removes an initializer that nobody uses, also from the inputs; whether it is gone."""
    if value.uses() or value.is_graph_output() or value.producer() is not None:
        return False
    if graph.initializers.get(str(value.name)) is value:
        graph.initializers.pop(str(value.name))
    if value.is_graph_input():
        graph.inputs.remove(value)
    return True


def _remove(graph: ir.Graph, branch: Branch) -> None:
    """The nodes of an adapter; what they were beside has its old name again."""
    add, owner = branch.nodes[-1], branch.base.graph
    assert owner is not None
    result = next(v for v in add.inputs if v is not None and v.producer() is branch.base)
    take_place(result, add.outputs[0])
    inputs = {v: None for node in branch.nodes for v in node.inputs if v is not None and v.is_initializer()}
    owner.remove(branch.nodes[::-1], safe=True)
    for value in inputs:
        _forget(graph, value)
