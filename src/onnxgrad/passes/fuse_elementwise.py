"""Groups of element-wise nodes become one FusedElementwise each: on a GPU such nodes do little but read and write.

A group has nodes whose results have one shape, and that are joined by what they read: one reads what another one
gives, or both read the same. No path leads from a group through other nodes back into it. Products, sums and whatever
changes shapes stay outside, but not LayerNormalization along the last dimension, nor the gradient of its input.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.builder import Builder
from onnxgrad.graph.node import captured, values_read
from onnxgrad.graph.replace import take_place
from onnxgrad.graph.tensor import dims_of
from onnxgrad.ops.dropout import threshold
from onnxgrad.ops.families.elementwise_program import DTYPES, NAME, ROW_MEAN, Line, Program
from onnxgrad.passes.draft import Draft
from onnxgrad.schema import MICROSOFT, OWN, is_standard

MOST_PROGRAMS = 32  # of a node
MOST_NODES = 48  # of a group
MOST_VALUES = 20  # inputs and outputs of a group: a kernel has registers for some
FEW = 16  # elements: what is smaller may be about shapes, which onnxruntime computes on the CPU
FEW_INTEGERS = 1024

FOR_INTEGERS = {
    "Abs", "Add", "Cast", "Clip", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mul",
    "Neg", "Sub", "Sum", "Where",
}  # fmt: skip
FOR_FLAGS = {"And", "Cast", "Equal", "Not", "Or", "Where", "Xor"}
AS_THEY_ARE = {  # with inputs only
    "Abs", "Add", "And", "Cos", "Div", "Equal", "Erf", "Exp", "Greater", "GreaterOrEqual", "HardSwish", "IsNaN", "Less",
    "LessOrEqual", "Log", "Mul", "Neg", "Not", "Or", "Reciprocal", "Relu", "Sigmoid", "Sin", "Softplus", "Sqrt", "Sub",
    "Tanh", "Where", "Xor", "FastGeluGrad", "GeluGrad", "HardSwishGrad", "ReluGrad", "SigmoidGrad", "TanhGrad",
}  # fmt: skip
WITH_NUMBERS = {  # attributes, which become constants behind the inputs, and their defaults
    "LeakyRelu": {"alpha": 0.01},
    "Elu": {"alpha": 1.0},
    "HardSigmoid": {"alpha": 0.2, "beta": 0.5},
    "QuickGelu": {"alpha": 1.702},
    "LeakyReluGrad": {"alpha": 0.01},
    "QuickGeluGrad": {"alpha": 1.702},
}
# onnxruntime has not all of them for half types: alone, too, they are ours there.
ACTIVATIONS = {"Elu", "FastGelu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "QuickGelu", "Softplus"}
HALF_TYPES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
MOVING = {"Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
CHAINED = {"Sum": "Add", "Max": "Max", "Min": "Min"}  # of any number of inputs
POWERS = {2.0, 3.0, 0.5, -0.5, -1.0, -2.0}
ROW_WISE = {"LayerNormalization": {"axis", "epsilon", "stash_type"}, "LayerNormalizationGrad": {"axis"}}
LONGEST_ROW = 4096  # elements: a kernel has a row in its registers
KNOWN: dict[str, set[str]] = {  # operators, and their attributes
    **{name: set() for name in (*AS_THEY_ARE, *CHAINED)},
    **{name: set(numbers) for name, numbers in WITH_NUMBERS.items()},
    **ROW_WISE,
    "Clip": set(),
    "FastGelu": set(),
    "Pow": set(),
    "Cast": {"to", "saturate", "round_mode"},
    "Gelu": {"approximate"},
    "SeededDropout": {"ratio"},
}


def fuse_elementwise(draft: Draft) -> int:
    """Fuses all that can be fused; how many nodes were."""
    graph = draft.graph
    builder = Builder(graph)
    while _move_casts(graph):
        pass
    _split_gradients(graph)
    _copy_casts(builder)
    _read_shapes_above(builder)
    graph.sort()
    groups = _Groups(builder)
    groups.compute_again()
    fused = 0
    for nodes in groups.found():
        _replace(graph, groups, nodes)
        fused += len(nodes)
    graph.sort()
    _bundle(builder)
    return fused


def _move_casts(graph: ir.Graph) -> bool:
    """Has tensors reshaped and transposed in the half type that they are cast to after it, or from before it.

    So there is less to move, and casts come to lie beside element-wise nodes. Whether there were any.
    """
    moved = False
    for cast in [n for n in graph if _widens(n) or _narrows(n)]:
        (result,), (source,) = cast.outputs, _given(cast)
        if result.is_graph_output():
            continue
        before, after = source.producer(), [user for user, _ in result.uses()]
        if _narrows(cast) and _moves(before) and len(source.uses()) == 1 and not source.is_graph_output():
            assert before is not None
            _swap(before, cast)
        elif _widens(cast) and len(after) == 1 and _moves(after[0]) and after[0].graph is graph:
            if after[0].outputs[0].is_graph_output():
                continue
            _swap(cast, after[0])
        else:
            continue
        moved = True
    if moved:
        graph.sort()
    return moved


def _moves(node: ir.Node | None) -> bool:
    """Whether it only moves elements, those of its first input."""
    return node is not None and is_standard(node.domain) and node.op_type in MOVING


def _swap(first: ir.Node, second: ir.Node) -> None:
    """Two nodes of which the second alone reads the first, the other way round; one of them is a Cast."""
    (between,), (result,), source = first.outputs, second.outputs, first.inputs[0]
    assert source is not None
    result.replace_all_uses_with(between)
    second.replace_input_with(0, source)
    first.replace_input_with(0, result)
    between.type, between.shape = result.type, result.shape
    if second.op_type == "Cast":
        result.shape = source.shape
    else:
        result.type = source.type


def _split_gradients(graph: ir.Graph) -> None:
    """Has a node of its own for the input's gradient of each LayerNormalization: its other ones are sums of columns."""
    for node in [n for n in graph if n.op_type == "LayerNormalizationGrad" and n.domain == MICROSOFT]:
        if node.outputs[0].uses() and any(v.uses() or v.is_graph_output() for v in node.outputs[1:]):
            attributes = list(node.attributes.values())
            alone = ir.Node(node.domain, node.op_type, node.inputs, attributes, num_outputs=1, name=f"{node.name}_rows")
            graph.insert_before(node, alone)
            take_place(alone.outputs[0], node.outputs[0])
            node.outputs[0].name = ""


