"""A model made ready to be differentiated, and finished: functions inlined, shapes inferred, nothing dead left.

Weights stay where they are: what onnx itself does to a model it does to one whose initializers are inputs.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from onnx import version_converter
from onnx_ir.passes import common as passes

from onnxgrad.domains import MICROSOFT
from onnxgrad.functions.add_functions import WRITTEN_BY, add_functions
from onnxgrad.graph.tensor import MOST_READ
from onnxgrad.op import operator_of
from onnxgrad.passes.expand import expand
from onnxgrad.passes.fold_shapes import fold_shapes
from onnxgrad.passes.infer import infer_shapes
from onnxgrad.rules import load_rules
from onnxgrad.rules.registry import RULES

OLDEST_OPSET = 18  # the oldest that the functions of our operators are written for; older models are converted


@dataclass
class Prepared:
    """The model, its opsets, and inputs whose unknown dimensions got names for the time being."""

    model: ir.Model
    opsets: dict[str, int]
    nameless: list[tuple[ir.Value, ir.Shape]]


def prepare(model: ir.Model) -> Prepared:
    """Changes the model in place, or gives another with the same weights."""
    load_rules()  # an operator without a rule is replaced by its definition
    _drop_own_functions(model)
    _read_small_files(model.graph)
    if model.functions:
        # One with a rule of its own stays: the rule may well say something else than its body would.
        model = passes.InlinePass(lambda f: (f.domain, f.name) not in RULES)(model).model
    passes.RemoveInitializersFromInputsPass()(model)
    if model.graph.opset_imports.get("", OLDEST_OPSET) < OLDEST_OPSET:
        model = _converted(model)
    model.graph.opset_imports.setdefault("", OLDEST_OPSET)
    _name_all_nodes(model.graph)
    renamed = _name_dimensions(model.graph)
    model = _inferred(model)
    expanded = True
    while expanded:  # a definition may use operators that have one themselves
        model, expanded = expand(model)
        if expanded:
            _name_all_nodes(model.graph)
            model = _inferred(model)
    while fold_shapes(model.graph, dict(model.graph.opset_imports)):
        model = _inferred(model)
    inputs = {v.name: v for v in model.graph.inputs}
    nameless = [(inputs[name], shape) for name, shape in renamed]
    return Prepared(model, dict(model.graph.opset_imports), nameless)


def finish(prepared: Prepared) -> ir.Model:
    """Drops what nothing needs, and adds the functions of our operators."""
    model = prepared.model
    drop_dead(model.graph)
    for value, shape in prepared.nameless:
        value.shape = shape
    used = {node.domain for node in model.graph.all_nodes()}
    model.graph.opset_imports.update({d: v for d, v in prepared.opsets.items() if d in used or not d})
    # Where our kernels are registered, onnxruntime uses its own com.microsoft operators in models that import it only.
    model.graph.opset_imports.setdefault(MICROSOFT, 1)
    model.ir_version = max(model.ir_version, 8)
    if any(operator_of(node.domain, node.op_type) is not None for node in model.graph.all_nodes()):
        model = _without_weights(model, add_functions)
    return model


def _drop_own_functions(model: ir.Model) -> None:
    """Functions that add_functions wrote: the nodes are known without them, and they are written again."""
    for key, function in list(model.functions.items()):
        if function.doc_string == WRITTEN_BY:
            del model.functions[key]


def _read_small_files(graph: ir.Graph) -> None:
    """Small tensors come out of their files: shape inference may need them, and knows no folders."""
    for value in graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and tensor.size <= MOST_READ:
            with suppress(FileNotFoundError):  # a ModelProto does not say in which folder its files are
                value.const_value = ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=tensor.name)


def _converted(model: ir.Model) -> ir.Model:
    opset = model.graph.opset_imports[""]
    try:
        return _without_weights(model, lambda proto: version_converter.convert_version(proto, OLDEST_OPSET))
    except Exception as error:  # of any type, from C++
        raise ValueError(
            f"gradient: the model imports opset {opset}, rules are written for {OLDEST_OPSET} and newer, and onnx "
            f"cannot convert it: {str(error).splitlines()[0]}"
        ) from None


def _inferred(model: ir.Model) -> ir.Model:
    try:
        return _without_weights(model, lambda proto: infer_shapes(proto, data_prop=True))
    except Exception as error:  # of any type, from C++
        raise ValueError(f"gradient: the model's shapes contradict each other: {str(error).splitlines()[0]}") from None


def _without_weights(model: ir.Model, function: Any) -> ir.Model:
    """function(proto) with all but small initializers as inputs; these come back as they were, in the same order."""
    order = list(model.graph.initializers)
    with _weights_aside(model) as weights:
        changed = ir.from_proto(function(ir.to_proto(model)))
    _put_back(changed.graph, weights, order)
    return changed  # type: ignore[no-any-return]


@contextmanager
def _weights_aside(model: ir.Model) -> Iterator[dict[str, Any]]:
    graph = model.graph
    order, weights = list(graph.initializers), {}
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or (tensor.size <= MOST_READ and not isinstance(tensor, ir.ExternalTensor)):
            continue
        weights[name] = tensor
        graph.initializers.pop(name)
        value.const_value = None
        value.dtype, value.shape = tensor.dtype, ir.Shape(tensor.shape.numpy())
        graph.inputs.append(value)
    try:
        yield weights
    finally:
        _put_back(graph, weights, order)


def _put_back(graph: ir.Graph, weights: dict[str, Any], order: list[str]) -> None:
    """Makes initializers again of the inputs that stand for weights."""
    for value in [v for v in graph.inputs if v.name in weights]:
        graph.inputs.remove(value)
        value.const_value = weights[str(value.name)]
        graph.register_initializer(value)
    for name in order:
        if name in graph.initializers:
            graph.register_initializer(graph.initializers.pop(name))


def _name_all_nodes(graph: ir.Graph) -> None:
    """Names of the gradient's nodes begin with those of the model's."""
    taken = {node.name for node in graph if node.name}
    for k, node in enumerate(graph):
        if not node.name:
            name = f"{node.op_type}_{k}"
            while name in taken:
                name += "_"
            taken.add(name)
            node.name = name


def _name_dimensions(graph: ir.Graph) -> list[tuple[str, ir.Shape]]:
    """Unknown dimensions of inputs get names, so that the same one is recognised wherever it turns up."""
    renamed = []
    for value in graph.inputs:
        if value.shape is not None and any(not isinstance(d, int) and d.value is None for d in value.shape):
            before = list(value.shape)
            named = [
                d if isinstance(d, int) or d.value is not None else f"{value.name}_dim_{k}"
                for k, d in enumerate(before)
            ]
            renamed.append((str(value.name), ir.Shape(before)))
            value.shape = ir.Shape(named)
    return renamed


def drop_dead(graph: ir.Graph) -> None:
    """Removes nodes whose results nobody uses, and blanks outputs of our operators that nobody uses.

    The last one keeps a name: onnx_ir drops empty names at the end, which onnxruntime wants for a function's outputs.
    """
    for node in reversed(list(graph)):
        if not any(v.uses() or v.is_graph_output() for v in node.outputs):
            graph.remove(node, safe=True)
            continue
        ours = operator_of(node.domain, node.op_type)
        if ours is None:
            continue
        node.resize_outputs(len(ours.outputs))
        for value in node.outputs[:-1]:
            if not value.uses() and not value.is_graph_output():
                value.name = ""
        if not node.outputs[-1].name:
            node.outputs[-1].name = f"{node.name}_unused"
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            graph.initializers.pop(name)
