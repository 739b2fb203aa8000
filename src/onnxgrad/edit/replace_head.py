"""replace_head(): a model whose last layer is a new one, for other classes than it was trained on."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.edit.class_axis import WHOLE, ClassAxis
from onnxgrad.edit.cut import cut_draft
from onnxgrad.edit.find_head import CONVOLUTIONS, WEIGHT_WITHIN, Head, find_head
from onnxgrad.edit.initial import new_parameter, uniform
from onnxgrad.edit.join import joined
from onnxgrad.edit.known_values import known_values, named_dims
from onnxgrad.edit.layers import read_layers
from onnxgrad.graph.files import expect_weights, given_back, load
from onnxgrad.graph.head import note_head
from onnxgrad.graph.new_node import new_node
from onnxgrad.graph.node import descendants
from onnxgrad.graph.replace import put_behind
from onnxgrad.graph.suggest import listed, suggestion
from onnxgrad.graph.torch_export import PARAMETER, forget_call, mark, signature
from onnxgrad.passes.convert_opset import convert_opset
from onnxgrad.passes.draft import Draft, Pass
from onnxgrad.passes.expand_ml import WRITERS, drop_zip_maps, expand_ml
from onnxgrad.passes.expand_training import adopt_strays
from onnxgrad.passes.finish import drop_dead
from onnxgrad.passes.name_nodes import name_nodes
from onnxgrad.passes.prepare import (
    RESTORE,
    inline_functions,
    read_small_tensors,
    remove_initializers_from_inputs,
)
from onnxgrad.passes.validate import validate
from onnxgrad.passes.write_gradients import bind_names, unbind_names
from onnxgrad.schema import ML

BEFORE: list[Pass] = [
    adopt_strays, validate, bind_names, *RESTORE, inline_functions, remove_initializers_from_inputs, read_small_tensors,
    drop_zip_maps, name_nodes,
]  # fmt: skip


def replace_head(
    model: Any,
    classes: int | None = None,
    *,
    output: str | None = None,
    shape: Sequence[int] | None = None,
    layers: Any = None,
    seed: int = 0,
) -> Any:
    """Returns the model with a new last layer: the last matrix product or convolution before an output.

    - `model`: a path, an onnx.ModelProto or an onnx_ir.Model; it is not changed. For an onnx_ir.Model the result is one
      too.
    - `classes`: the number of results of the new layer.
    - `output`: the output whose head to replace, if there are several; or a value inside the model, which then becomes
      an output and replaces those that depend on it.
    - `shape`: instead of `classes`, the shape of an output that is more than a vector, `[-1, 17, 2]`.
    - `layers`: instead of either, operators for the input of the old head: a model, or a graph as ONNX text. Its inputs
      with known shapes, all but the first, become new weights: `head (float[n, 512] x, float[512, 2] w, float[2] b) =>
      (float[n, 2] y) { p = MatMul(x, w) y = Add(p, b) }`.
    - `seed`: of the new weights, which are initialized like PyTorch's layers.

    The new weights have the names of the old ones; a Trainer with `trainable="head"` trains only them. Nodes after the
    layer, such as Softmax, stay. Outputs that are valid only for the old classes, such as scikit-learn's labels, are
    removed.
    """
    caller = "replace_head"
    if [classes, shape, layers].count(None) != 2:
        raise ValueError(f"{caller}: expected one of classes, shape and layers")
    classes = _count(caller, classes, shape)
    loaded = load(model, caller)
    expect_weights(loaded, caller)
    draft = Draft(loaded, caller).run(BEFORE)
    if any(n.domain == ML and n.op_type in WRITERS for n in draft.graph):  # linear models have attributes for weights
        draft.run([convert_opset, expand_ml])
    known = known_values(draft)
    result = _result(draft, known, output)
    head = find_head(draft, known, result)
    rng = np.random.default_rng(seed)
    if layers is not None:
        return given_back(_with_layers(draft, head, result, read_layers(layers, draft, rng)), model, caller)
    assert classes is not None
    _Replacement(draft, known, head, classes, shape, rng).run(result)
    unbind_names(draft)
    return given_back(draft.model, model, caller)


def _count(caller: str, classes: Any, shape: Any) -> int | None:
    """How many numbers the new head computes."""
    if shape is not None:
        sizes = [d for d in shape if d != -1]
        if len(sizes) != len(shape) - 1 or len(shape) < 2 or not all(isinstance(d, int) and d > 0 for d in sizes):
            raise ValueError(
                f"{caller}: shape is {shape}, expected -1 for the examples and sizes for the others, [-1, 17, 2]"
            )
        return int(math.prod(sizes))
    if classes is not None and (not isinstance(classes, int | np.integer) or isinstance(classes, bool) or classes < 1):
        raise ValueError(f"{caller}: classes is {classes!r}, expected a number of at least 1")
    return None if classes is None else int(classes)


def _result(draft: Draft, known: Mapping[str, ir.Value], output: str | None) -> ir.Value:
    """The value whose head is meant, which is an output then."""
    graph = draft.graph
    inside = {str(v.name): v for node in graph for v in node.outputs if v.name}
    if output is None:
        scores = [v for v in graph.outputs if (d := known[str(v.name)].dtype) is None or d.is_floating_point()]
        if len(scores) == 1:
            return scores[0]
        names = listed(str(v.name) for v in scores or graph.outputs)
        raise ValueError(f"{draft.caller}: name the output whose head to replace with `output`: {names}")
    if output not in inside:
        close = suggestion(output, [str(v.name) for v in graph.outputs])
        raise ValueError(f"{draft.caller}: output names {output!r}, which no node of the model computes{close}")
    value = inside[output]
    dtype = known[output].dtype
    if dtype is not None and not dtype.is_floating_point():
        names = listed(str(v.name) for v in graph.outputs if v is not value)
        raise ValueError(
            f"{draft.caller}: the output {output!r} holds {dtype.name.lower()}, expected scores, which floating-point "
            f"numbers are: {names}"
        )
    if not value.is_graph_output():
        after = _after(graph, value)
        graph.outputs[:] = [value, *(v for v in graph.outputs if v not in after)]
        drop_dead(draft)
    return value


def _after(graph: ir.Graph, value: ir.Value) -> set[ir.Value]:
    """A value and what depends on it."""
    return {value, *(v for node in descendants(graph, {value}) for v in node.outputs)}


def _with_layers(draft: Draft, head: Head, result: ir.Value, layers: Draft) -> ir.Model:
    """The model up to the head's input, and layers behind it."""
    data, after = str(head.data.name), _after(draft.graph, head.node.outputs[0])
    if head.data.producer() is None:
        raise ValueError(f"{draft.caller}: nothing is before the head of {result.name!r}: it reads {data!r} itself")
    others = [str(v.name) for v in draft.graph.outputs if v not in after and v.name != data]
    cut_draft(draft, [data, *others], ())
    new = list(layers.graph.initializers)
    for name in new:
        mark(layers.graph.initializers[name], PARAMETER)
    note_head(layers.model, new)
    free = [str(v.name) for v in layers.graph.inputs]
    return joined(draft, layers, {data: free[0]}, "head.", f"{draft.caller}: layers")