def _copy_casts(builder: Builder) -> None:
    """Gives each element-wise reader of a half type that is cast to float32 a cast of its own.

    Then groups pass the half type on, half the memory: what Gelu's gradient reads, say.
    """
    for cast in [n for n in builder.graph if _widens(n) and _is_fusible(builder, n)]:
        (wide,), (narrow,) = cast.outputs, _given(cast)
        users = {u: None for u, _ in wide.uses() if u.graph is builder.graph and _is_fusible(builder, u)}
        stays = len(users) < len({u for u, _ in wide.uses()}) or wide.is_graph_output()
        for user in list(users)[0 if stays else 1 :]:
            copy = ir.Node("", "Cast", [narrow], [ir.AttrInt64("to", ir.DataType.FLOAT.value)], num_outputs=1)
            value = copy.outputs[0]
            value.name = builder.fresh_value_name(f"{wide.name}_copy")
            copy.name, value.type, value.shape = str(value.name), wide.type, wide.shape
            builder.graph.insert_before(user, copy)
            for k, v in enumerate(user.inputs):
                if v is wide:
                    user.replace_input_with(k, value)


def _read_shapes_above(builder: Builder) -> None:
    """Has Shape read what an element-wise node reads, if that has the same shape, and not what it gives.

    Else a group would have to write it for that.
    """
    for node in [n for n in builder.graph if n.op_type == "Shape" and is_standard(n.domain)]:
        (value,) = _given(node)
        while (producer := value.producer()) is not None and _is_fusible(builder, producer):
            same = [v for v in _given(producer) if dims_of(v) == dims_of(value)]
            if not same:
                break
            value = same[0]
        node.replace_input_with(0, value)


