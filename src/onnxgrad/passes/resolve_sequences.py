"""resolve_sequences(): sequences of known length become Split, Concat and the values that they hold.

torch's exporters write torch.split and chunk as SplitToSequence and SequenceAt where the batch is dynamic.
"""

import onnx_ir as ir

from onnxgrad.graph.builder import Builder, op
from onnxgrad.graph.tensor import Tensor
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.fold_shapes import fold_shapes
from onnxgrad.passes.infer import infer
from onnxgrad.schema import is_standard

MAKE_SEQUENCES = {
    "SequenceEmpty", "SequenceConstruct", "SplitToSequence", "SequenceInsert", "SequenceErase", "Identity",
}  # fmt: skip
READ_SEQUENCES = {"SequenceAt", "SequenceLength", "ConcatFromSequence"}


def resolve_sequences(draft: Draft) -> None:
    """Puts plain values in the place of what is read from sequences; a sequence of unknown length stays."""
    while _resolve_once(draft.graph):
        infer(draft)
        fold_shapes(draft)  # a length, or the shape of an element, may decide how long another sequence is


def _resolve_once(graph: ir.Graph) -> bool:
    """Whether anything was read from sequences of known length."""
    nodes = [n for n in graph if is_standard(n.domain) and n.op_type in MAKE_SEQUENCES | READ_SEQUENCES]
    if not any(n.op_type in READ_SEQUENCES for n in nodes):
        return False
    builder = Builder(graph)
    elements: dict[ir.Value, list[Tensor]] = {}  # of sequences
    changed = False
    for node in nodes:
        with builder.at_work(str(node.name)):
            if node.op_type in MAKE_SEQUENCES:
                made = _elements(builder, node, elements)
                if made is not None:
                    elements[node.outputs[0]] = made
                continue
            result = _result(builder, node, elements)
        if result is not None:
            _put(builder, node.outputs[0], result)
            changed = True
    if changed:
        graph.sort()  # what was written came last
        for node in reversed(nodes):
            if not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
                graph.remove(node, safe=True)
    return changed


def _elements(builder: Builder, node: ir.Node, known: dict[ir.Value, list[Tensor]]) -> list[Tensor] | None:
    """The elements of the sequence that a node makes, if all is known."""
    inputs = list(node.inputs)
    if node.op_type in ("SequenceEmpty", "SequenceConstruct"):
        return [builder.tensor(v) for v in inputs if v is not None]
    if node.op_type == "SplitToSequence":
        return _split(builder, node)
    before = known.get(inputs[0]) if inputs[0] is not None else None
    if before is None or node.op_type == "Identity":
        return before
    if node.op_type == "SequenceErase":
        at = _position(builder, node, 1, len(before), last=len(before) - 1)
        return None if at is None else before[:at] + before[at + 1 :]
    at = _position(builder, node, 2, len(before), last=len(before))
    if at is None:
        return None
    assert inputs[1] is not None
    return [*before[:at], builder.tensor(inputs[1]), *before[at:]]


def _position(builder: Builder, node: ir.Node, k: int, length: int, last: int) -> int | None:
    """The position that the k-th input names; the last one, if the input is left out."""
    value = node.inputs[k] if k < len(node.inputs) else None
    position = builder.constant_of(value) if value is not None else last
    if position is None or not -length <= int(position) <= last:
        return None  # or outside, which the session reports
    return int(position) + (length if position < 0 else 0)


def _split(builder: Builder, node: ir.Node) -> list[Tensor] | None:
    assert node.inputs[0] is not None
    data = builder.tensor(node.inputs[0])
    axis, keep = node.attributes.get_int("axis", 0), node.attributes.get_int("keepdims", 1)
    given = node.inputs[1] if len(node.inputs) > 1 else None
    sizes = builder.constant_of(given) if given is not None else None
    if given is not None and sizes is None:
        return None
    if sizes is None or sizes.ndim == 0:  # pieces of one size, of which the last may be smaller
        length, size = (data.shape or {axis: None})[axis], 1 if sizes is None else int(sizes)
        if not isinstance(length, int) or size < 1:
            return None
        lengths = [min(size, length - k) for k in range(0, length, size)]
    else:
        lengths = [int(n) for n in sizes]
    if len(lengths) == 1:
        pieces = [data]
    else:
        pieces = list(op.Split(data, lengths, axis=axis, outputs=len(lengths))) if lengths else []
    return [op.Squeeze(p, [axis]) for p in pieces] if given is None and not keep else pieces


def _result(builder: Builder, node: ir.Node, known: dict[ir.Value, list[Tensor]]) -> Tensor | None:
    """What a node reads from its sequence, if that is known."""
    elements = known.get(node.inputs[0]) if node.inputs[0] is not None else None
    if elements is None:
        return None
    if node.op_type == "SequenceLength":
        return builder.constant(len(elements), ir.DataType.INT64)
    if node.op_type == "SequenceAt":
        at = _position(builder, node, 1, len(elements), last=len(elements) - 1)
        return None if at is None else elements[at]
    if not elements:
        return None
    axis = node.attributes["axis"].as_int()
    if node.attributes.get_int("new_axis", 0):
        elements = [op.Unsqueeze(e, [axis]) for e in elements]
    joined: Tensor = op.Concat(*elements, axis=axis)
    return joined


def _put(builder: Builder, old: ir.Value, new: Tensor) -> None:
    """A value goes where an output of a node went; a copy of it, where that is an output of the graph."""
    if old.is_graph_output():
        new = builder.copy(new)
        old.name, new.value.name = f"{old.name}_of_sequence", old.name
    if new.value.shape is None:
        new.value.shape = old.shape
    old.replace_all_uses_with(new.value, replace_graph_outputs=True)
