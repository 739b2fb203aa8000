"""The builder: appends nodes with their types and shapes, each computation once, and computes what is constant.

Rules write `op.MatMul(a, b)`; `op` stands for the builder at work. Numbers and lists among the inputs become constants
of the type that the operator's schema asks for there.
"""

import contextvars
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, TypeProto, defs, helper, shape_inference
from onnx.reference import ReferenceEvaluator

from onnxgrad.graph.tensor import MOST_READ, Dim, Tensor, dims_of
from onnxgrad.graph.validity import one_line
from onnxgrad.op import OPERATORS, operator_of, reference_ops
from onnxgrad.schema import MICROSOFT, is_standard

FOLDED = {  # what rules do to shapes and axes; with constant inputs the result is computed at once
    "Add", "Sub", "Mul", "Div", "Mod", "Neg", "Max", "Min", "Equal", "Less", "Greater", "Not", "And", "Or", "Where",
    "Cast", "Concat", "Gather", "Slice", "Squeeze", "Unsqueeze", "Reshape", "Range", "ReduceProd", "ReduceSum",
    "ConstantOfShape", "Expand", "Transpose", "ScatterElements", "BroadcastGradientArgs", "Size", "Shape", "Identity",
}  # fmt: skip
RANDOM = {
    "Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
}  # fmt: skip
SHAPED_BY = {"Reshape": 1, "Expand": 1, "ConstantOfShape": 0}  # which input of ONNX's operators is the output's shape
Argument = Any  # a Tensor, a number, a list of numbers, an array, or None for an input left out

_current: contextvars.ContextVar["Builder"] = contextvars.ContextVar("builder")