def _widens(node: ir.Node) -> bool:
    """Whether it casts a half type to float32."""
    if node.op_type != "Cast" or node.outputs[0].dtype != ir.DataType.FLOAT:
        return False
    return any(v.dtype in HALF_TYPES for v in _given(node))


def _narrows(node: ir.Node) -> bool:
    """Whether it casts float32 to a half type."""
    if node.op_type != "Cast" or node.outputs[0].dtype not in HALF_TYPES:
        return False
    return all(v.dtype == ir.DataType.FLOAT for v in _given(node))


class _Writer:
    """Writes the program of a group."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.inputs: dict[ir.Value, Line] = {}
        self._lines: list[Line] = []
        self._names: dict[Any, str] = {}  # of values, and of constants by type and number

    def line(self, dtype: str, operation: str, *arguments: str) -> str:
        """Adds one; its name."""
        self._lines.append(Line(f"v{len(self.inputs) + len(self._lines)}", dtype, operation, arguments))
        return self._lines[-1].name

    def constant(self, dtype: str, number: Any) -> str:
        text = repr(number)
        if (dtype, text) not in self._names:
            self._names[dtype, text] = self.line(dtype, "Constant", text)
        return self._names[dtype, text]

    def read(self, value: ir.Value) -> str:
        """The name of a value, an input of the group if it is none of its results."""
        if value not in self._names:
            number = _number(self.builder, value)
            if number is not None:
                return self.constant(_dtype(value), number)
            line = Line(f"v{len(self.inputs) + len(self._lines)}", _dtype(value))
            self.inputs[value] = line
            self._names[value] = line.name
        return self._names[value]

    def write(self, node: ir.Node) -> None:
        """Adds what a node computes."""
        dtype = _dtype(node.outputs[0])
        write = {"LayerNormalization": _normalized, "LayerNormalizationGrad": _normalized_grad}.get(node.op_type)
        names = [_written(self, node, dtype)] if write is None else write(self, node, dtype)
        self._names.update(zip(node.outputs, names, strict=False))

    def program(self, results: Sequence[ir.Value]) -> Program:
        """All of it."""
        return Program((*self.inputs.values(), *self._lines), tuple(self._names[v] for v in results))


def _written(to: _Writer, node: ir.Node, dtype: str) -> str:
    """The name of what a node gives."""
    operation = node.op_type
    if operation == "Pow":
        x, exponent = _given(node)
        return _power(to, to.read(x), dtype, _number(to.builder, exponent))
    given = [None if v is None else to.read(v) for v in node.inputs]
    names = [name for name in given if name is not None]
    if operation in CHAINED:
        result = names[0]
        for name in names[1:]:
            result = to.line(dtype, CHAINED[operation], result, name)
        return result
    if operation == "Clip":
        result = names[0]
        for bound, chosen in zip(given[1:], ("Max", "Min"), strict=False):
            result = result if bound is None else to.line(dtype, chosen, result, bound)
        return result
    if operation == "Gelu":
        approximate = node.attributes.get_string("approximate", "none")
        return to.line(dtype, "FastGelu" if approximate == "tanh" else "Gelu", *names)
    if operation == "SeededDropout":
        ratio = node.attributes.get_float("ratio", 0.5)
        numbers = [to.constant(dtype, 1 / (1 - ratio)), to.constant("int64", threshold(ratio))]
        return to.line(dtype, operation, *names, *numbers)
    numbers = [
        to.constant(dtype, float(np.float32(node.attributes.get_float(name, default))))
        for name, default in WITH_NUMBERS.get(operation, {}).items()
    ]
    return to.line(dtype, operation, *names, *numbers)


def _normalized(to: _Writer, node: ir.Node, dtype: str) -> list[str]:
    """The names of the result, the means and the inverse deviations."""
    x, *factors = (to.read(v) for v in _given(node))
    work = _work_type(dtype)
    mean = to.line(work, ROW_MEAN, x)
    shifted = to.line(work, "Sub", x, mean)
    variance = to.line(work, ROW_MEAN, to.line(work, "Mul", shifted, shifted))
    epsilon = to.constant(work, float(np.float32(node.attributes.get_float("epsilon", 1e-5))))
    inverse = to.line(work, "Reciprocal", to.line(work, "Sqrt", to.line(work, "Add", variance, epsilon)))
    result = to.line(dtype, "Mul", shifted, inverse)
    for operation, factor in zip(("Mul", "Add"), factors, strict=False):
        result = to.line(dtype, operation, result, factor)
    return [result, mean, inverse]


def _normalized_grad(to: _Writer, node: ir.Node, dtype: str) -> list[str]:
    """The name of the input's gradient: inverse · (g - mean of g - x̂ · mean of g · x̂)."""
    dY, x, scale, mean, inverse = (to.read(v) for v in _given(node))
    work = _work_type(dtype)
    normal = to.line(work, "Mul", to.line(work, "Sub", x, mean), inverse)
    g = to.line(work, "Mul", dY, scale)
    along = to.line(work, "Mul", normal, to.line(work, ROW_MEAN, to.line(work, "Mul", g, normal)))
    rest = to.line(work, "Sub", to.line(work, "Sub", g, to.line(work, ROW_MEAN, g)), along)
    return [to.line(dtype, "Mul", rest, inverse)]


