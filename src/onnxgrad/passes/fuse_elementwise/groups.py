"""Groups: which nodes of a graph are fused with which."""

import functools
import itertools
from collections.abc import Container, Iterator, Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad.graph.builder import Builder
from onnxgrad.graph.node import captured, reshapes, values_read
from onnxgrad.graph.tensor import dims_of, is_float
from onnxgrad.passes.fuse_elementwise.fusible import (
    HALF_TYPES,
    ROW_WISE,
    inputs_of,
    is_fusible,
    number_of,
    widens,
)

MOST_NODES = 48  # of a group
MOST_VALUES = 20  # inputs and outputs of a group: a kernel has registers for some
# onnxruntime has not all of them for half types: alone, too, they are ours there.
ACTIVATIONS = {"Elu", "FastGelu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "QuickGelu", "Softplus"}


class _Group:
    """Nodes that are going to be one; at first one alone, which may be of any kind.

    Sets of nodes are integers, a bit a node: a graph has thousands of them.
    """

    def __init__(self, number: int, node: ir.Node, shape: Any) -> None:
        self.nodes, self.members, self.shape = [node], 1 << number, shape
        self.before = 0  # all nodes that have to run before it
        self.read = {p for v in values_read(node) if (p := v.producer()) is not None}  # nodes


class Groups:
    """The groups of a graph, whose nodes are in the order of their dependencies."""

    def __init__(self, builder: Builder) -> None:
        self.builder, graph = builder, builder.graph
        self.outer = {v for node in graph for v in captured(node)} | set(graph.outputs)
        self._of: dict[ir.Node, _Group] = {}
        self._all: dict[_Group, None] = {}
        for number, node in enumerate(graph):
            self._add(number, node)
            if not widens(node):  # which goes with those that read it, so that they read the half type
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
            and any(is_float(v) for n in group.nodes for v in (*inputs_of(n), *n.outputs))
        ]

    def compute_again(self) -> None:
        """Has groups compute again what others would give them, where they then read less.

        Of the parts of an activation that its gradient reads, none is kept then, but only what the activation reads.
        """
        for group in [g for g in self._all if g.shape is not None]:
            read = {v: None for n in group.nodes for v in inputs_of(n) if v.producer() not in group.nodes}
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

    def give_again(self, forward: set[ir.Node]) -> None:
        """Has groups of the backward pass give activations again, to those that read them there.

        A group does, if it reads what the activation is computed from anyway, as the activation's own gradient does.
        Else both would be kept, the activation for the gradient of the weights that it is multiplied by.
        """
        for source in [g for g in self._all if g.shape is not None]:
            for value in self.results(source.nodes):
                if value.producer() in forward and is_float(value) and dims_of(value) == source.shape:
                    self._give_again(value, source, forward)
        self.builder.graph.sort()

    def _give_again(self, value: ir.Value, source: _Group, forward: set[ir.Node]) -> None:
        uses = list(_uses_outside(value, forward))
        if value in self.outer or not uses:
            return
        nodes, leaves = _computed_from([value], source.nodes)
        known = [*leaves, *(n.outputs[0] for n in nodes)]
        readers = {self._of[user]: None for v in known for user, _ in v.uses() if user in self._of}
        for group in [g for g in readers if g.shape == source.shape and forward.isdisjoint(g.nodes)]:
            read = {v for n in group.nodes for v in inputs_of(n)}
            nodes, leaves = _computed_from([value], source.nodes, read)
            by_row, may_be = (any(n.op_type in ROW_WISE for n in some) for some in (nodes, group.nodes))
            if (by_row and not may_be) or _size([v for v in leaves if v not in read], group) > 0:
                continue
            if len(group.nodes) + len(nodes) > MOST_NODES or self._values(group.nodes + nodes) > MOST_VALUES:
                continue
            if all(self._may_follow(user, k, group) for _, user, k in uses):
                again = self._copy(nodes, group)[value]
                for views, user, k in uses:
                    user.replace_input_with(k, functools.reduce(self._copy_view, views, again))
                    self._put_after(group, self._of[user])
                return

    def _may_follow(self, user: ir.Node, k: int, group: _Group) -> bool:
        """Whether a node, or if it is a view those that read it, lacks only its k-th input when a group has run."""
        if user not in self._of or self._of[user] is group or self._of[user].members & group.before:
            return False
        if reshapes(user):
            return all(self._may_follow(reader, j, group) for reader, j in user.outputs[0].uses())
        others = [_viewed(v).producer() for j, v in enumerate(user.inputs) if v is not None and j != k]
        return all(p is None or self._of[p].members & (group.before | group.members) for p in others)

    def _copy_view(self, value: ir.Value, view: ir.Node) -> ir.Value:
        """A view of another value."""
        copy = ir.Node(view.domain, view.op_type, [value, *view.inputs[1:]], view.attributes.values(), num_outputs=1)
        new, old = copy.outputs[0], view.outputs[0]
        new.name = copy.name = self.builder.fresh_value_name(f"{old.name}_again")
        new.type, new.shape = old.type, old.shape
        self.builder.graph.append(copy)
        return new

    def _copy(self, nodes: Sequence[ir.Node], group: _Group) -> dict[Any, ir.Value]:
        """Puts copies of nodes into a group, which reads them instead; their results, by those they are copies of."""
        copies: dict[Any, ir.Value] = {}
        for node in nodes:
            inputs = [copies.get(v, v) for v in node.inputs]
            copy = ir.Node(node.domain, node.op_type, inputs, list(node.attributes.values()), num_outputs=1)
            new, old = copy.outputs[0], node.outputs[0]
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
        return copies

    def _drop_dead(self, group: _Group) -> None:
        """Removes nodes of a group that nothing reads any more."""
        while dead := [n for n in group.nodes if not any(v in self.outer or v.uses() for v in n.outputs)]:
            self.builder.graph.remove(dead, safe=True)
            group.nodes = [n for n in group.nodes if n not in dead]

    def _add(self, number: int, node: ir.Node) -> None:
        """A group of one node."""
        group = _Group(number, node, dims_of(node.outputs[0]) if is_fusible(self.builder, node) else None)
        for other in {self._of[n] for n in group.read}:
            group.before |= other.before | other.members
        self._of[node] = group
        self._all[group] = None

    def _join_producers(self, node: ir.Node) -> None:
        """A node with those that it reads from."""
        for producer in dict.fromkeys(p for v in inputs_of(node) if (p := v.producer()) in self._of):
            self._join(self._of[producer], self._of[node])
            if widens(producer) and self._of[producer] is self._of[node]:
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
        if a.before & ~old:
            self._pass_on(a)

    def _put_after(self, first: _Group, second: _Group) -> None:
        """Notes that one group has to run before another."""
        second.before |= first.before | first.members
        self._pass_on(second)

    def _pass_on(self, changed: _Group) -> None:
        """Tells groups that come after one what has to run before it."""
        for group in self._all:
            if group.before & changed.members:
                group.before |= changed.before

    def _values(self, nodes: Sequence[ir.Node]) -> int:
        """How many inputs and outputs a group of these has."""
        inside = set(nodes)
        read = {
            v for n in nodes for v in inputs_of(n) if v.producer() not in inside and number_of(self.builder, v) is None
        }
        return len(read) + len(self.results(nodes))

    def results(self, nodes: Sequence[ir.Node]) -> list[ir.Value]:
        """What others read of a group."""
        inside = set(nodes)
        values = [v for n in nodes for v in n.outputs]
        return [v for v in values if v in self.outer or any(user not in inside for user, _ in v.uses())]


