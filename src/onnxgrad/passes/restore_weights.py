"""restore_weights: the parameters of a PyTorch module, as they were before torch's exporters folded them.

The exporters transpose the weight of a Linear and number it (`val_12`), and make one initializer of all that have the
same numbers, so that fresh norms share their scales; they read embeddings at positions that they know. Here weights get
back their names, those that were several are several again, a weight that was used twice (an embedding that is also the
last layer) is one again, and of an embedding there are the rows in use.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.initializers import add_initializer, copy_initializer
from onnxgrad.graph.new_node import new_node
from onnxgrad.graph.torch_export import (
    PARAMETER,
    PRODUCER,
    Input,
    folding_of,
    inputs_of_call,
    is_folded_norm,
    is_of_state_dict,
    mark,
    module_of,
    signature,
)
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.find_parameters import ADAPTER, COMBINED, find_parameters, is_inside, parameters_gone, role_at
from onnxgrad.passes.write_gradients import is_gradient

_RECURRENT = {"LSTM", "GRU", "RNN"}
_RECURRENT_NAMES = {1: "weight_ih", 2: "weight_hh", 3: "bias", 7: "peephole"}
_NUMBERED = "onnx::"  # how names begin that the exporter on TorchScript makes up


def restore_weights(draft: Draft) -> None:
    """Changes the names and the number of parameters, nothing of what the model computes."""
    if draft.model.producer_name != PRODUCER:
        return
    graph = draft.graph
    inputs = signature(graph)
    _separate_statistics(graph)
    if inputs:
        _add_biases(graph, inputs)
    else:
        _undo_identities(graph)
        _tie_embeddings(graph)
    # First those that calls name; what is left of the module's parameters tells what the others were computed from.
    read = {v for node in graph if is_gradient(node) for v in node.inputs}  # by the name that it names, too
    for are_named in (True, False):
        find_parameters(draft)
        originals = _Originals(graph, inputs, are_named)
        for value in list(graph.initializers.values()):
            role = draft.roles.get(str(value.name))
            if value not in read and role is not None and role.is_parameter and role.kind != ADAPTER:
                _restore(graph, value, originals)


def _restore(graph: ir.Graph, value: ir.Value, originals: "_Originals") -> None:
    groups: dict[str, list[Any]] = {}
    folding = folding_of(value, originals.inputs)
    for use in value.uses():
        groups.setdefault(originals.name(value, use), []).append(use)
    kept = str(value.name) if str(value.name) in groups else next(iter(groups))
    for name, uses in groups.items():
        if name != kept:
            of_another = not originals.inputs and name in graph.initializers and not _is_same(value, graph, name)
            _give_own(graph, value, f"{name}.{value.name}" if of_another else name, uses)
    if kept != value.name:
        _rename(graph, value, kept, groups[kept])
    if not originals.are_named:
        value = _undo_expand(graph, value, folding is not None and folding.is_moved and not folding.reads_rows)
        if folding is not None:
            _undo_broadcast(graph, value, folding.parameters)
            if folding.reads_rows:
                _undo_reading(graph, value)


class _Originals:
    """The names that initializers have, for each of their users, in the module."""

    def __init__(self, graph: ir.Graph, inputs: Mapping[str, Input], are_named: bool) -> None:
        """`are_named`: by calls, rather than by the module."""
        self.inputs, self._gone, self.are_named = inputs, parameters_gone(graph, inputs), are_named
        self._layers: dict[str, list[ir.Node]] = {}  # recurrent nodes, by module
        self._modules = {module_of(node) for node in graph}
        self._owners = {str(name).rpartition(".")[0] for name in graph.initializers}

    def name(self, value: ir.Value, use: Any) -> str:
        """That of an initializer for one of its users; its own, if nothing else is known."""
        own, node = str(value.name), use.node
        module, role = module_of(node), role_at(node, use.idx)
        ending = _ending(role or COMBINED.get(node.op_type))
        is_numbered = bool(self.inputs) or own.startswith(_NUMBERED)
        folding = folding_of(value, self.inputs)
        moved = folding.parameters[0] if folding is not None and folding.is_moved and not self.are_named else None
        if module is None or not is_numbered:
            return moved or own
        if node.op_type in _RECURRENT and role is not None:
            return f"{self._called(module)}.{_RECURRENT_NAMES[use.idx]}_l{self._layer(module, node)}"
        if not self.inputs:
            return own if role is None else f"{self._called(module)}.{ending}"
        if moved is not None:
            return moved
        given = [i.name for i in inputs_of_call(node, self.inputs) if i.kind == PARAMETER]
        if folding is not None:
            alike = {_last(name) for name in folding.parameters} if folding.is_moved else set()
            given = [n for n in given if n in folding.parameters] or [n for n in given if _last(n) in alike]
        if own in given or (is_folded_norm(node) and role != "bias"):
            return own
        if given or self.are_named:
            matching = [n for n in given if _last(n) == _last(own)] or [n for n in given if _ends(n, ending)]
            matching = matching if len(given) > 1 else given
            return matching[0] if len(matching) == 1 else own
        near = folding.parameters if folding else [name for name in self._gone if is_inside(name, module)]
        if folding is None and len(near) == 1:
            return near[0]
        is_shared = len({module_of(other.node) for other in value.uses()}) > 1
        return f"{module}.{own}" if near and is_shared else own

    def _called(self, module: str) -> str:
        """The module that forward calls for the second time, which the exporter on TorchScript names `fc_1`."""
        first = re.sub(r"_\d+$", "", module)
        return first if not self.inputs and first in self._modules and module not in self._owners else module

    def _layer(self, module: str, node: ir.Node) -> int:
        same = self._layers.setdefault(module, [])
        if node not in same:
            same.append(node)
        return same.index(node)


def _last(name: str) -> str:
    """The last part of a parameter's name: copies of a layer, which start from the same numbers, have the same one."""
    return name.rpartition(".")[2]


