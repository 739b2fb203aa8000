"""Writes the body of an ONNX function: formulas in Python become nodes of standard operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, TensorProto, helper

from onnxgrad.functions.arithmetic import Arithmetic

INT64_MAX = 2**63 - 1
# A float or a number of any kind takes the type of the tensor it meets; a list is a vector of int64.
Operand: TypeAlias = "Value | float | Sequence[int] | None"


class Value(Arithmetic):
    """A tensor of the function."""

    def __init__(self, body: Body, name: str, guarded: bool = False) -> None:
        self.body, self.name = body, name
        self.guarded = guarded  # absent from some of the nodes that share the function: see Body.given

    def append(self, op_type: str, *operands: Operand) -> Value:
        """A number among the operands takes this one's type."""
        return self.body.node(op_type, *(self.body.like(operand, self) for operand in operands))


class Passed(NamedTuple):
    """As an attribute of a node: what the calling node gives the attribute `name`, or nothing if it gives nothing."""

    name: str
    kind: str  # int, ints, float …


class Declared(NamedTuple):
    """What is known of an input of all nodes that share the function."""

    is_half: bool | None = None
    rank: int | None = None


class Body:
    """The nodes written so far; `body.Concat(a, b, axis=0)` adds one, for any operator."""

    def __init__(self, required: Sequence[str] = (), declared: Mapping[str, Declared] | None = None) -> None:
        self._required = required  # names of the inputs that are always there
        self._declared = declared or {}
        self._graphs: list[list[NodeProto]] = [[]]  # the innermost subgraph, which gets the next node, comes last
        self._count = 0
        self._passed: dict[str, None] = {}  # attributes of the function that its nodes take as they are
        self._constants: list[dict[Any, Value]] = [{}]  # of each of these graphs

    def __getattr__(self, op_type: str) -> Callable[..., Value]:
        if not op_type[0].isupper():
            raise AttributeError(op_type)
        return lambda *inputs, **attributes: self.node(op_type, *inputs, **attributes)

    def node(self, op_type: str, *inputs: Operand, **attributes: Any) -> Value:
        """Adds a node with one result."""
        return self.nodes(op_type, 1, *inputs, **attributes)[0]

    def nodes(self, op_type: str, results: int, *inputs: Operand, **attributes: Any) -> list[Value]:
        """Adds a node with several results; None is an absent input."""
        names = [self._operand(i).name if i is not None else "" for i in inputs]
        values = [self._fresh() for _ in range(results)]
        given = {name: value for name, value in attributes.items() if not isinstance(value, Passed)}
        node = helper.make_node(op_type, names, [v.name for v in values], **given)
        for name, value in attributes.items():
            if isinstance(value, Passed):
                reference = node.attribute.add()
                reference.name, reference.ref_attr_name = name, value.name
                reference.type = AttributeProto.AttributeType.Value(value.kind.upper())
                self._passed[value.name] = None
        self._graphs[-1].append(node)
        return values

    def ints(self, *values: int) -> Value:
        """A vector of int64."""
        return self._constant(TensorProto.INT64, [len(values)], values)

    def declared(self, value: Value) -> Declared:
        """What the model says of an input."""
        return self._declared.get(value.name, Declared())

    def attribute(self, name: str, kind: str) -> Value:
        """The value that the calling node gives an attribute; `kind` is int, float, string or a plural of these."""
        (value,) = self.nodes("Constant", 1)
        reference = self._graphs[-1][-1].attribute.add()
        reference.name, reference.ref_attr_name = f"value_{kind}", name
        reference.type = AttributeProto.AttributeType.Value(kind.upper())
        return value

    def like(self, value: Operand, typed: Value) -> Value:
        """A number as a scalar of the type of `typed`; tensors as they are."""
        if not isinstance(value, (int, float)):
            return self._operand(value)
        whole = isinstance(value, int) and abs(value) > 2**24  # what float32 cannot say
        kind = TensorProto.INT64 if whole else TensorProto.DOUBLE if isinstance(value, float) else TensorProto.FLOAT
        return self.node("CastLike", self._constant(kind, [], (value,)), typed)

    def numbers(self, values: Sequence[float], typed: Value) -> Value:
        """A vector of the type of `typed`."""
        return self.node("CastLike", self._constant(TensorProto.DOUBLE, [len(values)], tuple(values)), typed)

    def fill(self, value: float, shape: Operand, typed: Value) -> Value:
        """A tensor of that shape and of the type of `typed`, the value everywhere."""
        return self.node("Expand", self.like(value, typed), shape)

    def dims(self, *parts: Value | int) -> Value:
        """A shape put together of numbers and of vectors."""
        return self.node("Concat", *(self.ints(p) if isinstance(p, int) else p for p in parts), axis=0)

    def slice(self, data: Value, start: int, end: int = INT64_MAX, axis: int = 0) -> Value:
        """data[start:end] along an axis."""
        return self.node("Slice", data, [start], [end], [axis])

    def add_rows(self, rows: Value, numbers: Value, shape: Value) -> Value:
        """Zeros of that shape, a matrix, to which rows are added at their numbers."""
        where = self.node("Expand", self.node("Reshape", numbers, [-1, 1]), self.node("Shape", rows))
        zeros = self.fill(0, shape, rows)
        return self.node("ScatterElements", zeros, where, rows, axis=0, reduction="add")

    def given(self, value: Value, typed: Value, shape: Value) -> Value:
        """An optional input that this node has, though others that share the function may not.

        onnxruntime checks a branch also where it is never taken, and there an absent input may stand only where an
        operator takes any number of them. Concat does; `shape` is the input's own with 0 in front.
        """
        return self.node("Concat", self.fill(0, shape, typed), value, axis=0) if value.guarded else value

    def choose(
        self, condition: Value, yes: Callable[[], Sequence[Value]], no: Callable[[], Sequence[Value]]
    ) -> list[Value]:
        """If: a list of the results of one branch or the other.

        A branch may hold a Scan that reads values of the graph around it. Where onnxruntime 1.31 knows a condition
        before it runs, it puts the branch in place of the If and renames its values, but when it does so twice, for
        branches within branches, the Scan keeps the old names, and the process may die. So such a condition is made
        to depend on inputs.
        """
        then_branch, else_branch = self._graph((), yes), self._graph((), no)
        count = len(then_branch.output)
        if _has_scan(then_branch) or _has_scan(else_branch):
            for name in self._required:
                condition = condition & self.node("OptionalHasElement", Value(self, name))  # which is true
        return self.nodes("If", count, condition, then_branch=then_branch, else_branch=else_branch)

    def scan(
        self, states: Sequence[Value], sequences: Sequence[Value], step: Callable[..., Sequence[Value]], rank: int
    ) -> list[Value]:
        """Scan along the first axis: step(*states, *elements) gives new states and then what is to be stacked.

        All of these have `rank` dimensions, which onnxruntime's Scan wants to know before it runs.
        """
        inside = [self._fresh() for _ in (*states, *sequences)]
        as_it_is = [0] * rank
        graph = self._graph(inside, lambda: [self.node("Reshape", result, as_it_is) for result in step(*inside)])
        count = len(graph.output)
        return self.nodes("Scan", count, *states, *sequences, body=graph, num_scan_inputs=len(sequences))

    def in_work_type(
        self,
        typed: Value,
        compute: Callable[[Callable[[Value], Value]], Sequence[Value]],
        like: Sequence[Value] | None = None,
    ) -> list[Value]:
        """What `compute` gives, half types in float32 and rounded once: it gets what brings its inputs to that type.

        A function that does not know the type of its input `typed` finds out: 2049 takes 12 bits. The results get that
        type or, one by one, those of `like`.
        """

        def rounded(results: Sequence[Value]) -> list[Value]:
            return [self.node("CastLike", r, t) for r, t in zip(results, like or [typed] * len(results), strict=True)]

        def in_float32() -> list[Value]:
            return rounded(compute(lambda x: self.node("Cast", x, to=TensorProto.FLOAT)))

        def as_it_is() -> Sequence[Value]:
            results = compute(lambda x: x)
            return results if like is None else rounded(results)

        known = self.declared(typed).is_half
        if known is not None:
            return list(in_float32() if known else as_it_is())
        is_half = ~self.node("Cast", self.like(2049, typed), to=TensorProto.FLOAT).equals(2049)
        return self.choose(is_half, in_float32, as_it_is)

    def function(
        self, op: Any, inputs: Sequence[str], results: Sequence[Value], attributes: Sequence[str], opset: int
    ) -> FunctionProto:
        """The finished function, its results under the names of the operator's outputs."""
        nodes = self._graphs[-1]
        nodes += [helper.make_node("Identity", [r.name], [o.name]) for r, o in zip(results, op.outputs, strict=True)]
        imports = [helper.make_opsetid("", opset)]
        named = list(dict.fromkeys((*attributes, *self._passed)))
        return helper.make_function(op.domain, op.name, inputs, op.output_names, nodes, imports, named)

    def _constant(self, kind: int, dims: list[int], values: tuple[float, ...]) -> Value:
        """A constant, written once in each graph: shape inference in a subgraph does not see those outside."""
        key, known = (kind, len(dims), values), self._constants[-1]
        if key not in known:
            known[key] = self.node("Constant", value=helper.make_tensor("", kind, dims, values))
        return known[key]

    def _operand(self, value: Operand) -> Value:
        if isinstance(value, Value):
            return value
        if isinstance(value, Sequence):
            return self.ints(*value)
        raise TypeError(f"{value!r} cannot be an operand: a number takes its type from a tensor beside it")

    def _fresh(self) -> Value:
        self._count += 1
        return Value(self, f"v{self._count}")

    def _graph(self, inputs: Sequence[Value], make: Callable[[], Sequence[Value]]) -> GraphProto:
        self._graphs.append([])
        self._constants.append({})
        # A result may come from outside the subgraph, which onnx does not allow: it goes through an Identity.
        results = [self.node("Identity", r) for r in make()]
        nodes = self._graphs.pop()
        self._constants.pop()
        entry, exit_ = ([onnx.ValueInfoProto(name=v.name) for v in values] for values in (inputs, results))
        return helper.make_graph(nodes, f"g{results[0].name}", entry, exit_)


def _has_scan(graph: GraphProto) -> bool:
    inside = [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    return any(node.op_type == "Scan" for node in graph.node) or any(map(_has_scan, inside))