class Builder:
    """Writes nodes at the end of a graph."""

    def __init__(self, graph: ir.Graph, outer: "Builder | None" = None) -> None:
        """Of a subgraph, `outer` writes into the graph around it: names in the two differ."""
        self.graph = graph
        self.opsets: dict[str, int] = graph.opset_imports if outer is None else outer.opsets
        self.scope = ""  # what names begin with
        if outer is None:
            graphs = (graph, *(graph.subgraphs() if any(map(_has_subgraph, graph)) else ()))
            self._names = {v.name for g in graphs for v in (*g.inputs, *g.initializers.values())}
            self._node_names = {node.name for g in graphs for node in g}
            self._names.update(v.name for g in graphs for node in g for v in node.outputs)
        else:
            self._names, self._node_names = outer._names, outer._node_names
        self.variables: set[ir.Value] = (
            set() if outer is None else outer.variables
        )  # initializers that are no constants
        self._contents: dict[ir.Value, tuple[Dim, ...]] = {}  # of vectors that hold a shape
        self._inferred: dict[Any, list[tuple[Any, Any] | None]] = {}  # outputs, by what makes them

    @functools.cached_property
    def _made(self) -> dict[Any, ir.Node]:
        """Every node, by what it computes."""
        found: dict[Any, ir.Node] = {}
        for node in self.graph:
            if not _has_subgraph(node) and node.op_type not in RANDOM:
                found.setdefault(_key(node.domain, node.op_type, node.inputs, node.attributes), node)
        return found

    @contextmanager
    def at_work(self, scope: str) -> Any:
        """Within it, `op` is this builder, and names begin with `scope`."""
        before, self.scope = self.scope, scope
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
            self.scope = before

    @contextmanager
    def in_place_of(self, node: ir.Node) -> Any:
        """The same: names begin with that of a node, and what is written says that it is in that node's modules."""
        written = len(self.graph)
        with self.at_work(node.name or ""):
            yield
        for new in list(self.graph)[written:]:
            new.metadata_props.update(node.metadata_props)

    def tensor(self, value: ir.Value) -> Tensor:
        """A value of the graph, to compute with."""
        return Tensor(self, value)

    # Nodes

    def node(
        self,
        op_type: str,
        inputs: Sequence[Argument],
        attributes: dict[str, Any] | None = None,
        outputs: int = 1,
        domain: str = "",
    ) -> tuple[Tensor, ...]:
        """The outputs of a node: of one that is there already, if it computes the same."""
        if op_type == "CastLike" and (dtype := inputs[1].dtype) is not None and not attributes:
            if isinstance(inputs[0], Tensor) and inputs[0].dtype == dtype:
                return (inputs[0],)
            op_type, inputs, attributes = "Cast", inputs[:1], {"to": dtype.value}  # which does not wait for the other
        schema = schema_of(op_type, domain, self.opsets)
        values = self._values(schema, inputs)
        given = {k: v for k, v in (attributes or {}).items() if v is not None}
        proto_attributes = [ir.convenience.convert_attribute(k, v) for k, v in given.items()]
        wrapped = {a.name: a for a in proto_attributes}
        if (folded := self.fold(op_type, domain, values, wrapped, outputs)) is not None:
            return folded
        key = _key(domain, op_type, values, wrapped)
        found = self._made.get(key)
        if found is not None and op_type not in RANDOM:
            self.ask_for_outputs(found, outputs)
            return tuple(self.tensor(v) for v in found.outputs[:outputs])
        node = ir.Node(domain, op_type, values, proto_attributes, num_outputs=outputs)
        node.name = self._fresh(f"{self.scope}/{op_type}", self._node_names)
        for k, value in enumerate(node.outputs):
            value.name = self._fresh(f"{node.name}_output_{k}", self._names)
        self._infer(node, schema)
        self.graph.append(node)
        self._made[key] = node
        if domain and domain not in self.opsets:
            self.opsets[domain] = 1
        return tuple(self.tensor(v) for v in node.outputs)

    def control_flow(
        self, op_type: str, inputs: Sequence[Tensor | None], attributes: dict[str, Any], like: Sequence[ir.Value]
    ) -> list[Tensor]:
        """The outputs of a node with subgraphs, whose types and shapes are those of other values."""
        given = [ir.convenience.convert_attribute(k, v) for k, v in attributes.items() if v != []]
        values = [None if t is None else t.value for t in inputs]
        node = ir.Node("", op_type, values, given, num_outputs=len(like))
        node.name = self._fresh(f"{self.scope}/{op_type}", self._node_names)
        for k, (value, other) in enumerate(zip(node.outputs, like, strict=True)):
            value.name = self._fresh(f"{node.name}_output_{k}", self._names)
            value.type, value.shape = other.type, other.shape
        self.graph.append(node)
        return [self.tensor(v) for v in node.outputs]

    def subgraph(self, name: str) -> "Builder":
        """A builder of a new subgraph."""
        return Builder(ir.Graph([], [], nodes=[], name=name), self)

    def parameter(self, name: str, kind: Any, shape: ir.Shape | None = None) -> Tensor:
        """A value that is going to be an input of the graph."""
        return self.tensor(ir.Value(name=self.fresh_value_name(name), type=kind, shape=shape))

    def loop_inputs(self, scope: str) -> tuple[Tensor, Tensor]:
        """What the body of a Loop begins with: the number of the step, and whether there is one more."""
        kinds = {"number": ir.DataType.INT64, "more": ir.DataType.BOOL}
        number, more = (self.parameter(f"{scope}/{n}", ir.TensorType(kind), ir.Shape([])) for n, kind in kinds.items())
        return number, more

    def copy_of_subgraph(self, graph: ir.Graph) -> "Builder":
        """A builder that writes into a copy of a subgraph, whose nodes and values get names of their own."""
        copy = graph.clone(allow_outer_scope_values=True)
        for node in copy.all_nodes():
            node.name = self._fresh(f"{self.scope}/{node.name or node.op_type}", self._node_names)
        inputs = [v for g in (copy, *copy.subgraphs()) for v in g.inputs]
        for value in (*inputs, *(v for node in copy.all_nodes() for v in node.outputs)):
            if value.name:
                value.name = self._fresh(f"{self.scope}/{value.name}", self._names)
        return Builder(copy, self)

    def copy_of_node(self, node: ir.Node, again: Mapping[ir.Value, ir.Value]) -> ir.Node:
        """Writes a node once more, which reads other values in place of some, in its subgraphs too."""
        attributes = [self._copy_of_attribute(a, again) for a in node.attributes.values()]
        inputs = [None if v is None else again.get(v, v) for v in node.inputs]
        copy = ir.Node(
            node.domain, node.op_type, inputs, attributes, num_outputs=len(node.outputs), overload=node.overload
        )
        copy.name = self._fresh(f"{node.name}_again", self._node_names)
        for old, value in zip(node.outputs, copy.outputs, strict=True):
            value.name = self.fresh_value_name(f"{old.name}_again") if old.name else ""
            value.type, value.shape = old.type, old.shape
        self.graph.append(copy)
        return copy

    def _copy_of_attribute(self, attribute: ir.Attr, again: Mapping[ir.Value, ir.Value]) -> ir.Attr:
        if attribute.type == ir.AttributeType.GRAPHS:
            return ir.AttrGraphs(attribute.name, [self._reading(g, again) for g in attribute.as_graphs()])
        if attribute.type == ir.AttributeType.GRAPH:
            return ir.AttrGraph(attribute.name, self._reading(attribute.as_graph(), again))
        return attribute

    def _reading(self, graph: ir.Graph, again: Mapping[ir.Value, ir.Value]) -> ir.Graph:
        copy = self.copy_of_subgraph(graph).graph
        for node in copy.all_nodes():
            for k, value in enumerate(node.inputs):
                if value is not None and value in again:
                    node.replace_input_with(k, again[value])
        for inner in (copy, *copy.subgraphs()):
            inner.outputs[:] = [again.get(v, v) for v in inner.outputs]
        return copy

    def inline(self, graph: ir.Graph, arguments: Sequence[Tensor] = ()) -> list[Tensor]:
        """Writes the nodes of a subgraph, given what its inputs are; its outputs."""
        copy = self.copy_of_subgraph(graph).graph
        for parameter, argument in zip(copy.inputs, arguments, strict=True):
            parameter.replace_all_uses_with(argument.value, replace_graph_outputs=True)
        results, nodes = list(copy.outputs), list(copy)
        copy.outputs.clear()
        copy.remove(nodes)
        self.graph.extend(nodes)
        return [self.tensor(v) for v in results]

    def binary(self, op_type: str, a: Any, b: Any) -> Tensor:
        """An operator of two inputs; what changes nothing is left out."""
        if op_type == "Mul" and (_is_number(a, 1) or _is_number(b, 1)):
            return b if _is_number(a, 1) else a  # type: ignore[no-any-return]
        if op_type == "Add" and (_is_number(a, 0) or _is_number(b, 0)):
            return b if _is_number(a, 0) else a  # type: ignore[no-any-return]
        if op_type in ("Div", "Pow") and _is_number(b, 1):
            return a  # type: ignore[no-any-return]
        if op_type == "Pow" and isinstance(a, Tensor) and not isinstance(b, Tensor):
            b = self.constant(b, a.dtype)  # by its schema it might be an integer
        if op_type == "Pow" and isinstance(b, Tensor) and not isinstance(a, Tensor):
            a = self.constant(a, b.dtype)
        return self.node(op_type, [a, b])[0]

    def constant(self, content: Any, dtype: ir.DataType) -> Tensor:
        """A constant of the graph."""
        array = np.asarray(content, dtype.numpy())
        key = ("Constant", dtype, array.shape, array.tobytes())
        node = self._made.get(key)
        if node is None:
            tensor = ir.Tensor(array, dtype=dtype)
            node = ir.Node("", "Constant", [], [ir.AttrTensor("value", tensor)], num_outputs=1)
            node.name = self._fresh(f"{self.scope}/Constant", self._node_names)
            (value,) = node.outputs
            value.name = self._fresh(f"{node.name}_output_0", self._names)
            value.dtype, value.shape = dtype, ir.Shape(array.shape)
            self.graph.append(node)
            self._made[key] = node
        return self.tensor(node.outputs[0])

    def _values(self, schema: Any, inputs: Sequence[Argument]) -> list[ir.Value | None]:
        values: list[ir.Value | None] = []
        for k, argument in enumerate(inputs):
            if argument is None or isinstance(argument, Tensor):
                values.append(None if argument is None else argument.value)
                continue
            values.append(self.constant(argument, _constant_type(schema, inputs, k, argument)).value)
        while values and values[-1] is None:
            values.pop()
        return values

    def copy(self, tensor: Tensor) -> Tensor:
        """The same numbers under a name of their own."""
        node = ir.Node("", "Identity", [tensor.value], num_outputs=1)
        node.name = self._fresh(f"{self.scope}/Identity", self._node_names)
        node.outputs[0].name = self._fresh(f"{node.name}_output_0", self._names)
        node.outputs[0].type, node.outputs[0].shape = tensor.value.type, tensor.value.shape
        self.graph.append(node)
        return self.tensor(node.outputs[0])

    def apart(self, tensor: Tensor) -> Tensor:
        """The same, or a copy if it is not a node of this graph that makes it, or the graph gives it already."""
        value = tensor.value
        producer = value.producer()
        is_apart = producer is not None and producer.graph is self.graph and not value.is_graph_output()
        return tensor if is_apart else self.copy(tensor)

    def fresh_value_name(self, wanted: str) -> str:
        """The name, or one like it if it is taken."""
        return self._fresh(wanted, self._names)

    def _fresh(self, wanted: str, taken: set[Any]) -> str:
        name, k = wanted, 1
        while name in taken:
            k += 1
            name = f"{wanted}_{k}"
        taken.add(name)
        return name

    def ask_for_outputs(self, node: ir.Node, outputs: int) -> None:
        """Gives a node that was there before more of the outputs its operator has."""
        if len(node.outputs) < outputs:
            node.resize_outputs(outputs)
        left_out = [k for k in range(outputs) if not node.outputs[k].name]
        if not left_out:
            return
        for k in left_out:
            node.outputs[k].name = self._fresh(f"{node.name}_output_{k}", self._names)
        self._infer(node, schema_of(node.op_type, node.domain, self.opsets))

    def infer_again(self, node: ir.Node) -> None:
        """Finds the types and shapes of a node's outputs anew, once its inputs have others."""
        for value in node.outputs:
            value.shape = None
        self._infer(node, schema_of(node.op_type, "" if is_standard(node.domain) else node.domain, self.opsets))

    # What is known

    def constant_of(self, value: ir.Value) -> np.ndarray[Any, Any] | None:
        """The numbers of a value, if the graph fixes them and they are few."""
        producer = value.producer()
        if value in self.variables:
            return None
        if producer is not None:
            if producer.op_type != "Constant" or producer.domain:
                return None
            (attribute,) = producer.attributes.values()
            if attribute.name == "value":
                tensor = attribute.value
                return tensor.numpy() if tensor.size <= MOST_READ else None
            kind = {"value_int": np.int64, "value_float": np.float32}.get(attribute.name.removesuffix("s"))
            return None if kind is None else np.array(attribute.value, kind)
        if value.const_value is None or value.is_graph_input() or value.const_value.size > MOST_READ:
            return None
        if isinstance(value.const_value, ir.ExternalTensor):
            return None  # small ones are read at the beginning, if they can be
        return value.const_value.numpy()

    def contents_of(self, value: ir.Value) -> tuple[Dim, ...] | None:
        """What a vector of integers holds, as far as it is known: Shape's of a symbolic shape, say."""
        if value in self._contents:
            return self._contents[value]
        constant = self.constant_of(value)
        found: tuple[Dim, ...] | None = None
        producer = value.producer()
        if constant is not None:
            found = tuple(int(x) for x in constant) if constant.ndim == 1 and constant.dtype.kind in "iu" else None
        elif producer is not None and not producer.domain:
            found = self._contents_from(producer)
        if found is not None:
            self._contents[value] = found
        return found

    def _contents_from(self, node: ir.Node) -> tuple[Dim, ...] | None:
        if node.op_type == "Shape" and node.inputs[0] is not None:
            shape = self.tensor(node.inputs[0]).shape
            start, end = (node.attributes.get_int(k, None) for k in ("start", "end"))
            return None if shape is None else shape[start:end]
        if node.op_type == "Concat":
            parts = [self.contents_of(v) for v in node.inputs if v is not None]
            return None if any(p is None for p in parts) else tuple(d for p in parts if p is not None for d in p)
        if node.op_type == "Gather" and node.inputs[0] is not None and node.inputs[1] is not None:
            held, which = self.contents_of(node.inputs[0]), self.constant_of(node.inputs[1])
            if held is not None and which is not None and which.ndim == 1:
                return tuple(held[int(k)] for k in which)
        return None

    def fold(
        self, op_type: str, domain: str, values: list[ir.Value | None], attributes: Any, outputs: int
    ) -> tuple[Tensor, ...] | None:
        """The result of a node whose inputs are constant, or of Shape and Size where the shape is known."""
        if op_type == "Shape" and values[0] is not None:
            shape = self.tensor(values[0]).shape
            start, end = (attributes[k].as_int() if k in attributes else None for k in ("start", "end"))
            part = (None,) if shape is None else shape[start:end]
            known = all(isinstance(d, int) for d in part)
            return (self.constant(part, ir.DataType.INT64),) if known else None
        if op_type == "Size" and values[0] is not None and (dims := self.tensor(values[0]).static_shape) is not None:
            return (self.constant(math.prod(dims), ir.DataType.INT64),)
        if op_type not in FOLDED or not (is_standard(domain) or operator_of(domain, op_type)):
            return None
        arrays = [None if v is None else self._shape_numbers(v) for v in values]
        if not values or any(a is None and v is not None for a, v in zip(arrays, values, strict=True)):
            return None
        if op_type == "Range":  # vectors of one element are taken for scalars
            arrays = [None if a is None else a.reshape(()) for a in arrays]
        if (size := size_of_result(op_type, arrays)) is not None and size > MOST_READ:
            return None
        node = ir.Node(domain, op_type, values, [*attributes.values()], num_outputs=outputs)
        for k, output in enumerate(node.outputs):
            output.name = f"result_{k}"
        try:
            results = evaluate(node, arrays, self.opsets)
        except Exception:  # of any type: a node that fails may be behind a branch that is never taken, and stays
            return None
        finally:
            for k in range(len(values)):
                node.replace_input_with(k, None)  # or what went into it would count as used
        if any(r.size > MOST_READ for r in results):
            return None
        return tuple(self.constant(r, ir.DataType.from_numpy(r.dtype)) for r in results)

    def _shape_numbers(self, value: ir.Value) -> np.ndarray[Any, Any] | None:
        """A constant of integers or truth values: the numbers of formulas are left alone."""
        constant = self.constant_of(value)
        return constant if constant is not None and constant.dtype.kind in "iub" else None

    def _infer(self, node: ir.Node, schema: Any) -> None:
        """Types and shapes of a node's outputs; those of nodes that look alike, which networks repeat, are kept.

        Names of dimensions count by the order in which they turn up: layers have names of their own.
        """
        numbers = [None if v is None else self._shape_numbers(v) for v in node.inputs]
        names: dict[str, Any] = {}
        looks = tuple(
            None
            if v is None
            else (
                v.dtype if isinstance(v.type, ir.TensorType) else v.type,
                _numbered(dims_of(v), names),
                None if n is None else (n.shape, n.tobytes()),
            )
            for v, n in zip(node.inputs, numbers, strict=True)
        )
        key = node.domain, node.op_type, looks, _attributes_key(node.attributes), len(node.outputs)
        if key not in self._inferred:
            found = self._infer_anew(node, schema, numbers)
            self._inferred[key] = [f if f is None else (f[0], _numbered(f[1], names)) for f in found]
        by_number = {number: name for name, number in names.items()}
        for value, known in zip(node.outputs, self._inferred[key], strict=True):
            if known is not None:
                value.type = known[0]
                if known[1] is not None:
                    value.shape = ir.Shape([by_number.get(d) if isinstance(d, tuple) else d for d in known[1]])
        self._fill_in_shape(node, schema)

    def _infer_anew(
        self, node: ir.Node, schema: Any, numbers: Sequence[np.ndarray[Any, Any] | None]
    ) -> list[tuple[Any, tuple[Dim, ...] | None] | None]:
        types: dict[str, TypeProto] = {}
        data: dict[str, TensorProto] = {}
        for value, known in zip(node.inputs, numbers, strict=True):
            if value is None:
                continue
            types[str(value.name)] = type_proto(value)
            if known is not None:
                data[str(value.name)] = onnx.numpy_helper.from_array(known)
        imports = [helper.make_opsetid(d, v) for d, v in self.opsets.items()]
        try:
            proto = ir.serde.serialize_node(node)
            inferred = shape_inference.infer_node_outputs(schema, proto, types, data, opset_imports=imports)
        except Exception as error:  # of any type, from C++
            described = ", ".join(repr(self.tensor(v)) if v is not None else "none" for v in node.inputs)
            text = f"{node.op_type} cannot be added to the graph with the inputs {described}: {error}"
            raise ValueError(text) from None
        return [_type_in(inferred.get(str(value.name))) for value in node.outputs]

    def _fill_in_shape(self, node: ir.Node, schema: Any) -> None:
        """A shape that is an input of the node is that of the output, dimensions known by name included."""
        if is_standard(node.domain):
            at = SHAPED_BY.get(node.op_type)
        else:  # operators of ours call it `shape`
            at = next((k for k, declared in enumerate(schema.inputs) if declared.name == "shape"), None)
        if at is None or node.inputs[at] is None:
            return
        held = self.contents_of(node.inputs[at])  # type: ignore[arg-type]
        if held is None or -1 in held or (node.op_type == "Reshape" and 0 in held):
            return
        if node.op_type == "Expand":  # which takes a 1 for whatever is there
            held = tuple(None if h == 1 else h for h in held)
        shape = self.tensor(node.outputs[0]).shape or (None,) * len(held)
        if len(shape) == len(held):
            merged = [s if h is None or isinstance(s, int) else h for h, s in zip(held, shape, strict=True)]
            node.outputs[0].shape = ir.Shape(merged)


