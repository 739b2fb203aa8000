"""Sequences and optionals whose lengths are known only at run time."""

import onnx_ir as ir

from onnxgrad.graph.gradients import AtPosition, for_each
from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import nondiff, op, vjp
from onnxgrad.rules.shape import reshaped_like


def _element(g: Tensor, position: Tensor | int, like: Tensor) -> Tensor:
    """The gradient of a tensor in a sequence, from the sequence's; that may hold a scalar zero for it."""
    return op.Expand(op.SequenceAt(g, position), op.Shape(like))


def _inserted(n: NodeView) -> Tensor | int:
    """Where the tensor is in the longer sequence."""
    if n.position is None:
        return -1
    return op.Where(op.Less(n.position, 0), n.position - 1, n.position)


def _erased(g: Tensor, n: NodeView) -> Tensor:
    zero = n.builder.constant(0, g.dtype)
    if n.position is None:
        return op.SequenceInsert(g, zero)
    length = op.CastLike(op.SequenceLength(n.input_sequence), n.position)
    return op.SequenceInsert(g, zero, op.Where(op.Less(n.position, 0), n.position + length, n.position))


def _split(g: Tensor, n: NodeView) -> Tensor:
    """Joins the gradients, each in the shape of what was split off; after an empty one, if there are none."""
    squeezed = n.split is None and not n.keepdims

    def piece(k: Tensor) -> Tensor:
        part = _element(g, k, op.SequenceAt(n.output_sequence, k))
        return op.Unsqueeze(part, [n.axis]) if squeezed else part

    empty = op.SequenceConstruct(op.Slice(n.input, [0], [0], [n.axis]))
    return reshaped_like(op.ConcatFromSequence(for_each(op.SequenceLength(g), empty, piece), axis=n.axis), n.input)


def _joined(g: Tensor, n: NodeView) -> Tensor:
    if n.new_axis:
        return op.SplitToSequence(g, axis=n.axis, keepdims=0)
    end = None if n.axis == -1 else n.axis + 1
    sizes = for_each(
        op.SequenceLength(n.input_sequence),
        op.SequenceEmpty(dtype=ir.DataType.INT64),
        lambda k: op.Shape(op.SequenceAt(n.input_sequence, k), start=n.axis, end=end),
    )
    return op.SplitToSequence(g, op.ConcatFromSequence(sizes, axis=0), axis=n.axis)


vjp("SequenceConstruct", inputs=lambda g, n, k: _element(g, k, n.inputs[k]))
vjp("SequenceAt", input_sequence=lambda g, n: AtPosition(n.position, g), position=nondiff)
vjp(
    "SequenceInsert",
    input_sequence=lambda g, n: op.SequenceErase(g, _inserted(n)),
    tensor=lambda g, n: _element(g, _inserted(n), n.tensor),
    position=nondiff,
)
vjp("SequenceErase", input_sequence=_erased, position=nondiff)
vjp("SplitToSequence", input=_split, split=nondiff)
vjp("ConcatFromSequence", input_sequence=_joined)
vjp("Optional", input=lambda g, n: g if n.input.is_sequence else op.Expand(g, op.Shape(n.input)))
vjp("OptionalGetElement", input=lambda g, n: g)