def _work_type(dtype: str) -> str:
    """The one that statistics are in."""
    return "float64" if dtype == "float64" else "float32"


def _power(to: _Writer, name: str, dtype: str, exponent: Any) -> str:
    """One of POWERS."""
    result = to.line(dtype, "Sqrt", name) if abs(exponent) == 0.5 else name
    for _ in range(int(abs(exponent)) - 1):
        result = to.line(dtype, "Mul", result, name)
    return result if exponent > 0 else to.line(dtype, "Reciprocal", result)


def _given(node: ir.Node) -> list[ir.Value]:
    return [v for v in node.inputs if v is not None]


def _dtype(value: ir.Value) -> str:
    """As torch calls it."""
    return "" if value.dtype is None else str(value.dtype.numpy())


# What constants are computed with here: exporters write the square root of a constant, rules a number less 1.
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "Cast": lambda x: x, "CastLike": lambda x, _: x, "Identity": lambda x: x, "Sqrt": np.sqrt, "Neg": np.negative,
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide,
}  # fmt: skip


def _number(builder: Builder, value: ir.Value) -> Any:
    """Of a constant that is a single number, or computed from such."""
    shape, node = dims_of(value), value.producer()
    if shape is None or any(d != 1 for d in shape):
        return None
    constant = builder.constant_of(value)
    if constant is not None:
        return constant.item()
    if node is None or node.op_type not in ARITHMETIC or not is_standard(node.domain) or not _is_float(value):
        return None
    given = [_number(builder, v) for v in _given(node)]
    if node.op_type == "CastLike":
        given[1] = 0  # whose number does not matter
    if None in given:
        return None
    assert value.dtype is not None
    dtype = value.dtype.numpy()
    with np.errstate(all="ignore"):
        result = ARITHMETIC[node.op_type](*(np.asarray(x, dtype) for x in given))
    return np.asarray(result, dtype).item()