class _Op:
    """`op.Name(inputs…, attribute=…)` appends a node; `outputs=2` asks for that many outputs."""

    def __getattr__(self, op_type: str) -> Any:
        def make(*inputs: Argument, outputs: int = 1, domain: str | None = None, **attributes: Any) -> Any:
            builder = _current.get()
            if domain is None:
                domain = _domain_of(op_type)
            made = builder.node(op_type, inputs, attributes, outputs, domain)
            return made[0] if outputs == 1 else made

        return make


op = _Op()


def _domain_of(op_type: str) -> str:
    """Where an operator is that is written without its domain: ONNX's own, ours, or one of onnxruntime's."""
    if defs.has(op_type):
        return ""
    return OPERATORS[op_type].domain if op_type in OPERATORS else MICROSOFT


def builder_at_work() -> Builder:
    """The one that `op` stands for."""
    return _current.get()


def schema_of(op_type: str, domain: str, opsets: Mapping[str, int]) -> Any:
    """The schema that a node of these opsets has."""
    return _schema(op_type, domain, opsets.get(domain, 1))


@functools.cache
def _schema(op_type: str, domain: str, version: int) -> Any:
    return defs.get_schema(op_type, max_inclusive_version=version, domain=domain)


def _constant_type(schema: Any, inputs: Sequence[Argument], k: int, argument: Any) -> ir.DataType:
    """The type that a number has as the k-th input: that of the tensors which share its type variable."""

    def declared(i: int) -> Any:
        return schema.inputs[min(i, len(schema.inputs) - 1)]

    variable = declared(k).type_str
    for i, other in enumerate(inputs):
        if isinstance(other, Tensor) and declared(i).type_str == variable:
            return other.dtype
    if isinstance(argument, np.ndarray) and argument.dtype.kind != "O" and argument.dtype != np.float64:
        return ir.DataType.from_numpy(argument.dtype)
    allowed = next((c.allowed_type_strs for c in schema.type_constraints if c.type_param_str == variable), [variable])
    if "tensor(int64)" in allowed and np.asarray(argument).dtype.kind in "iuf":
        return ir.DataType.INT64
    if "tensor(bool)" in allowed and np.asarray(argument).dtype.kind == "b":
        return ir.DataType.BOOL
    return ir.DataType.FLOAT


