"""If and Scan: their gradient is an If or a Scan, whose subgraphs compute the forward values again and then gradients.

Nothing inside a subgraph can be read from outside, so the gradient has a copy of each branch, or of the step, and
computes it once more. What the copy reads from outside has a gradient: zero from a branch that does not read it. The
gradient of Scan takes the steps in the opposite order. It reads the states before each step, which the forward Scan
gives as further outputs, and carries the gradients of the states and the sums of those of what steps read from outside.
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
    inputs: Any = n.node.inputs
    count, scans, gives = len(inputs) - n.num_scan_inputs, n.num_scan_inputs, len(n.body.outputs)
    in_axes, in_directions = _each(n.scan_input_axes, scans), _each(n.scan_input_directions, scans)
    out_axes, out_directions = _each(n.scan_output_axes, gives - count), _each(n.scan_output_directions, gives - count)
    inner = _recomputed(n, n.body)
    before, scanned, results = inner.graph.inputs[:count], inner.graph.inputs[count:], list(inner.graph.outputs)
    smooth = [k for k in range(count) if inputs[k].dtype.is_floating_point()]
    chosen = [k for k in range(scans) if inputs[count + k] in wanted]
    given = [k for k in range(count, gives) if n.grad(k) is not None]
    read = captured(n.node)
    outside = [v for v in wanted if v in read]
    with inner.at_work(n.builder.scope):
        carried, sums = [_input(inner, before[k]) for k in smooth], [_input(inner, v) for v in outside]
        slices = [_input(inner, results[k]) for k in given]
        seeds: Seeds = {}
        for k, g in zip([*smooth, *given], [*carried, *slices], strict=True):
            _add(seeds, results[k], g)
        first, last = [before[k] for k in smooth], [scanned[k] for k in chosen]
        found = n.write_gradient(seeds, [*first, *outside, *last], inner)
        totals = [total + found[v] for v, total in zip(outside, sums, strict=True)]
        _give(inner, [*(found[v] for v in first), *totals, *(found[v] for v in last)])
    # What the copy reads in each step, what that is a slice of, along which axis, and in which direction forward.
    over: list[tuple[ir.Value, Any, int, int]]
    over = [(v, _states(n, count, k), 0, 0) for k, v in enumerate(before) if v.uses()]
    every = [(v, n.builder.tensor(inputs[count + k]), in_axes[k], in_directions[k]) for k, v in enumerate(scanned)]
    over += [entry for entry in every if entry[0].uses()]
    for k, g in zip(given, slices, strict=True):
        over.append((g.value, n.grads[k], out_axes[k - count], out_directions[k - count]))
    over = over or every[:1]  # which says how many steps there are
    inner.graph.inputs.clear()
    inner.graph.inputs.extend([*(g.value for g in (*carried, *sums)), *(entry[0] for entry in over)])
    targets = [*(inputs[k] for k in smooth), *outside, *(inputs[count + k] for k in chosen)]
    grads = n.builder.control_flow(
        "Scan",
        [
            *(n.grad(k) or _zeros(n.builder.tensor(inputs[k])) for k in smooth),
            *(_zeros(n.builder.tensor(v)) for v in outside),
            *(entry[1] for entry in over),
        ],
        {
            "body": inner.graph,
            "num_scan_inputs": len(over),
            "scan_input_axes": [entry[2] for entry in over],
            "scan_input_directions": [1 - entry[3] for entry in over],
            "scan_output_axes": [in_axes[k] for k in chosen],
            "scan_output_directions": [1 - in_directions[k] for k in chosen],
        },
        targets,
    )
    return [(v, g) for v, g in zip(targets, grads, strict=True) if v in wanted]


def _states(n: NodeView, count: int, k: int) -> Tensor:
    """The k-th state before each step: an output of the forward Scan, which gets it if it does not have it."""
    node: Any = n.node
    body, state = n.body, n.body.inputs[k]
    gives = len(body.outputs) - count
    axes, directions = _each(n.scan_output_axes, gives), _each(n.scan_output_directions, gives)
    for at, result in enumerate(body.outputs[count : len(node.outputs)]):
        producer = result.producer()
        is_copy = producer is not None and producer.op_type == "Identity" and producer.inputs[0] is state
        if is_copy and axes[at] == directions[at] == 0:
            return n.builder.tensor(node.outputs[count + at])
    inside = Builder(body, n.builder)
    with inside.at_work(n.builder.scope):
        body.outputs.append(inside.copy(inside.tensor(state)).value)
    node.attributes["scan_output_axes"] = ir.AttrInt64s("scan_output_axes", [*axes, 0])
    node.attributes["scan_output_directions"] = ir.AttrInt64s("scan_output_directions", [*directions, 0])
    node.resize_outputs(len(body.outputs))
    result = node.outputs[-1]
    result.name = n.builder.fresh_value_name(f"{node.name}_{state.name}")
    result.type = state.type
    scanned = n.builder.tensor(node.inputs[count]).shape
    steps = None if scanned is None else scanned[_each(n.scan_input_axes, n.num_scan_inputs)[0]]
    result.shape = None if state.shape is None else ir.Shape([steps, *state.shape])
    return n.builder.tensor(result)


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
