"""add_functions(): puts the operators of a model into it as ONNX functions, so that any ONNX runtime can run it.

A function is known by its domain and name alone: overloads exist, but onnx.reference does not tell them apart. So all
nodes of one operator share one function. Where they agree on their attributes and on which optional inputs they have,
its body is made for just that. Where they do not, it has one branch for each way in which the operator is used, and
chooses by the attributes and the inputs present. It also finds out whether its numbers are of a half type, and how many
dimensions an image has, unless the model declares that of these nodes' inputs, and they agree. For onnx.reference,
which knows no defaults of a function's attributes and wants every input and output named, nodes then get the attributes
in question written out, and empty names at the end of their inputs and outputs. A node keeps its domain and type, so
that a runtime with the operator registered takes the kernel; none of this changes what that computes.

The files of this folder have the names of those in ops/, and a function for each of their operators. ONNX functions
import the opset of the standard domain that the model does, 18 or newer: operators used in both must be of one version.
"""

import importlib
import inspect
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import onnx
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from onnxgrad.functions.body import Body, Declared, Value
from onnxgrad.op import OPERATORS, Op, operator_of
from onnxgrad.schema import Attribute, is_standard

MINIMUM_OPSET = 18
MINIMUM_IR_VERSION = 8  # model-local functions
WRITTEN_BY = "Written by onnxgrad.add_functions."
HALVES = {TensorProto.FLOAT16, TensorProto.BFLOAT16}
Types: TypeAlias = dict[str, tuple[int, int | None]]  # of elements, 0 if unknown, and the rank, by the name of a tensor
UNKNOWN = 0, None
Use = tuple[tuple[Any, ...], tuple[bool, ...]]  # values of the attributes, and which optional inputs are there


def add_functions(model: Any) -> ModelProto:
    """Returns a copy of the model that contains every operator of onnxgrad in it as an ONNX function of standard
    operators.

    `model` is an onnx.ModelProto, an onnx_ir.Model or a path. The result runs on stock onnxruntime and in
    onnx.reference; where onnxgrad's operators are registered, their kernels run. Existing functions of the model with
    these names stay unchanged.
    """
    result = _loaded(model)
    for function in [f for f in result.functions if f.doc_string == WRITTEN_BY]:
        result.functions.remove(function)  # the nodes may have changed since
    result = _with_plain_attributes(result)
    own = {(f.domain, f.name) for f in result.functions}
    used: dict[str, list[tuple[NodeProto, Types]]] = {}
    for node, types in _typed_nodes(result):
        if _is_ours(node) and (node.domain, node.op_type) not in own:
            used.setdefault(node.op_type, []).append((node, types))
    if not used:
        return result
    uses = {name: _Uses(OPERATORS[name], found) for name, found in used.items()}
    if _opset(result) < MINIMUM_OPSET:
        return add_functions(_converted(result))
    result.ir_version = max(result.ir_version, MINIMUM_IR_VERSION)
    functions = []
    for name, entry in uses.items():
        if OPERATORS[name].domain not in {i.domain for i in result.opset_import}:
            result.opset_import.append(helper.make_opsetid(OPERATORS[name].domain, OPERATORS[name].version))
        entry.write_out()
        functions.append(entry.function(_opset(result)))
    functions += result.functions  # after ours, which these may call: onnx.reference reads them in order
    result.ClearField("functions")
    result.functions.extend(functions)
    return result


def _loaded(model: Any) -> ModelProto:
    if isinstance(model, (str, os.PathLike)):
        path = Path(model)
        if not path.is_file():
            raise FileNotFoundError(f"add_functions: {str(path)!r} does not exist, expected an ONNX model")
        try:
            return onnx.load(path)
        except Exception as error:  # protobuf's own errors tell no reader anything
            raise ValueError(f"add_functions: {str(path)!r} is not an ONNX model ({type(error).__name__})") from None
    if isinstance(model, ModelProto):
        copy = ModelProto()
        copy.CopyFrom(model)
        return copy
    if type(model).__module__.split(".")[0] == "onnx_ir":
        onnx_ir: Any = importlib.import_module("onnx_ir")
        if isinstance(model, onnx_ir.Model):
            # A proto would name a file of weights, but not the folder it is in: they come along, as with a path.
            loaded = onnx_ir.external_data.load_to_model(model.clone())
            converted: ModelProto = onnx_ir.to_proto(loaded)
            return converted
    raise TypeError(
        f"add_functions: model is a {type(model).__name__}, expected an onnx.ModelProto, an onnx_ir.Model or a path"
    )