def size_of_result(op_type: str, inputs: Sequence[Any]) -> int | None:
    """How many elements a result has, of operators whose inputs say that in numbers."""
    if op_type in ("ConstantOfShape", "Expand"):
        return math.prod(int(d) for d in inputs[-1])
    if op_type == "Range":
        start, limit, delta = (int(a.item()) for a in inputs)
        return max(0, (limit - start) // delta) if delta else None
    return None


def evaluate(node: ir.Node, arrays: Sequence[Any], opsets: Mapping[str, int]) -> list[Any]:
    """The results of a node, by onnx's reference, given its inputs, None for one that is left out; or one sentence."""
    proto, outputs = ir.serde.serialize_node(node), len(node.outputs)
    for k, array in enumerate(arrays):
        proto.input[k] = "" if array is None else f"input_{k}"
    for k in range(outputs):
        proto.output[k] = f"result_{k}"
    given = {f"input_{k}": a for k, a in enumerate(arrays) if a is not None}
    graph = helper.make_graph(
        [proto],
        "constant",
        [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in given.items()],
        [helper.make_empty_tensor_value_info(f"result_{k}") for k in range(outputs)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(d, v) for d, v in opsets.items()])
    try:
        results = ReferenceEvaluator(model, new_ops=list(reference_ops())).run(None, given)
    except Exception as error:  # of any type
        raise ValueError(f"{node.op_type} (node {node.name!r}) cannot be computed: {one_line(error)}") from None
    return [np.asarray(r) for r in results]


def type_proto(value: ir.Value) -> TypeProto:
    """The type of a value, with the dimensions of a tensor or of those in a sequence."""
    if isinstance(value.type, (ir.SequenceType, ir.OptionalType)):
        return ir.serde.serialize_value(value).type
    if value.dtype is None:
        raise ValueError(f"the type of {value.name!r} is not known: declare it in the model's value_info")
    return helper.make_tensor_type_proto(value.dtype.value, dims_of(value))


def _type_in(found: TypeProto | None) -> tuple[Any, tuple[Dim, ...] | None] | None:
    """The type, and the dimensions of a tensor or of those in a sequence."""
    if found is None or found.WhichOneof("value") is None:
        return None
    if not found.HasField("tensor_type"):
        value = ir.Value(type=ir.serde.deserialize_type_proto_for_type(found))
        value.shape = ir.serde.deserialize_type_proto_for_shape(found)
        return value.type, dims_of(value)
    kind = found.tensor_type
    dims = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in kind.shape.dim)
    return ir.TensorType(ir.DataType(kind.elem_type)), dims if kind.HasField("shape") else None


def _numbered(dims: tuple[Dim, ...] | None, names: dict[str, Any]) -> Any:
    """Dimensions with numbers, in tuples, in place of names; `names` gets those it does not have yet."""
    if dims is None:
        return None
    return tuple(names.setdefault(d, (len(names),)) if isinstance(d, str) else d for d in dims)


def _is_number(argument: Any, number: float) -> bool:
    return isinstance(argument, (int, float)) and argument == number


def _key(domain: str, op_type: str, values: Iterable[Any], attributes: Any) -> Any:
    return domain, op_type, tuple(map(id, values)), _attributes_key(attributes)


def _attributes_key(attributes: Any) -> Any:
    return tuple(sorted((a.name, _content_key(a)) for a in attributes.values())) if attributes else ()


def _content_key(attribute: ir.Attr) -> str:
    content = attribute.value
    if attribute.type == ir.AttributeType.TENSOR:
        return repr((content.dtype, content.shape, content.tobytes() if content.size <= MOST_READ else id(content)))
    return repr(content)


def _has_subgraph(node: ir.Node) -> bool:
    attributes = node.attributes  # of which most nodes have none
    return bool(attributes) and any(
        a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in attributes.values()
    )
