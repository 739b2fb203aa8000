"""Sequences of tensors: what is done to each element, whether or not the graph says how many there are."""

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxgrad.graph.builder import builder_at_work, op
from onnxgrad.graph.tensor import Tensor
from onnxgrad.schema import is_standard


def for_each(
    function: Callable[..., Sequence[Tensor]], *sequences: Tensor, shared: Sequence[Tensor] = ()
) -> list[Tensor]:
    """The sequences of what a function makes of the elements, one of each sequence at a time, and of `shared`."""
    known = [_elements(sequence) for sequence in sequences]
    elements = [each for each in known if each is not None]
    if len(elements) < len(sequences):
        return _loop(function, sequences, shared)
    lengths = [len(each) for each in elements]
    if len(set(lengths)) > 1:
        raise ValueError(f"its sequences have {', '.join(map(str, lengths))} tensors, expected as many in each")
    made = [function(*each, *shared) for each in zip(*elements, strict=True)]
    return [op.SequenceConstruct(*column) for column in zip(*made, strict=True)]


def joined(sequence: Tensor) -> Tensor:
    """The elements, which are vectors, one after the other."""
    elements = _elements(sequence)
    if elements is not None:
        return op.Concat(*elements, axis=0)  # type: ignore[no-any-return]
    made: Tensor = op.ConcatFromSequence(sequence, axis=0)
    made.value.shape = ir.Shape([None])
    return made


def _elements(sequence: Tensor) -> list[Tensor] | None:
    """Those of a sequence that the graph puts together itself."""
    node = sequence.value.producer()
    if node is None or node.op_type != "SequenceConstruct" or not is_standard(node.domain):
        return None
    return [sequence.builder.tensor(v) for v in node.inputs if v is not None]


def _loop(
    function: Callable[..., Sequence[Tensor]], sequences: Sequence[Tensor], shared: Sequence[Tensor]
) -> list[Tensor]:
    outer = builder_at_work()
    inner = outer.subgraph("each")
    number, more = inner.loop_inputs(outer.scope)
    with inner.at_work(outer.scope):
        elements = [op.SequenceAt(s, number) for s in sequences]
        results = function(*elements, *(inner.tensor(t.value) for t in shared))
        kinds = [ir.SequenceType(ir.TensorType(r.dtype)) for r in results]
        so_far = [inner.parameter(f"{outer.scope}/so_far", kind) for kind in kinds]
        given = [inner.copy(more), *map(op.SequenceInsert, so_far, results)]
    inner.graph.inputs.extend(t.value for t in (number, more, *so_far))
    inner.graph.outputs.extend(t.value for t in given)
    empty = [op.SequenceEmpty(dtype=r.dtype.value) for r in results]
    inputs = [op.SequenceLength(sequences[0]), None, *empty]
    return outer.control_flow("Loop", inputs, {"body": inner.graph}, [t.value for t in so_far])