def _typed_nodes(model: ModelProto) -> Iterator[tuple[NodeProto, Types]]:
    """Every node, in subgraphs and in functions too, with the types that are declared where it stands."""
    yield from _typed_nodes_of(model.graph, {})
    for function in model.functions:
        yield from ((node, {}) for node in nodes_within(function))


def _typed_nodes_of(graph: GraphProto, outer: Types) -> Iterator[tuple[NodeProto, Types]]:
    declared = (*graph.input, *graph.value_info, *graph.output)
    types = {
        **outer,
        **{v.name: _type_and_rank(v.type.tensor_type) for v in declared},
        **{t.name: (t.data_type, len(t.dims)) for t in graph.initializer},
    }
    for node in graph.node:
        yield node, types
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _typed_nodes_of(inner, types)


def _type_and_rank(declared: Any) -> tuple[int, int | None]:
    return declared.elem_type, len(declared.shape.dim) if declared.HasField("shape") else None


def all_nodes(model: ModelProto) -> Iterator[NodeProto]:
    """Every node, in subgraphs and in functions too."""
    for graph in (model.graph, *model.functions):
        yield from nodes_within(graph)


def nodes_within(graph: GraphProto | FunctionProto) -> Iterator[NodeProto]:
    """The nodes of a graph or a function, and of subgraphs."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from nodes_within(inner)


def _is_ours(node: NodeProto) -> bool:
    return operator_of(node.domain, node.op_type) is not None


def _with_plain_attributes(model: ModelProto) -> ModelProto:
    """Without functions in which one of our nodes takes an attribute from the caller: these are inlined."""
    from onnx import inliner

    while passing_on := [
        (function.domain, function.name)
        for function in model.functions
        if any(_is_ours(n) and any(a.ref_attr_name for a in n.attribute) for n in nodes_within(function))
    ]:
        model = inliner.inline_selected_functions(model, passing_on)
    return model


def _opset(model: ModelProto) -> int:
    found = [entry.version for entry in model.opset_import if is_standard(entry.domain)]
    if not found:
        model.opset_import.append(helper.make_opsetid("", MINIMUM_OPSET))
        return MINIMUM_OPSET
    return int(found[0])


def _converted(model: ModelProto) -> ModelProto:
    from onnx import version_converter

    try:
        return version_converter.convert_version(model, MINIMUM_OPSET)
    except Exception as error:  # of any type, from C++
        raise ValueError(
            f"add_functions: the model imports opset {_opset(model)}, its functions need {MINIMUM_OPSET} or newer, and "
            f"onnx cannot convert it: {str(error).splitlines()[0]}"
        ) from None


class _Uses:
    """All nodes of one operator, and the different ways in which they use it."""

    def __init__(self, op: Op[..., Any], found: list[tuple[NodeProto, Types]]) -> None:
        nodes = [node for node, _ in found]
        self.op, self.nodes, self.write = op, nodes, op.function
        taken = inspect.signature(self.write).parameters  # attributes that it does not take do not matter to it
        self.attributes = [a for a in op.attributes if a.name in taken]
        self.ways = list(dict.fromkeys(self._use(node) for node in nodes))
        values, present = ([way[part] for way in self.ways] for part in (0, 1))
        self.differing = [a for k, a in enumerate(self.attributes) if len({v[k] for v in values}) > 1]
        self.guarded = [i.name for k, i in enumerate(op.inputs) if len({p[k] for p in present}) > 1]
        self.declared = {
            i.name: _agreed([types.get(node.input[k], UNKNOWN) for node, types in found if len(node.input) > k])
            for k, i in enumerate(op.inputs)
        }

    def _use(self, node: NodeProto) -> Use:
        given = {a.name: a for a in node.attribute}
        values = tuple(_value(a, given.get(a.name)) for a in self.attributes)
        names = [*node.input, *[""] * len(self.op.inputs)]
        return values, tuple(bool(names[k]) for k in range(len(self.op.inputs)))

    def write_out(self) -> None:
        """Completes the nodes, as described above."""
        for node in self.nodes:
            node.input.extend([""] * (len(self.op.inputs) - len(node.input)))
            node.output.extend([""] * (len(self.op.outputs) - len(node.output)))
            given = {a.name for a in node.attribute}
            for attribute in self.differing:
                if attribute.name not in given:
                    node.attribute.append(_proto(attribute, _value(attribute, None)))

    def function(self, opset: int) -> FunctionProto:
        body = Body([i.name for i in self.op.inputs if not i.optional], self.declared)
        inputs = {i.name: Value(body, i.name, i.name in self.guarded) for i in self.op.inputs}
        read = {a.name: body.attribute(a.name, _kind(a)) for a in self.differing}
        results = self._branches(body, inputs, read, self.ways)
        proto = body.function(self.op, list(inputs), results, list(read), opset)
        proto.doc_string = WRITTEN_BY
        return proto

    def _branches(self, body: Body, inputs: dict[str, Value], read: dict[str, Value], ways: list[Use]) -> list[Value]:
        """If it is the first of these ways, its body, or else that of one of the others."""
        values, present = ways[0]

        def this() -> list[Value]:
            there = [value if here else None for value, here in zip(inputs.values(), present, strict=True)]
            settings = {a.name: _plain(a, v) for a, v in zip(self.attributes, values, strict=True)}
            return list(self.write(body, *there, **settings))

        if len(ways) == 1:
            return this()
        conditions: list[Value] = [
            _same(body, read[a.name], a, v, max(len(w[0][k]) for w in self.ways) if a.is_list else 0)
            for k, (a, v) in enumerate(zip(self.attributes, values, strict=True))
            if a in self.differing
        ]
        for value, here in zip(inputs.values(), present, strict=True):
            if value.guarded:
                found = body.OptionalHasElement(value)
                conditions.append(found if here else ~found)
        chosen = conditions[0]
        for condition in conditions[1:]:
            chosen = chosen & condition
        return body.choose(chosen, this, lambda: self._branches(body, inputs, read, ways[1:]))


def _agreed(found: Sequence[tuple[int, int | None]]) -> Declared:
    halves, ranks = {t in HALVES if t else None for t, _ in found}, {rank for _, rank in found}
    return Declared(halves.pop() if len(halves) == 1 else None, ranks.pop() if len(ranks) == 1 else None)


def _same(body: Body, read: Value, attribute: Attribute, value: Any, longest: int) -> Value:
    """Whether an attribute of the calling node has a value."""
    if not attribute.is_list:
        return _equal(body, read, attribute, value)
    # Lists of different length cannot be compared, so all are filled up to one length, and that of the list counts too.
    filling = (attribute.kind(),) * longest
    filled = body.Concat(read, _constant(body, attribute, filling), axis=0)
    same = body.Squeeze(body.Shape(read)).equals(len(value))
    for k, element in enumerate((*value, *filling)[:longest]):
        same = same & _equal(body, body.Squeeze(body.slice(filled, k, k + 1)), attribute, element)
    return same


def _equal(body: Body, read: Value, attribute: Attribute, value: Any) -> Value:
    """Whether two scalars are the same; Equal compares strings from opset 19 on only."""
    constant = body.node("Constant", **{f"value_{_name(attribute)}": value})
    if attribute.kind is not str:
        return read.equals(constant)
    both = body.Concat(body.Reshape(read, [1]), body.Reshape(constant, [1]), axis=0)
    return body.Size(body.Unique(both)).equals(1)


def _constant(body: Body, attribute: Attribute, value: Any) -> Value:
    return body.node("Constant", **{f"value_{_kind(attribute)}": value})


def _name(attribute: Attribute) -> str:
    return {int: "int", float: "float", str: "string"}[attribute.kind]


def _kind(attribute: Attribute) -> str:
    return f"{_name(attribute)}s" if attribute.is_list else _name(attribute)


def _value(attribute: Attribute, proto: onnx.AttributeProto | None) -> Any:
    """What a node says, or what it means by saying nothing: no list is an empty one, no `clip` an infinite one."""
    if proto is not None:
        value = helper.get_attribute_value(proto)
        if attribute.kind is str:
            return tuple(v.decode() for v in value) if attribute.is_list else value.decode()
        return tuple(value) if attribute.is_list else value
    if attribute.default is not None:
        return tuple(attribute.default) if attribute.is_list else attribute.default
    return () if attribute.is_list else float("inf")


def _plain(attribute: Attribute, value: Any) -> Any:
    return list(value) if attribute.is_list else value


def _proto(attribute: Attribute, value: Any) -> onnx.AttributeProto:
    kind = onnx.AttributeProto.AttributeType.Value(_kind(attribute).upper())
    return helper.make_attribute(attribute.name, _plain(attribute, value), attr_type=kind)
