"""recompute_steps(): a Loop or Scan of n steps becomes one of about √n segments, each a Loop or Scan of about √n steps.

The gradient of a step computes it once more, so that of a segment does, too: the forward pass keeps the states before
each segment only, and the backward pass those before each step of one segment at a time. In return every step is
computed three times instead of twice.
"""

import math
from typing import Any

import onnx_ir as ir

from onnxgrad.graph.builder import Builder, op
from onnxgrad.graph.replace import take_place
from onnxgrad.graph.tensor import Tensor, dims_of
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.infer import infer
from onnxgrad.passes.infer_subgraphs import infer_subgraphs
from onnxgrad.schema import is_standard

FEWEST = 4  # steps that can be divided


def recompute_steps(draft: Draft) -> None:
    """Does so with those of the main graph; not with a Loop that has no number of steps, nor if a rank is unknown."""
    builder = Builder(draft.graph)
    changed = False
    for node in list(draft.graph):
        if is_standard(node.domain) and node.op_type in ("Loop", "Scan"):
            with builder.at_work(f"{node.name}_segments"):
                changed |= (_divide_loop if node.op_type == "Loop" else _divide_scan)(builder, node)
    if changed:
        draft.graph.sort()  # what was written came last
        infer(draft)
        infer_subgraphs(draft)


# Loop


def _divide_loop(builder: Builder, node: Any) -> bool:
    body, count = node.attributes["body"].as_graph(), len(node.inputs) - 2
    slices = list(body.outputs)[1 + count :]
    if node.inputs[0] is None or any(v.shape is None or v.dtype is None for v in slices):
        return False
    # A number may be a vector of one element, and have no limit.
    total = op.Reshape(builder.tensor(node.inputs[0]), [])
    size = op.Max(op.Cast(op.Ceil(op.Sqrt(op.Cast(total, to=ir.DataType.DOUBLE))), to=ir.DataType.INT64), 1)
    segments = op.Div(op.Sub(total, 1), size) + 1
    segment = _segment_of_loop(builder, node, body, count, total, size)
    node.attributes["body"] = ir.AttrGraph("body", segment)
    empty = [op.SequenceEmpty(dtype=v.dtype).value for v in slices]
    node.resize_inputs(len(node.inputs) + len(empty))
    node.replace_input_with(0, segments.value)
    for k, value in enumerate(empty, 2 + count):
        node.replace_input_with(k, value)
    for pieces, piece in zip(node.outputs[count:], slices, strict=False):
        _join(builder, pieces, piece)
    return True


def _segment_of_loop(builder: Builder, node: Any, body: ir.Graph, count: int, total: Tensor, size: Tensor) -> ir.Graph:
    """A step of the outer Loop: a Loop over the steps of a segment."""
    outer, inner = builder.subgraph("segment"), Builder(body, builder)
    number, more, *states = (_like(outer, v) for v in body.inputs)
    slices = list(body.outputs)[1 + count :]
    so_far = [outer.parameter(f"{outer.scope}/so_far", _sequence_of(v)) for v in slices]
    with outer.at_work(builder.scope):
        start = op.Mul(number, size)
        steps = op.Min(size, op.Sub(total, start))
    with inner.at_work(builder.scope):
        old, go = body.inputs[0], _like(inner, body.inputs[1])
        first = _like(inner, old)
        old.replace_all_uses_with(op.Add(first, start).value, replace_graph_outputs=True)
        body.inputs[0] = first.value
        body.inputs.append(go.value)  # the condition is a state as well, to be read from outside
        condition = inner.copy(inner.tensor(body.outputs[0]))
        body.outputs.insert(1 + count, condition.value)
        body.sort()
    with outer.at_work(builder.scope):
        goes_on = more if node.inputs[1] is not None else None
        like = [*list(body.outputs)[1 : 1 + count], condition.value, *map(_stack_of, slices)]
        results = outer.control_flow("Loop", [steps, goes_on, *states, more], {"body": body}, like)
        pieces = [op.SequenceInsert(s, piece) for s, piece in zip(so_far, results[1 + count :], strict=True)]
    outer.graph.inputs.extend(t.value for t in (number, more, *states, *so_far))
    outer.graph.outputs.extend(t.value for t in (results[count], *results[:count], *pieces))
    return outer.graph