def _computed_from(
    values: Sequence[ir.Value], inside: Sequence[ir.Node], known: Container[ir.Value] = ()
) -> tuple[list[ir.Node], list[ir.Value]]:
    """The nodes of a group that values are computed by, in their order, and what these read, if outside or known."""
    nodes: dict[ir.Node, None] = {}
    leaves: dict[ir.Value, None] = {}

    def visit(value: ir.Value) -> None:
        node = value.producer()
        if node is None or node not in inside or value in known or value is not node.outputs[0]:
            leaves[value] = None
        elif node not in nodes:
            for other in inputs_of(node):
                visit(other)
            nodes[node] = None

    for value in values:
        visit(value)
    return list(nodes), list(leaves)


def _uses_outside(value: ir.Value, nodes: Container[ir.Node]) -> Iterator[tuple[list[ir.Node], ir.Node, int]]:
    """Who but some nodes reads a value, as which input, and through which views that are among these nodes."""
    for user, k in value.uses():
        if user not in nodes:
            yield [], user, k
        elif reshapes(user) and k == 0:
            for views, reader, j in _uses_outside(user.outputs[0], nodes):
                yield [user, *views], reader, j


def _viewed(value: ir.Value) -> ir.Value:
    """What a value is a view of; itself, if of nothing."""
    while (node := value.producer()) is not None and reshapes(node) and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


def _size(values: Sequence[ir.Value], group: _Group) -> float:
    """Bytes for each element of a group; what is broadcast counts for nothing."""
    return sum(v.dtype.itemsize for v in values if v.dtype is not None and dims_of(v) in (group.shape, None))


def _is_of_half_type(node: ir.Node) -> bool:
    """Whether it is an activation in a half type."""
    return node.op_type in ACTIVATIONS and node.outputs[0].dtype in HALF_TYPES