def _ends(name: str, ending: str) -> bool:
    """Whether a parameter is a weight or a bias by its name, in_proj_bias say."""
    return _last(name) == ending or name.endswith(f"_{ending}")


def _ending(role: str | None) -> str:
    return "bias" if role == "bias" else "weight"


def _add_biases(graph: ir.Graph, inputs: Mapping[str, Input]) -> None:
    """Gives biases back to nodes: the exporter removes those that are 0, as all are in a fresh model."""
    for node in graph:
        positions = [at for at in range(3) if role_at(node, at) == "bias"]
        if not positions or ((at := positions[0]) < len(node.inputs) and node.inputs[at] is not None):
            continue
        given = [i.name for i in inputs_of_call(node, inputs) if i.kind == PARAMETER and i.name.endswith(".bias")]
        weight = node.inputs[1]
        if len(given) != 1 or weight is None or weight.const_value is None or weight.shape is None:
            continue
        outputs = _outputs_of(node, weight.shape.numpy())
        if given[0] in graph.initializers or not outputs:
            continue
        bias = add_initializer(graph, given[0], np.zeros(outputs, np.int8), weight.const_value.dtype)
        mark(bias, PARAMETER)
        node.resize_inputs(max(len(node.inputs), at + 1))
        node.replace_input_with(at, bias)


def _separate_statistics(graph: ir.Graph) -> None:
    """Gives each BatchNormalization statistics of its own: fresh ones equal those and the scales of others."""
    for node in graph:
        module = module_of(node)
        if node.op_type != "BatchNormalization" or module is None:
            continue
        for at, what in ((3, "running_mean"), (4, "running_var")):
            value, name = node.inputs[at], f"{module}.{what}"
            if value is None or not value.is_initializer() or len(value.uses()) == 1 or value.name == name:
                continue
            if name not in graph.initializers:
                copy_initializer(graph, value, name)
            node.replace_input_with(at, graph.initializers[name])


def _outputs_of(node: ir.Node, weight: tuple[int, ...]) -> int:
    """How many numbers a bias has; 0 for other nodes."""
    if node.op_type == "Gemm":
        return weight[0] if node.attributes.get_int("transB", 0) else weight[1]
    if node.op_type == "Conv":
        return weight[0]
    return weight[1] * node.attributes.get_int("group", 1) if node.op_type == "ConvTranspose" else 0