def _is_elementwise(builder: Builder, node: ir.Node) -> bool:
    """Whether a program can have it."""
    operation, given = node.op_type, _given(node)
    if operation not in KNOWN or not (is_standard(node.domain) or node.domain in (MICROSOFT, OWN)):
        return False
    if set(node.attributes) - KNOWN[operation]:  # of old opsets, say
        return False
    if not _is_of_rows(node) if operation in ROW_WISE else len(node.outputs) != 1:
        return False
    if any(_dtype(v) not in DTYPES for v in (*given, node.outputs[0])):
        return False
    variable = [v for v in given if _number(builder, v) is None]
    shape = dims_of(node.outputs[0])
    if shape is None or all(v.shape is None or len(v.shape) != len(shape) for v in variable):
        return False  # a constant has dimensions that the others have not, and would be missed
    if operation == "SeededDropout":
        return True
    kinds = {v.dtype for v in variable if not _is_float(v)}
    if ir.DataType.BOOL in kinds and operation not in FOR_FLAGS:
        return False
    if kinds - {ir.DataType.BOOL} and operation not in FOR_INTEGERS:
        return False
    if operation == "Pow":
        return given[0] in variable and _number(builder, given[1]) in POWERS
    return operation not in ("Gelu", "FastGelu") or len(given) == 1  # FastGelu may have a bias


def _is_of_rows(node: ir.Node) -> bool:
    """Whether a LayerNormalization is along a last dimension that is short; if it is a gradient, that of the input."""
    shape = dims_of(node.outputs[0])
    if not shape or not isinstance(shape[-1], int) or not 1 < shape[-1] <= LONGEST_ROW:
        return False
    if node.attributes.get_int("axis", -1) not in (-1, len(shape) - 1):
        return False
    if node.outputs[0].dtype == ir.DataType.DOUBLE:  # whose statistics may be float32
        return False
    return node.op_type == "LayerNormalization" or len(node.outputs) == 1


def _is_fusible(builder: Builder, node: ir.Node) -> bool:
    """Whether it is element-wise, and its shape is known, by numbers or names, and not that of a few numbers."""
    if not _is_elementwise(builder, node):
        return False
    shape = dims_of(node.outputs[0])
    if shape is None or None in shape or len(shape) == 0:
        return False
    least = FEW if _is_float(node.outputs[0]) else FEW_INTEGERS
    return any(isinstance(d, str) for d in shape) or math.prod(shape) >= least  # type: ignore[arg-type]


class _Group:
    """Nodes that are going to be one; at first one alone, which may be of any kind.

    Sets of nodes are integers, a bit a node: a graph has thousands of them.
    """

    def __init__(self, number: int, node: ir.Node, shape: Any) -> None:
        self.nodes, self.members, self.shape = [node], 1 << number, shape
        self.before = 0  # all nodes that have to run before it
        self.read = {p for v in values_read(node) if (p := v.producer()) is not None}  # nodes


