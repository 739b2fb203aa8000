"""If, Scan and Loop: the gradient is an If, a Scan or a Loop, whose subgraphs compute forward values again.

Nothing inside a subgraph can be read from outside, so the gradient has a copy of each branch, or of the step, and
computes it once more. What the copy reads from outside has a gradient: zero from a branch that does not read it. The
gradient of Scan and Loop takes the steps in the opposite order. It reads the states before each step, which the forward
node gives as further outputs, and carries the gradients of the states and the sums of those of what steps read from
outside. It is a Scan, unless the shape of a state may change, or one of these values is a sequence: then the forward
node collects such states in sequences, and the gradient is a Loop.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.builder import RANDOM, Builder, op
from onnxgrad.graph.dead import drop_dead_nodes
from onnxgrad.graph.gradients import for_each, gradient_value, of_any_shape, zero_gradient
from onnxgrad.graph.new_node import new_node
from onnxgrad.graph.node import NodeView, captured
from onnxgrad.graph.tensor import Tensor, dims_of
from onnxgrad.rules import nondiff, vjp

Parts = list[tuple[ir.Value, Tensor]]
Seeds = dict[ir.Value, Tensor]


def _if(n: NodeView, wanted: Sequence[ir.Value]) -> Parts:
    branches = {}
    for name in ("then_branch", "else_branch"):
        inner = _recomputed(n, getattr(n, name))
        with inner.at_work(n.builder.scope):
            seeds: Seeds = {}
            for result, g in zip(inner.graph.outputs, n.grads, strict=True):
                if g is not None:  # a copy has the shape of this branch's result, whatever the other's is
                    seed = inner.copy(g)
                    seed.value.shape = gradient_value("", result).shape
                    _add(seeds, result, seed)
            found = n.write_gradient(seeds, wanted, inner)
            _give(inner, [found[v] for v in wanted])
        branches[name] = inner.graph
    return list(zip(wanted, _control_flow(n.builder, "If", [n.cond], branches, wanted), strict=True))


def _scan(n: NodeView, wanted: Sequence[ir.Value]) -> Parts:
    steps = _Steps(n, wanted, n.num_scan_inputs, 0, 0)
    return steps.parts(steps.scan(n.builder) if steps.keep_shapes else steps.loop())


def _loop(n: NodeView, wanted: Sequence[ir.Value]) -> Parts:
    steps = _Steps(n, wanted, 0, 2, 1)
    if not steps.keep_shapes:
        return steps.parts(steps.loop())
    branches = {}
    for name in ("then_branch", "else_branch"):  # onnxruntime's Scan does not run without steps
        inner = n.builder.subgraph(name)
        with inner.at_work(n.builder.scope):
            _give(inner, steps.scan(inner) if name == "then_branch" else steps.initial)
        branches[name] = inner.graph
    count = op.Squeeze(op.Shape(steps.over[0][1], start=0, end=1))
    return steps.parts(_control_flow(n.builder, "If", [op.Greater(count, 0)], branches, steps.targets))


class _Steps:
    """The steps of a Scan or Loop backwards.

    A Loop's body has further inputs, the number of the step and the condition, and a further output, the condition.
    """

    def __init__(
        self, n: NodeView, wanted: Sequence[ir.Value], scans: int, more_inputs: int, more_outputs: int
    ) -> None:
        self.n, self.wanted, inputs = n, wanted, list[Any](n.node.inputs)
        kept = len(inputs) - scans  # inputs of the body that are not slices
        count = kept - more_inputs
        gives = len(n.body.outputs) - count - more_outputs
        self.inner = inner = _recomputed(n, n.body)
        self.before, self.scanned = inner.graph.inputs[:kept], inner.graph.inputs[kept:]
        results = list(inner.graph.outputs)[more_outputs:]
        smooth = [k for k in range(count) if n.builder.tensor(inputs[more_inputs + k]).is_float]
        self.chosen = [k for k in range(scans) if inputs[kept + k] in wanted]
        self.given = [k for k in range(count, count + gives) if n.grad(k) is not None]
        captures = captured(n.node)
        outside = [v for v in wanted if v in captures]
        with inner.at_work(n.builder.scope):
            first, last = [self.before[more_inputs + k] for k in smooth], [self.scanned[k] for k in self.chosen]
            carried, sums = [_input(inner, v) for v in first], [_input(inner, v) for v in outside]
            self.slices = [_input(inner, results[k]) for k in self.given]
            seeds: Seeds = {}
            for k, g in zip([*smooth, *self.given], [*carried, *self.slices], strict=True):
                _add(seeds, results[k], g)
            # A step adds to the gradient of a sequence at positions in the sum so far.
            seeds |= {v: total for v, total in zip(outside, sums, strict=True) if total.is_sequence}
            found = n.write_gradient(seeds, [*first, *outside, *last], inner)
            totals = [
                found[v] if total.is_sequence else total + found[v] for v, total in zip(outside, sums, strict=True)
            ]
            _give(inner, [*(found[v] for v in first), *totals, *(found[v] for v in last)])
        self.carried = [*carried, *sums]
        read = [(k, v) for k, v in enumerate(self.before) if k >= more_inputs and v.uses()]
        changing = [] if scans else [k for k, v in read if not _keeps_shape(v)]
        may_change = not scans and not all(map(_keeps_shape, first))
        self.keep_shapes = not changing and not may_change and not any(total.is_sequence for total in sums)
        states = [inputs[more_inputs + k] for k in smooth]
        self.targets = [*states, *outside, *(inputs[kept + k] for k in self.chosen)]
        self.initial = [
            n.grad(k) or zero_gradient(_result(n, k) if may_change else n.builder.tensor(v))
            for k, v in zip(smooth, states, strict=True)
        ]
        self.initial += [zero_gradient(n.builder.tensor(v)) for v in outside]
        self.records = dict(zip(changing, _record(n, changing), strict=True))
        self._find_slices(more_outputs, count, gives)

    def _find_slices(self, more_outputs: int, count: int, gives: int) -> None:
        """What the copy reads in each step: of what it is a slice, along which axis, in which direction forward."""
        n, inputs, kept, scans = self.n, list[Any](self.n.node.inputs), len(self.before), len(self.scanned)
        axes, directions = [], []
        if scans:
            axes, directions = _each(n.scan_input_axes, scans), _each(n.scan_input_directions, scans)
        states = count + len(self.records)
        read = [(k, v) for k, v in enumerate(self.before) if v.uses() and k not in self.records]
        self.over: list[tuple[ir.Value, Any, int, int]]
        self.over = [(v, _states(n, more_outputs, states, k), 0, 0) for k, v in read]
        every = [(v, n.builder.tensor(inputs[kept + k]), axes[k], directions[k]) for k, v in enumerate(self.scanned)]
        self.over += [entry for entry in every if entry[0].uses()]
        out_axes, out_directions = _placed(n, gives)
        for k, g in zip(self.given, self.slices, strict=True):
            self.over.append((g.value, n.grads[k], out_axes[k - count], out_directions[k - count]))
        # One at least says how many steps there are.
        self.over = self.over or every[:1] or [(self.before[0], _states(n, more_outputs, states, 0), 0, 0)]
        self.placed = [axes[k] for k in self.chosen], [1 - directions[k] for k in self.chosen]

    def scan(self, builder: Builder) -> list[Tensor]:
        """The gradients of the targets, by a Scan."""
        graph = self.inner.graph
        graph.inputs[:] = [*(g.value for g in self.carried), *(entry[0] for entry in self.over)]
        attributes = {
            "body": graph,
            "num_scan_inputs": len(self.over),
            "scan_input_axes": [entry[2] for entry in self.over],
            "scan_input_directions": [1 - entry[3] for entry in self.over],
            "scan_output_axes": self.placed[0],
            "scan_output_directions": self.placed[1],
        }
        return _control_flow(builder, "Scan", [*self.initial, *(e[1] for e in self.over)], attributes, self.targets)

    def loop(self) -> list[Tensor]:
        """The gradients of the targets, by a Loop."""
        n, inner, graph = self.n, self.inner, self.inner.graph
        _, one, axis, _ = self.over[0]
        steps = op.Squeeze(op.Shape(one, start=axis, end=None if axis == -1 else axis + 1))
        number, more = inner.loop_inputs(n.builder.scope)
        with inner.at_work(n.builder.scope):
            step = op.Sub(steps, op.Add(number, 1))
            for v, x, axis, backward in self.over:
                if v.uses():
                    v.replace_all_uses_with(op.Gather(x, number if backward else step, axis=axis).value)
            for k, record in self.records.items():
                value = record.at(step).value
                value.shape = self.before[k].shape
                self.before[k].replace_all_uses_with(value)
            graph.outputs.insert(0, inner.copy(more).value)
        graph.sort()  # these came last
        graph.inputs[:] = [t.value for t in (number, more, *self.carried)]
        initial = [of_any_shape(g) if g.is_sequence else g for g in self.initial]
        slices = self.targets[len(self.initial) :]
        stacks = [
            ir.Value(type=v.type, shape=None if v.shape is None else ir.Shape([None] * len(v.shape))) for v in slices
        ]
        like = [*(gradient_value("", v) for v in self.targets[: len(initial)]), *stacks]
        results = n.builder.control_flow("Loop", [steps, None, *initial], {"body": graph}, like)
        for k, (value, axis, backward) in enumerate(zip(slices, *self.placed, strict=True), len(initial)):
            if backward:  # the last step came first
                results[k] = op.Slice(results[k], [-1], [np.iinfo(np.int64).min], [0], [-1])
            rank = n.builder.tensor(value).rank
            others = list(range(1, rank))
            others.insert(axis % rank, 0)
            results[k] = op.Transpose(results[k], perm=others)
        return results

    def parts(self, grads: Sequence[Tensor]) -> Parts:
        """Those of them that are wanted."""
        return [(v, g) for v, g in zip(self.targets, grads, strict=True) if v in self.wanted]


def _keeps_shape(state: ir.Value) -> bool:
    """Whether all dimensions are known, by number or name: inference leaves out those that may change."""
    dims = dims_of(state)
    return isinstance(state.type, ir.TensorType) and dims is not None and None not in dims


def _result(n: NodeView, k: int) -> Tensor:
    """The last state in place k of a Loop, which may not have had a name."""
    node: Any = n.node
    if len(node.outputs) <= k:
        node.resize_outputs(k + 1)
    value, inside = node.outputs[k], n.body.outputs[1 + k]
    value.name = value.name or n.builder.fresh_value_name(f"{node.name}_{inside.name}")
    value.type = value.type or inside.type
    return n.builder.tensor(value)


def _record(n: NodeView, places: Sequence[int]) -> list["_Record"]:
    """What each step of a Loop reads in these places, in sequences: further states of the forward node."""
    if not places:
        return []
    node: Any = n.node
    body, states, results = n.body, len(node.inputs) - 2, len(node.outputs)
    inside = Builder(body, n.builder)
    node.resize_inputs(len(node.inputs) + len(places))
    node.resize_outputs(max(states, results) + len(places))
    for k in reversed(range(states, results)):  # an output of slices makes room
        old, new = node.outputs[k], node.outputs[k + len(places)]
        new.name, new.type, new.shape, old.name = old.name, old.type, old.shape, None
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    lengths = {}
    for k, place in enumerate(places, states):
        state = inside.tensor(body.inputs[place])
        if isinstance(state.value.type, ir.OptionalType):
            raise ValueError(f"its state {state.value.name!r} is an optional, expected tensors or sequences")
        kind, name = ir.SequenceType(ir.TensorType(state.dtype)), f"{node.name}_{state.value.name}"
        empty = new_node("SequenceEmpty", [], n.builder.fresh_value_name(f"{name}_none"), {"dtype": state.dtype.value})
        empty.outputs[0].type = kind
        node.graph.insert_before(node, empty)
        node.replace_input_with(2 + k, empty.outputs[0])
        with inside.at_work(str(node.name)):
            shape = state.value.shape
            so_far = inside.parameter(f"{name}_so_far", kind, shape)
            if state.is_sequence:  # of which there are no sequences: one after the other
                lengths[k] = op.SequenceLength(so_far).value
                after = for_each(op.SequenceLength(state), so_far, partial(op.SequenceAt, state))
            else:
                after = op.SequenceInsert(so_far, state)
        body.inputs.append(so_far.value)
        body.outputs.insert(1 + k, after.value)
        node.outputs[k].name, node.outputs[k].type = n.builder.fresh_value_name(name), kind
        node.outputs[k].shape = shape
    count = states + len(places)
    records = []
    for k in range(states, count):
        all_of_it, ends = n.builder.tensor(node.outputs[k]), None
        if k in lengths:
            starts = _stacked(n, 1, count, lengths[k], f"{node.outputs[k].name}_starts")
            ends = op.Concat(starts, op.Reshape(op.SequenceLength(all_of_it), [1]), axis=0)
        records.append(_Record(all_of_it, ends))
    return records


class _Record(NamedTuple):
    """A state before each step."""

    all_of_it: Tensor  # a sequence
    ends: Tensor | None  # if the state is a sequence: where each begins, and the last one ends

    def at(self, step: Tensor) -> Tensor:
        """The state before one step."""
        if self.ends is None:
            return op.SequenceAt(self.all_of_it, step)
        start, end = op.Gather(self.ends, step), op.Gather(self.ends, op.Add(step, 1))
        empty = op.SequenceEmpty(dtype=self.all_of_it.dtype)
        return for_each(op.Sub(end, start), empty, lambda k: op.SequenceAt(self.all_of_it, op.Add(start, k)))


def _states(n: NodeView, more_outputs: int, count: int, k: int) -> Tensor:
    """What a step reads in place k, for each step: an output of the forward node, which gets it if it lacks it."""
    node: Any = n.node
    body, state = n.body, n.body.inputs[k]
    given = body.outputs[more_outputs + count :]
    axes, directions = _placed(n, len(given))
    for at, result in enumerate(given[: len(node.outputs) - count]):
        producer = result.producer()
        is_copy = producer is not None and producer.op_type == "Identity" and producer.inputs[0] is state
        if is_copy and axes[at] == directions[at] == 0:
            return n.builder.tensor(node.outputs[count + at])
    inside = Builder(body, n.builder)
    with inside.at_work(n.builder.scope):
        copy = inside.copy(inside.tensor(state)).value
    return _stacked(n, more_outputs, count, copy, str(state.name))


def _stacked(n: NodeView, more_outputs: int, count: int, inside: ir.Value, name: str) -> Tensor:
    """What a value in the body is in each step: a further output of the forward node."""
    node: Any = n.node
    body = n.body
    axes, directions = _placed(n, len(body.outputs) - more_outputs - count)
    body.outputs.append(inside)
    steps = None
    if node.op_type == "Scan":
        node.attributes["scan_output_axes"] = ir.AttrInt64s("scan_output_axes", [*axes, 0])
        node.attributes["scan_output_directions"] = ir.AttrInt64s("scan_output_directions", [*directions, 0])
        scanned = n.builder.tensor(node.inputs[count]).shape
        steps = None if scanned is None else scanned[_each(n.scan_input_axes, n.num_scan_inputs)[0]]
    node.resize_outputs(len(body.outputs) - more_outputs)
    result = node.outputs[-1]
    result.name = n.builder.fresh_value_name(f"{node.name}_{name}")
    result.type = inside.type
    result.shape = None if inside.shape is None else ir.Shape([steps, *inside.shape])
    return n.builder.tensor(result)


def _placed(n: NodeView, count: int) -> tuple[list[int], list[int]]:
    """The axes and directions of the outputs that have a slice from each step."""
    if n.node.op_type == "Loop":
        return [0] * count, [0] * count
    return _each(n.scan_output_axes, count), _each(n.scan_output_directions, count)


def _recomputed(n: NodeView, graph: ir.Graph) -> Builder:
    """A builder of gradients in a copy of a subgraph."""
    for node in graph.all_nodes():
        if node.op_type in RANDOM and (node.op_type != "Dropout" or len(node.inputs) > 2):
            raise ValueError(
                f"{node.op_type} (node {node.name!r}) in its subgraph would draw other numbers for the gradient, "
                "expected it outside"
            )
    return n.builder.copy_of_subgraph(graph)


def _input(inner: Builder, like: ir.Value) -> Tensor:
    """An input of a subgraph that is being written, for the gradient of a value."""
    return inner.tensor(gradient_value(inner.fresh_value_name(f"{inner.scope}/{like.name}_grad"), like))


def _control_flow(
    builder: Builder, op_type: str, inputs: Sequence[Tensor | None], attributes: dict[str, Any], of: Sequence[ir.Value]
) -> list[Tensor]:
    """A node with subgraphs, whose results are the gradients of these values."""
    return builder.control_flow(op_type, inputs, attributes, [gradient_value("", v) for v in of])


def _add(seeds: Seeds, value: ir.Value, g: Tensor) -> None:
    """One value may be several results."""
    seeds[value] = seeds[value] + g if value in seeds else g


def _give(inner: Builder, results: Sequence[Tensor]) -> None:
    """Makes these the results of a subgraph, and removes what they do not need."""
    graph = inner.graph
    graph.outputs.clear()
    for result in results:
        graph.outputs.append(inner.apart(result).value)
    drop_dead_nodes(graph)


def _each(given: Any, count: int) -> list[int]:
    """An attribute that has a number for each input or output, all 0 by default."""
    return list(given) if given else [0] * count


vjp(
    "If",
    cond=nondiff,
    subgraphs=_if,
    doc="The gradient computes the branch once more.",
)
vjp(
    "Scan",
    initial_state_and_scan_inputs=_scan,
    subgraphs=_scan,
    doc="The gradient computes each step once more; the forward Scan keeps the states before each step.",
)
vjp(
    "Loop",
    M=nondiff,
    cond=nondiff,
    v_initial=_loop,
    subgraphs=_loop,
    doc="As Scan; states whose shape may change are kept in sequences.",
)