def _give_own(graph: ir.Graph, value: ir.Value, name: str, uses: list[Any]) -> None:
    """Another initializer of the same numbers, for some of the users."""
    if name in graph.initializers:
        _tie(graph, value, graph.initializers[name], uses)
        return
    own = copy_initializer(graph, value, name)
    mark(own, PARAMETER)
    for use in uses:
        use.node.replace_input_with(use.idx, own)


def _rename(graph: ir.Graph, value: ir.Value, name: str, uses: list[Any]) -> None:
    if name in graph.initializers:
        _tie(graph, value, graph.initializers[name], uses)
        return
    graph.initializers.pop(str(value.name))
    value.name = name
    mark(value, PARAMETER)
    graph.register_initializer(value)


def _is_same(value: ir.Value, graph: ir.Graph, name: str) -> bool:
    """Whether an initializer may be another, transposed perhaps: attention's weight is there in two parts."""
    mine, its = (list(v.shape or ()) for v in (value, graph.initializers[name]))
    return its in (mine, mine[::-1])


def _tie(graph: ir.Graph, value: ir.Value, other: ir.Value, uses: list[Any]) -> None:
    """Gives users another initializer if it has the same numbers, or has them transposed."""
    mine, its = (np.asarray(v.const_value.numpy()) for v in (value, other) if v.const_value is not None)
    if mine.shape == its.shape and np.array_equal(mine, its):
        result = other
    elif mine.ndim == 2 and mine.shape == its.shape[::-1] and np.array_equal(mine, its.T):
        node = new_node("Transpose", [other], f"{other.name}_transposed", {"perm": [1, 0]}, like=value)
        graph.insert_before(graph[0], node)
        result = node.outputs[0]
    else:
        return
    for use in uses:
        use.node.replace_input_with(use.idx, result)
    if not value.uses() and not value.is_graph_output():
        graph.initializers.pop(str(value.name))


def _tie_embeddings(graph: ir.Graph) -> None:
    """Makes one again of an embedding and the last layer, whose weight the exporter on TorchScript transposed."""
    tables = {n.inputs[0] for n in graph if n.op_type == "Gather" and n.inputs[0] is not None}
    for value in list(graph.initializers.values()):
        uses = [use for use in value.uses() if use.node.op_type == "MatMul"]
        if not str(value.name).startswith(_NUMBERED) or value.const_value is None or len(uses) != len(value.uses()):
            continue
        shape = value.const_value.shape.numpy()
        for table in tables:
            if table.const_value is not None and table.const_value.shape.numpy() == shape[::-1] and len(shape) == 2:
                _tie(graph, value, table, uses)


def _undo_expand(graph: ir.Graph, value: ir.Value, is_moved: bool) -> ir.Value:
    """Makes one again of a token that the exporter repeated for each example of its batch; the initializer there is.

    `is_moved`: nothing else was done to it, so that what repeats along other axes was one number there, too. Then the
    batch may also be the second axis, as where sequences come first, or a part of one, as where there are frames.
    """
    shape = () if value.const_value is None else value.const_value.shape.numpy()
    if value.const_value is None or len(shape) < 3:
        return value
    array = value.const_value.numpy()
    is_sure = is_moved and not (array == array.flat[:1]).all()
    axes = (0, 1) if is_sure else (0,)
    repeats = [k for k in axes if shape[k] > 1 and (array == array.take([0], k)).all()]
    found = [(k, v, d) for k in repeats for d in axes for v in graph.inputs if _size(v, d) == shape[k]]
    if not found and not (repeats and is_sure):
        return value
    array = array.take([0], found[0][0] if found else repeats[0])
    if is_sure:
        for other in range(array.ndim - 1):
            first = array.take([0], other)
            array = first if (array == first).all() else array
    name = str(value.name)
    graph.initializers.pop(name)
    one = _smaller(graph, value, array)
    sizes = [new_node("Constant", [], f"{name}_size_{k}", {"value_ints": [d]}) for k, d in enumerate(shape)]
    for axis, batch, dimension in found[:1]:
        sizes[axis] = new_node("Shape", [batch], f"{name}_batch", {"start": dimension, "end": dimension + 1})
    whole = new_node("Concat", [node.outputs[0] for node in sizes], f"{name}_shape", {"axis": 0})
    _compute(graph, value, *sizes, whole, new_node("Expand", [one, whole.outputs[0]], f"{name}_expanded"))
    return one