class _Groups:
    """The groups of a graph, whose nodes are in the order of their dependencies."""

    def __init__(self, builder: Builder) -> None:
        self.builder, graph = builder, builder.graph
        self.outer = {v for node in graph for v in captured(node)} | set(graph.outputs)
        self._of: dict[ir.Node, _Group] = {}
        self._all: dict[_Group, None] = {}
        for number, node in enumerate(graph):
            self._add(number, node)
            if not _widens(node):  # which goes with those that read it, so that they read the half type
                self._join_producers(node)
        for node in graph:
            self._join_producers(node)
        for value in (*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs)):
            self._join_readers(value)

    def found(self) -> list[list[ir.Node]]:
        """The nodes of each group that is to be fused, in their order."""
        order = {node: k for k, node in enumerate(self.builder.graph)}
        return [
            sorted(group.nodes, key=order.__getitem__)
            for group in self._all
            if (len(group.nodes) > 1 or (group.shape is not None and _is_of_half_type(group.nodes[0])))
            and any(_is_float(v) for n in group.nodes for v in (*_given(n), *n.outputs))
        ]

    def compute_again(self) -> None:
        """Has groups compute again what others would give them, where they then read less.

        Of the parts of an activation that its gradient reads, none is kept then, but only what the activation reads.
        """
        for group in [g for g in self._all if g.shape is not None]:
            read = {v: None for n in group.nodes for v in _given(n) if v.producer() not in group.nodes}
            sources: dict[_Group, list[ir.Value]] = {}
            for value in read:
                producer = value.producer()
                if producer is not None and self._of[producer].shape == group.shape == dims_of(value):
                    sources.setdefault(self._of[producer], []).append(value)
            for source, values in sources.items():
                nodes, leaves = _computed_from(values, source.nodes)
                new = [v for v in leaves if v not in read]
                if any(n.op_type in ROW_WISE for n in nodes) or len(group.nodes) + len(nodes) > MOST_NODES:
                    continue
                if _size(new, group) < _size(values, group):
                    self._copy(nodes, group)
                    self._drop_dead(source)
        self.builder.graph.sort()

    def _copy(self, nodes: Sequence[ir.Node], group: _Group) -> None:
        """Puts copies of nodes into a group, which reads them instead."""
        copies: dict[Any, ir.Value] = {}
        for node in nodes:
            inputs = [copies.get(v, v) for v in node.inputs]
            copy = ir.Node(node.domain, node.op_type, inputs, list(node.attributes.values()), num_outputs=1)
            (new,), (old,) = copy.outputs, node.outputs
            new.name = copy.name = self.builder.fresh_value_name(f"{old.name}_again")
            new.type, new.shape, copies[old] = old.type, old.shape, new
        for node in group.nodes:
            for k, value in enumerate(node.inputs):
                if value in copies:
                    node.replace_input_with(k, copies[value])
        for value in copies.values():
            made = value.producer()
            assert made is not None
            self.builder.graph.insert_before(group.nodes[0], made)
            self._of[made] = group
            group.nodes.append(made)

    def _drop_dead(self, group: _Group) -> None:
        """Removes nodes of a group that nothing reads any more."""
        while dead := [n for n in group.nodes if not any(v in self.outer or v.uses() for v in n.outputs)]:
            self.builder.graph.remove(dead, safe=True)
            group.nodes = [n for n in group.nodes if n not in dead]

    def _add(self, number: int, node: ir.Node) -> None:
        """A group of one node."""
        group = _Group(number, node, dims_of(node.outputs[0]) if _is_fusible(self.builder, node) else None)
        for other in {self._of[n] for n in group.read}:
            group.before |= other.before | other.members
        self._of[node] = group
        self._all[group] = None

    def _join_producers(self, node: ir.Node) -> None:
        """A node with those that it reads from."""
        for producer in dict.fromkeys(p for v in _given(node) if (p := v.producer()) in self._of):
            self._join(self._of[producer], self._of[node])
            if _widens(producer) and self._of[producer] is self._of[node]:
                self._join_producers(producer)

    def _join_readers(self, value: ir.Value) -> None:
        """Groups that read the same large value."""
        shape = dims_of(value)
        readers = [node for node, _ in value.uses() if node in self._of and self._of[node].shape == shape]
        for first, second in itertools.pairwise(readers):
            self._join(self._of[first], self._of[second])

    def _read(self, group: _Group, *without: _Group) -> set[_Group]:
        """The groups that one reads from."""
        return {self._of[node] for node in group.read} - {group, *without}

    def _join(self, a: _Group, b: _Group) -> None:
        """Makes one group of two, if no path leads from one of them through others to the other."""
        if a is b or a.shape is None or a.shape != b.shape or len(a.nodes) + len(b.nodes) > MOST_NODES:
            return
        if any(g.before & b.members for g in self._read(a, b)) or any(g.before & a.members for g in self._read(b, a)):
            return
        if self._values(a.nodes + b.nodes) > MOST_VALUES:
            return
        a.nodes += b.nodes
        a.members |= b.members
        a.read |= b.read
        old = a.before & b.before
        a.before = (a.before | b.before) & ~a.members
        for node in b.nodes:
            self._of[node] = a
        del self._all[b]
        if a.before & ~old:  # which is news for those that come after
            for group in self._all:
                if group.before & a.members:
                    group.before |= a.before

    def _values(self, nodes: Sequence[ir.Node]) -> int:
        """How many inputs and outputs a group of these has."""
        inside = set(nodes)
        read = {v for n in nodes for v in _given(n) if v.producer() not in inside and _number(self.builder, v) is None}
        return len(read) + len(self.results(nodes))

    def results(self, nodes: Sequence[ir.Node]) -> list[ir.Value]:
        """What others read of a group."""
        inside = set(nodes)
        values = [v for n in nodes for v in n.outputs]
        return [v for v in values if v in self.outer or any(user not in inside for user, _ in v.uses())]