def _join(builder: Builder, pieces: ir.Value, one: ir.Value) -> None:
    """Puts what the segments gave one after the other, where a stack of slices was an output."""
    stack = ir.Value(name=pieces.name, type=pieces.type, shape=pieces.shape)
    pieces.replace_all_uses_with(stack, replace_graph_outputs=True)
    pieces.name, pieces.type, pieces.shape = builder.fresh_value_name(f"{pieces.name}_pieces"), _sequence_of(one), None
    sequence, branches = builder.tensor(pieces), {}
    for name in ("then_branch", "else_branch"):
        inner = builder.subgraph(name)
        with inner.at_work(builder.scope):
            if name == "then_branch":
                result = op.ConcatFromSequence(sequence, axis=0)
            else:  # without steps onnxruntime gives this
                shape = [0, *(d if isinstance(d, int) else 0 for d in dims_of(one) or ())]
                result = op.Expand(inner.constant(0, sequence.dtype), shape)
        inner.graph.outputs.append(result.value)
        branches[name] = inner.graph
    (joined,) = builder.control_flow("If", [op.Greater(op.SequenceLength(sequence), 0)], branches, [stack])
    take_place(joined.value, stack)


def _like(builder: Builder, value: ir.Value) -> Tensor:
    """An input of a new subgraph, as another one is."""
    return builder.parameter(f"{builder.scope}/{value.name}", value.type, value.shape)


def _sequence_of(value: ir.Value) -> ir.SequenceType:
    assert value.dtype is not None
    return ir.SequenceType(ir.TensorType(value.dtype))


def _stack_of(value: ir.Value, axis: int = 0) -> ir.Value:
    """A value for what is stacked of slices."""
    dims = list(dims_of(value) or ())
    return ir.Value(type=value.type, shape=ir.Shape([*dims[:axis], None, *dims[axis:]]))


# Scan


def _divide_scan(builder: Builder, node: Any) -> bool:
    body, attributes = node.attributes["body"].as_graph(), node.attributes
    scans = attributes["num_scan_inputs"].as_int()
    read, slices = list(node.inputs)[-scans:], list(body.outputs)[len(node.inputs) - scans :]
    if any(v is None or v.shape is None or v.dtype is None for v in (*read, *slices)):
        return False
    scan = _Scan(node, body, scans, read, slices)
    length = dims_of(read[0])[scan.axes[0]]  # type: ignore[index]
    if isinstance(length, int):
        if length < FEWEST:
            return False
        results = scan.divided(builder)
    else:
        branches = {}
        for name in ("then_branch", "else_branch"):  # onnxruntime's Scan does not run without steps
            inner = builder.subgraph(name)
            with inner.at_work(builder.scope):
                given = scan.divided(inner) if name == "then_branch" else scan.copy(inner, scan.inputs)
            inner.graph.outputs.extend(t.value for t in given)
            branches[name] = inner.graph
        enough = op.Greater(op.Squeeze(scan.length(builder)), FEWEST - 1)
        results = builder.control_flow("If", [enough], branches, list(node.outputs))
    for old, new in zip(node.outputs, results, strict=True):
        take_place(new.value, old)
    builder.graph.remove(node, safe=True)
    return True


