"""If, Scan and Loop: the gradient is an If or a Scan, whose subgraphs compute forward values again and then gradients.

Nothing inside a subgraph can be read from outside, so the gradient has a copy of each branch, or of the step, and
computes it once more. What the copy reads from outside has a gradient: zero from a branch that does not read it. The
gradient of Scan and Loop is a Scan that takes the steps in the opposite order. It reads the states before each step,
which the forward node gives as further outputs, and carries the gradients of the states and the sums of those of what
steps read from outside.
"""

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad.graph.builder import RANDOM, Builder, op
from onnxgrad.graph.dead import drop_dead_nodes
from onnxgrad.graph.node import NodeView, captured
from onnxgrad.graph.tensor import Tensor
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
                    seed.value.shape = result.shape
                    _add(seeds, result, seed)
            found = n.write_gradient(seeds, wanted, inner)
            _give(inner, [found[v] for v in wanted])
        branches[name] = inner.graph
    grads = n.builder.control_flow("If", [n.cond], branches, wanted)
    return list(zip(wanted, grads, strict=True))


def _scan(n: NodeView, wanted: Sequence[ir.Value]) -> Parts:
    steps = _Steps(n, wanted, n.num_scan_inputs, 0, 0)
    return steps.parts(steps.scan(n.builder))


def _loop(n: NodeView, wanted: Sequence[ir.Value]) -> Parts:
    steps = _Steps(n, wanted, 0, 2, 1)
    branches = {}
    for name in ("then_branch", "else_branch"):  # onnxruntime's Scan does not run without steps
        inner = Builder(ir.Graph([], [], nodes=[], name=name), n.builder)
        with inner.at_work(n.builder.scope):
            _give(inner, steps.scan(inner) if name == "then_branch" else steps.initial)
        branches[name] = inner.graph
    count = op.Squeeze(op.Shape(steps.over[0][1], start=0, end=1))
    return steps.parts(n.builder.control_flow("If", [op.Greater(count, 0)], branches, steps.targets))


class _Steps:
    """The steps of a Scan or Loop backwards, as the body of a Scan.

    A Loop's body has further inputs, the number of the step and the condition, and a further output, the condition.
    """

    def __init__(
        self, n: NodeView, wanted: Sequence[ir.Value], scans: int, more_inputs: int, more_outputs: int
    ) -> None:
        self.node, self.wanted, inputs = n.node, wanted, list[Any](n.node.inputs)
        kept = len(inputs) - scans  # inputs of the body that are not slices
        count, gives = kept - more_inputs, len(n.body.outputs) - (kept - more_inputs) - more_outputs
        axes, directions = [], []
        if scans:
            axes, directions = _each(n.scan_input_axes, scans), _each(n.scan_input_directions, scans)
        inner = _recomputed(n, n.body)
        before, scanned = inner.graph.inputs[:kept], inner.graph.inputs[kept:]
        results = list(inner.graph.outputs)[more_outputs:]
        smooth = [k for k in range(count) if n.builder.tensor(inputs[more_inputs + k]).is_float]
        chosen = [k for k in range(scans) if inputs[kept + k] in wanted]
        given = [k for k in range(count, count + gives) if n.grad(k) is not None]
        read = captured(n.node)
        outside = [v for v in wanted if v in read]
        with inner.at_work(n.builder.scope):
            first, last = [before[more_inputs + k] for k in smooth], [scanned[k] for k in chosen]
            carried, sums = [_input(inner, v) for v in first], [_input(inner, v) for v in outside]
            slices = [_input(inner, results[k]) for k in given]
            seeds: Seeds = {}
            for k, g in zip([*smooth, *given], [*carried, *slices], strict=True):
                _add(seeds, results[k], g)
            found = n.write_gradient(seeds, [*first, *outside, *last], inner)
            totals = [total + found[v] for v, total in zip(outside, sums, strict=True)]
            _give(inner, [*(found[v] for v in first), *totals, *(found[v] for v in last)])
        # What the copy reads in each step, what that is a slice of, along which axis, and in which direction forward.
        over: list[tuple[ir.Value, Any, int, int]]
        over = [(v, _states(n, more_outputs, count, k), 0, 0) for k, v in enumerate(before) if v.uses()]
        every = [(v, n.builder.tensor(inputs[kept + k]), axes[k], directions[k]) for k, v in enumerate(scanned)]
        over += [entry for entry in every if entry[0].uses()]
        out_axes, out_directions = _placed(n, gives)
        for k, g in zip(given, slices, strict=True):
            over.append((g.value, n.grads[k], out_axes[k - count], out_directions[k - count]))
        # One at least says how many steps there are.
        self.over = over or every[:1] or [(before[0], _states(n, more_outputs, count, 0), 0, 0)]
        inner.graph.inputs.clear()
        inner.graph.inputs.extend([*(g.value for g in (*carried, *sums)), *(entry[0] for entry in self.over)])
        self.body = inner.graph
        states = [inputs[more_inputs + k] for k in smooth]
        self.targets = [*states, *outside, *(inputs[kept + k] for k in chosen)]
        self.initial = [n.grad(k) or _zeros(n.builder.tensor(v)) for k, v in zip(smooth, states, strict=True)]
        self.initial += [_zeros(n.builder.tensor(v)) for v in outside]
        self.placed = [axes[k] for k in chosen], [1 - directions[k] for k in chosen]

    def scan(self, builder: Builder) -> list[Tensor]:
        """The gradients of the targets."""
        attributes = {
            "body": self.body,
            "num_scan_inputs": len(self.over),
            "scan_input_axes": [entry[2] for entry in self.over],
            "scan_input_directions": [1 - entry[3] for entry in self.over],
            "scan_output_axes": self.placed[0],
            "scan_output_directions": self.placed[1],
        }
        return builder.control_flow("Scan", [*self.initial, *(e[1] for e in self.over)], attributes, self.targets)

    def parts(self, grads: Sequence[Tensor]) -> Parts:
        """Those of them that are wanted."""
        return [(v, g) for v, g in zip(self.targets, grads, strict=True) if v in self.wanted]