def _computed_from(values: Sequence[ir.Value], inside: Sequence[ir.Node]) -> tuple[list[ir.Node], list[ir.Value]]:
    """The nodes of a group that values are computed by, in their order, and what these read from outside."""
    nodes: dict[ir.Node, None] = {}
    leaves: dict[ir.Value, None] = {}

    def visit(value: ir.Value) -> None:
        node = value.producer()
        if node is None or node not in inside:
            leaves[value] = None
        elif node not in nodes:
            for other in _given(node):
                visit(other)
            nodes[node] = None

    for value in values:
        visit(value)
    return list(nodes), list(leaves)


def _size(values: Sequence[ir.Value], group: _Group) -> float:
    """Bytes for each element of a group; what is broadcast counts for nothing."""
    return sum(v.dtype.itemsize for v in values if v.dtype is not None and dims_of(v) in (group.shape, None))


def _is_of_half_type(node: ir.Node) -> bool:
    """Whether it is an activation in a half type."""
    return node.op_type in ACTIVATIONS and node.outputs[0].dtype in HALF_TYPES


def _is_float(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()


def _replace(graph: ir.Graph, groups: _Groups, nodes: Sequence[ir.Node]) -> None:
    """One node in place of a group."""
    results = groups.results(nodes)
    program, inputs = _program(groups.builder, nodes, results)
    _put(graph, nodes, [program], inputs, results)


def _program(builder: Builder, nodes: Sequence[ir.Node], results: Sequence[ir.Value]) -> tuple[str, list[ir.Value]]:
    """What nodes compute, and from what."""
    if nodes[0].op_type == NAME:
        return nodes[0].attributes["program"].as_string(), _given(nodes[0])
    writer = _Writer(builder)
    for node in nodes:
        writer.write(node)
    return writer.program(results).text(), list(writer.inputs)


def _put(
    graph: ir.Graph,
    nodes: Sequence[ir.Node],
    programs: Sequence[str],
    inputs: Sequence[ir.Value],
    results: Sequence[ir.Value],
) -> None:
    """One node in place of several."""
    program = ir.AttrString("program", "\n\n".join(programs))
    fused = ir.Node(OWN, NAME, inputs, [program], num_outputs=len(results), name=f"{nodes[-1].name}_fused")
    graph.insert_after(nodes[-1], fused)
    for new, old in zip(fused.outputs, results, strict=True):
        take_place(new, old)
    graph.remove(nodes, safe=True)
    graph.opset_imports.setdefault(OWN, 1)


def _bundle(builder: Builder) -> None:
    """Has one launch for many groups, of any shapes, that give nothing but outputs of the graph.

    So are casts of gradients and updates of running statistics, of which there are hundreds, most of them short.
    """
    graph = builder.graph
    found = [n for n in graph if all(v.is_graph_output() and not v.uses() for v in n.outputs)]
    found = [n for n in found if (n.op_type == NAME and n.domain == OWN) or _is_fusible(builder, n)]
    found = [n for n in found if n.op_type not in ROW_WISE and ROW_MEAN not in str(n.attributes.get("program", ""))]
    for start in range(0, len(found), MOST_PROGRAMS):
        nodes = found[start : start + MOST_PROGRAMS]
        if len(nodes) > 1:
            written = [_program(builder, [node], node.outputs) for node in nodes]
            inputs = [v for _, values in written for v in values]
            _put(graph, nodes, [text for text, _ in written], inputs, [v for node in nodes for v in node.outputs])
    graph.sort()