class _Scan:
    """A Scan that is about to be divided."""

    def __init__(self, node: Any, body: ir.Graph, scans: int, read: list[ir.Value], slices: list[ir.Value]) -> None:
        self.node, self.body, self.inputs = node, body, list[ir.Value](node.inputs)
        self.states = len(node.inputs) - scans
        self.slices = slices

        def each(name: str, count: int) -> list[int]:
            return list(node.attributes[name].as_ints()) if name in node.attributes else [0] * count

        ranks = [len(v.shape) for v in read if v.shape is not None]
        self.axes = [a % r for a, r in zip(each("scan_input_axes", scans), ranks, strict=True)]
        self.directions = each("scan_input_directions", scans)
        out_axes, ranks = (
            each("scan_output_axes", len(slices)),
            [len(v.shape) + 1 for v in slices if v.shape is not None],
        )
        self.out_axes = [a % r for a, r in zip(out_axes, ranks, strict=True)]
        self.out_directions = each("scan_output_directions", len(slices))

    def length(self, builder: Builder) -> Tensor:
        """The number of steps, as a vector."""
        return _dims(builder.tensor(self.inputs[self.states]), self.axes[0], self.axes[0] + 1)

    def write(self, builder: Builder, body: ir.Graph, inputs: list[ir.Value]) -> list[Tensor]:
        """A Scan with this body, and axes and directions of the one that is divided."""
        attributes = {
            "body": body,
            "num_scan_inputs": len(self.axes),
            "scan_input_axes": self.axes,
            "scan_input_directions": self.directions,
            "scan_output_axes": self.out_axes,
            "scan_output_directions": self.out_directions,
        }
        results = list(body.outputs)
        like = [*results[: self.states], *map(_stack_of, results[self.states :], self.out_axes)]
        return builder.control_flow("Scan", [builder.tensor(v) for v in inputs], attributes, like)

    def copy(self, builder: Builder, inputs: list[ir.Value]) -> list[Tensor]:
        """One with a copy of its body."""
        return self.write(builder, builder.copy_of_subgraph(self.body).graph, inputs)

    def divided(self, builder: Builder) -> list[Tensor]:
        """The results of all steps: those of segments of one size, and after them of at least one step."""
        length = self.length(builder)
        known = length.constant
        if known is not None:
            size = builder.constant([math.isqrt(int(known[0]))], ir.DataType.INT64)
        else:
            size = op.Cast(op.Floor(op.Sqrt(op.Cast(length, to=ir.DataType.DOUBLE))), to=ir.DataType.INT64)
        segments = op.Div(op.Sub(length, 1), size)
        first = op.Mul(segments, size)
        rest = op.Sub(length, first)
        in_segments, in_rest = [], []
        for value, axis, backward in zip(self.inputs[self.states :], self.axes, self.directions, strict=True):
            x = builder.tensor(value)
            start = rest if backward else builder.constant([0], ir.DataType.INT64)
            part = op.Slice(x, start, op.Add(start, first), [axis])
            shape = op.Concat(_dims(x, 0, axis), segments, size, _dims(x, axis + 1, None), axis=0)
            in_segments.append(op.Reshape(part, shape, allowzero=1).value)
            start = builder.constant([0], ir.DataType.INT64) if backward else first
            in_rest.append(op.Slice(x, start, op.Add(start, rest), [axis]).value)
        results = self.write(builder, self._segment(builder), [*self.inputs[: self.states], *in_segments])
        states = [t.value for t in results[: self.states]]
        last = self.copy(builder, [*states, *in_rest])
        joined = last[: self.states]
        for k, (axis, backward) in enumerate(zip(self.out_axes, self.out_directions, strict=True), self.states):
            shape = op.Concat(_dims(results[k], 0, axis), first, _dims(results[k], axis + 2, None), axis=0)
            parts = [op.Reshape(results[k], shape, allowzero=1), last[k]]
            joined.append(op.Concat(*(parts[::-1] if backward else parts), axis=axis))
        return joined

    def _segment(self, builder: Builder) -> ir.Graph:
        """A step of the outer Scan: a Scan over the steps of a segment."""
        outer = builder.subgraph("segment")
        with outer.at_work(builder.scope):
            inputs = [_like(outer, v) for v in self.body.inputs]
            for tensor, axis in zip(inputs[self.states :], self.axes, strict=True):
                tensor.value.shape = _stack_of(tensor.value, axis).shape
            results = self.copy(outer, [t.value for t in inputs])
        outer.graph.inputs.extend(t.value for t in inputs)
        outer.graph.outputs.extend(t.value for t in results)
        return outer.graph


def _dims(x: Tensor, start: int, end: int | None) -> Tensor:
    return op.Shape(x, start=start, end=end)  # type: ignore[no-any-return]