def _smaller(graph: ir.Graph, value: ir.Value, array: Any) -> ir.Value:
    """An initializer of the name and type of one that has just gone."""
    assert value.const_value is not None
    found = add_initializer(graph, str(value.name), array, value.const_value.dtype)
    found.metadata_props.update(value.metadata_props)
    return found


def _compute(graph: ir.Graph, value: ir.Value, *nodes: ir.Node) -> None:
    """Lets nodes compute what an initializer was; the last one gives it."""
    result = nodes[-1].outputs[0]
    result.type, result.shape = value.type, value.shape
    for node in reversed(nodes):
        graph.insert_before(graph[0], node)
    value.replace_all_uses_with(result)


def _size(value: ir.Value, axis: int) -> Any:
    """A known dimension of an input."""
    return value.shape[axis] if value.shape is not None and len(value.shape) > axis else None


def _undo_broadcast(graph: ir.Graph, value: ir.Value, parameters: list[str]) -> None:
    """Makes one again of a bias and what it was computed to be at the start of an RNN, added to a product of zeros."""
    array = value.const_value.numpy() if value.const_value is not None else np.empty(0)
    for name in parameters:
        bias = graph.initializers.get(name)
        if bias is None or bias is value or bias.const_value is None:
            continue
        if bias.const_value.shape.numpy() == array.shape[-1:] and (array == bias.const_value.numpy()).all():
            shape = new_node("Constant", [], f"{value.name}_shape", {"value": ir.Tensor(np.array(array.shape))})
            _compute(graph, value, shape, new_node("Expand", [bias, shape.outputs[0]], f"{value.name}_expanded"))
            graph.initializers.pop(str(value.name))
            return


def _undo_reading(graph: ir.Graph, value: ir.Value) -> None:
    """Makes a table again of what the exporter read from it: rows that are the same were one, and share a gradient."""
    if value.const_value is None:
        return
    array = value.const_value.numpy()
    if array.size < 2 or (array == array.flat[0]).all():
        return
    tables = []
    for axis in range(array.ndim):  # of a row's numbers: the exporter may have moved it
        rows = np.moveaxis(array, axis, -1)
        table, at = np.unique(rows.reshape(-1, rows.shape[-1]), axis=0, return_inverse=True)
        tables.append((axis, table, at.reshape(rows.shape[:-1])))
    axis, table, at = min(tables, key=lambda found: (found[1].size, len(found[1])))
    if table.size == array.size:
        return
    name = str(value.name)
    graph.initializers.pop(name)
    kept = _smaller(graph, value, table)
    rows_at = new_node("Constant", [], f"{name}_rows", {"value": ir.Tensor(at)})
    read = new_node("Gather", [kept, rows_at.outputs[0]], f"{name}_read")
    order = [*range(array.ndim - 1)]
    order.insert(axis, array.ndim - 1)
    _compute(graph, value, rows_at, read, new_node("Transpose", read.outputs, f"{name}_moved", {"perm": order}))


def _undo_identities(graph: ir.Graph) -> None:
    """Gives an initializer of its own to each Identity that the exporter on TorchScript made of equal ones.

    Copies of a layer start from the same numbers, and gates from one. A parameter that a module has twice is one input
    of the traced graph, and never an Identity; a clone that forward makes has the name of a node. Of weights that it
    transposed, the modules that use them say which are one; of biases that it cut, zeros are taken for several.
    """
    for node in list(graph):
        source = node.inputs[0] if node.op_type == "Identity" else None
        if source is None or not source.is_initializer() or source.const_value is None:
            continue
        (result,) = node.outputs
        name = str(result.name)
        if result.is_graph_output():
            continue
        array, uses = source.const_value.numpy(), list(result.uses())
        is_numbered = name.startswith(_NUMBERED) and str(source.name).startswith(_NUMBERED)
        if is_numbered and all(role_at(use.node, use.idx) is not None for use in uses):
            result.replace_all_uses_with(source)
        elif (is_numbered and (array == array.flat[:1]).all()) or is_of_state_dict(name, [use.node for use in uses]):
            result.name = None
            result.replace_all_uses_with(copy_initializer(graph, source, name))
        else:
            continue
        graph.remove(node, safe=True)
