"""What the gradient of a value is: of a tensor a tensor, of a sequence a sequence, of an optional that of its element.

In the gradient of a sequence a scalar zero stands for zeros of any shape. So it costs next to nothing to say that one
tensor of many has a gradient, and a loop whose steps each read another one adds up what they give in place.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.builder import builder_at_work, op
from onnxgrad.graph.tensor import Tensor

MOST_DIMENSIONS = 9


class AtPosition(NamedTuple):
    """The gradient of a sequence of which one tensor has one."""

    position: Tensor
    g: Tensor


def gradient_value(name: str, of: ir.Value) -> ir.Value:
    """A value that has the type of another one's gradient, and its shape where that is known."""
    kind: Any = of.type.elem_type if isinstance(of.type, ir.OptionalType) else of.type
    return ir.Value(name=name, type=kind, shape=of.shape if isinstance(of.type, ir.TensorType) else None)


def zero_gradient(of: Tensor) -> Tensor:
    """The gradient of a value which nothing depends on."""
    builder = builder_at_work()
    kind: Any = of.value.type
    if isinstance(kind, ir.OptionalType):
        if isinstance(kind.elem_type, ir.TensorType):
            return builder.constant(0, of.dtype)
        of = op.OptionalGetElement(of)
    if not of.is_sequence:
        return op.Expand(builder.constant(0, of.dtype), op.Shape(of))  # type: ignore[no-any-return]
    zeros = op.Expand(builder.constant([0], of.dtype), op.Reshape(op.SequenceLength(of), [1]))
    return op.SplitToSequence(zeros, axis=0, keepdims=0)  # type: ignore[no-any-return]


def sum_gradients(of: Tensor, parts: Sequence[Tensor | AtPosition]) -> Tensor:
    """The sum of parts of a value's gradient."""
    whole = [part for part in parts if isinstance(part, Tensor)]
    total = whole[0] if whole else zero_gradient(of)
    for other in whole[1:]:
        total = _sum_of_sequences(total, other) if total.is_sequence else total + other
    for part in parts:
        if isinstance(part, AtPosition):
            total = _add_at(total, part)
    return total


def _sum_of_sequences(a: Tensor, b: Tensor) -> Tensor:
    empty = op.SequenceEmpty(dtype=a.dtype)
    return for_each(op.SequenceLength(a), empty, lambda k: op.Add(op.SequenceAt(a, k), op.SequenceAt(b, k)))


def _add_at(total: Tensor, part: AtPosition) -> Tensor:
    # What counts from the end does so for SequenceInsert from that of a sequence which is shorter by one.
    length = op.CastLike(op.SequenceLength(total), part.position)
    position = op.Where(op.Less(part.position, 0), op.Add(part.position, length), part.position)
    new = op.Add(op.SequenceAt(total, position), part.g)
    return op.SequenceInsert(op.SequenceErase(total, position), new, position)  # type: ignore[no-any-return]


def whole_gradient(of: Tensor, g: Tensor) -> Tensor:
    """A gradient in which that of a sequence has all its zeros."""
    if not g.is_sequence:
        return g
    empty = op.SequenceEmpty(dtype=g.dtype)
    return for_each(
        op.SequenceLength(g), empty, lambda k: op.Expand(op.SequenceAt(g, k), op.Shape(op.SequenceAt(of, k)))
    )


def of_any_shape(sequence: Tensor) -> Tensor:
    """The same sequence, as one whose shapes onnx does not know: it would infer that a Loop keeps them."""
    return sequence if sequence.shape is None else forget_shapes(sequence)


def forget_shapes(sequence: Tensor) -> Tensor:
    """The same, known or not: with a tensor in between that has more dimensions than any other."""
    other = builder_at_work().constant(np.zeros([1] * MOST_DIMENSIONS), sequence.dtype)
    return op.SequenceErase(op.SequenceInsert(sequence, other))  # type: ignore[no-any-return]


def for_each(length: Tensor, first: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    """The sequence `first`, and after it what `make` gives for every number below `length`."""
    outer = builder_at_work()
    inner = outer.subgraph("step")
    number, more = inner.loop_inputs(outer.scope)
    before = inner.parameter(f"{outer.scope}/before", first.value.type)
    with inner.at_work(outer.scope):
        results = [inner.copy(more), op.SequenceInsert(before, make(number))]
    inner.graph.inputs.extend(t.value for t in (number, more, before))
    inner.graph.outputs.extend(t.value for t in results)
    (result,) = outer.control_flow("Loop", [length, None, of_any_shape(first)], {"body": inner.graph}, [before.value])
    return result