class _Replacement:
    """A new weight and a new bias in a model."""

    def __init__(
        self,
        draft: Draft,
        known: Mapping[str, ir.Value],
        head: Head,
        classes: int,
        shape: Sequence[int] | None,
        rng: Any,
    ) -> None:
        self._draft, self._graph, self._known, self._head = draft, draft.graph, known, head
        self._new, self._shape, self._rng = classes, shape, rng
        self._fan_in = (
            math.prod(head.weight[1:]) if head.node.op_type in CONVOLUTIONS else head.weight[1 - head.weight_axis]
        )
        self._dtype = self._type()
        self._bias: list[tuple[ir.Node, int, list[int]]] = []  # readers of it, and its shape

    def _type(self) -> ir.DataType:
        """Of what the head multiplies; quantized weights become numbers of this type."""
        for value in (self._head.data, self._head.node.outputs[0]):
            dtype = self._known[str(value.name)].dtype if str(value.name) in self._known else None
            if dtype is not None and dtype.is_floating_point():
                return dtype
        return ir.DataType.FLOAT

    def run(self, result: ir.Value) -> None:
        head, draft = self._head, self._draft
        groups = head.node.attributes.get_int("group", 1)
        if self._new % groups or (groups > 1 and head.weight_axis == 1):
            raise ValueError(
                f"{draft.caller}: {head.node.op_type} (node {head.node.name!r}) has {groups} groups, which "
                f"{self._new} results are not a multiple of"
            )
        self._find_bias()
        follow = ClassAxis(draft, self._known, self._new, self._shape, None if self._bias else self._note_bias)
        follow.follow(head.node.outputs[0], head.axis, head.classes)
        if result in follow.lost:
            lost = follow.lost[result]
            raise ValueError(
                f"{draft.caller}: the number of classes in {result.name!r} cannot change, since {lost.why}; to end the "
                f"model before that: output={lost.before!r}"
            )
        axis, place = follow.at.get(result), list(self._graph.outputs).index(result)
        for edit in follow.edits:
            edit()
        self._graph.sort()  # new shapes came last
        if self._shape is not None and axis != WHOLE:
            self._reshape(self._graph.outputs[place], axis)
        self._graph.outputs[:] = [v for v in self._graph.outputs if v not in follow.lost]
        self._put_in()
        self._state_shapes(follow)

    def _find_bias(self) -> None:
        if self._head.bias is not None:
            at = self._head.bias_at
            assert at is not None
            dims = self._known[str(self._head.bias.name)].shape
            leading = [1] * (len(dims) - 1) if dims is not None else []
            self._bias.append((self._head.node, at, [*leading, self._new]))

    def _note_bias(self, node: ir.Node, at: int) -> None:
        value = node.inputs[at]
        assert value is not None
        shape = self._known[str(value.name)].shape
        assert shape is not None
        sizes = [int(d) for d in shape if isinstance(d, int)]
        place = next((k for k, d in enumerate(sizes) if d == self._head.classes and d != 1), len(sizes) - 1)
        self._bias.append((node, at, [*sizes[:place], self._new, *sizes[place + 1 :]]))

    def _put_in(self) -> None:
        """The new weight and bias, with the names of the old ones if nothing else has these."""
        head, node = self._head, self._head.node
        shape = list(head.weight)
        shape[head.weight_axis] = self._new
        old = [(node, head.at, shape, "weight"), *((n, at, sizes, "bias") for n, at, sizes in self._bias[:1])]
        values = []
        for reader, at, sizes, kind in old:
            value = reader.inputs[at]
            assert value is not None
            numbers = uniform(self._rng, sizes, self._fan_in, self._dtype)
            values.append((_origin(value), new_parameter(self._graph, f"head.{kind}", numbers, self._dtype)))
            if node.op_type == WEIGHT_WITHIN and kind == "weight":
                self._unpack()
            reader.replace_input_with(at, values[-1][1])
            forget_call(reader)
        forget_call(node)
        drop_dead(self._draft)
        names = []
        for origin, value in values:
            if origin is not None and origin not in self._graph.initializers:
                value.name = origin
            if signature(self._graph):
                mark(value, PARAMETER)
            names.append(str(value.name))
        note_head(self._draft.model, names)

    def _unpack(self) -> None:
        """A plain product, and its bias, in place of one whose weight is in pieces."""
        node, bias = self._head.node, self._head.bias
        for k in range(2, len(node.inputs)):
            node.replace_input_with(k, None)
        node.resize_inputs(2)
        node.op_type, node.domain = "MatMul", ""
        node.attributes.clear()
        if bias is not None:
            result = node.outputs[0]
            add = ir.Node("", "Add", [result, bias], num_outputs=1, name=f"{node.name}_bias")
            put_behind(result, add, f"{result.name}_before_bias")
            self._graph.insert_after(node, add)
            self._bias = [(add, 1, [self._new])]

    def _reshape(self, result: ir.Value, axis: int | None) -> None:
        """The result takes the shape that was asked for at the end."""
        assert self._shape is not None
        rank = self._known[str(result.name)].shape
        if rank is None or len(rank) != 2 or axis != 1:
            raise ValueError(
                f"{self._draft.caller}: shape is {list(self._shape)}, but the head of {result.name!r} gives more than "
                f"one vector for each example: {'?' if rank is None else list(rank)}"
            )
        target = new_node("Constant", [], f"{result.name}_shape", {"value_ints": list(self._shape)})
        reshape = new_node("Reshape", [result, target.outputs[0]], f"{result.name}_reshaped")
        put_behind(result, reshape, f"{result.name}_flat")
        self._graph.append(target)
        self._graph.append(reshape)
        self._graph.sort()

    def _state_shapes(self, follow: ClassAxis) -> None:
        """Of what has other shapes now."""
        for value in follow.at:
            value.shape = follow.shape_of(value) if value.is_graph_output() else None
        known = known_values(self._draft)
        for value in self._graph.outputs:
            found = known[str(value.name)]
            value.type = value.type or found.type
            value.shape = named_dims(found) if value.shape is None else value.shape


def _origin(value: ir.Value) -> str | None:
    """The initializer that a weight is, or is computed from: the name without what quantizers add to it."""
    while (node := value.producer()) is not None:
        source = node.inputs[0] if node.inputs else None
        if source is None:
            return None
        value = source
    return re.sub(r"_(quantized|Q\d)$", "", str(value.name)) if value.is_initializer() else None