def _states(n: NodeView, more_outputs: int, count: int, k: int) -> Tensor:
    """What a step reads in place k, for each step: an output of the forward node, which gets it if it lacks it."""
    node: Any = n.node
    body, state = n.body, n.body.inputs[k]
    if not isinstance(state.type, ir.TensorType):
        raise ValueError(f"its state {state.name!r} is not a tensor, expected tensors where a gradient passes")
    given = body.outputs[more_outputs + count :]
    axes, directions = _placed(n, len(given))
    for at, result in enumerate(given[: len(node.outputs) - count]):
        producer = result.producer()
        is_copy = producer is not None and producer.op_type == "Identity" and producer.inputs[0] is state
        if is_copy and axes[at] == directions[at] == 0:
            return n.builder.tensor(node.outputs[count + at])
    inside = Builder(body, n.builder)
    with inside.at_work(n.builder.scope):
        body.outputs.append(inside.copy(inside.tensor(state)).value)
    steps = None
    if node.op_type == "Scan":
        node.attributes["scan_output_axes"] = ir.AttrInt64s("scan_output_axes", [*axes, 0])
        node.attributes["scan_output_directions"] = ir.AttrInt64s("scan_output_directions", [*directions, 0])
        scanned = n.builder.tensor(node.inputs[count]).shape
        steps = None if scanned is None else scanned[_each(n.scan_input_axes, n.num_scan_inputs)[0]]
    node.resize_outputs(len(body.outputs) - more_outputs)
    result = node.outputs[-1]
    result.name = n.builder.fresh_value_name(f"{node.name}_{state.name}")
    result.type = state.type
    result.shape = None if state.shape is None else ir.Shape([steps, *state.shape])
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
    return inner.tensor(
        ir.Value(name=inner.fresh_value_name(f"{inner.scope}/{like.name}_grad"), type=like.type, shape=like.shape)
    )


def _add(seeds: Seeds, value: ir.Value, g: Tensor) -> None:
    """One value may be several results."""
    seeds[value] = seeds[value] + g if value in seeds else g


def _give(inner: Builder, results: Sequence[Tensor]) -> None:
    """Makes these the results of a subgraph, and removes what they do not need."""
    graph = inner.graph
    graph.outputs.clear()
    for result in results:
        producer = result.value.producer()
        apart = producer is None or producer.graph is not graph or result.value.is_graph_output()
        graph.outputs.append((inner.copy(result) if apart else result).value)
    drop_dead_nodes(graph)


def _zeros(like: Tensor) -> Tensor:
    return op.Expand(like.builder.constant(0, like.dtype), op.Shape(like))


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
    doc="As Scan; a state that the gradient needs must keep its shape from step to step.",
)
