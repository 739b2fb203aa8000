"""Sequences of tensors: what is done to each element, whether or not the graph says how many there are."""

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad.graph.builder import Builder, builder_at_work, op
from onnxgrad.graph.tensor import Tensor
from onnxgrad.schema import is_standard

INDEX = ir.TensorType(ir.DataType.INT64)


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
    return [construct(column) for column in zip(*made, strict=True)]


def construct(tensors: Sequence[Tensor]) -> Tensor:
    """The sequence of some tensors."""
    kind = ir.SequenceType(ir.TensorType(tensors[0].dtype))
    return _append(builder_at_work(), "SequenceConstruct", [t.value for t in tensors], kind)


def joined(sequence: Tensor) -> Tensor:
    """The elements, which are vectors, one after the other."""
    elements = _elements(sequence)
    if elements is not None:
        together: Tensor = op.Concat(*elements, axis=0)
        return together
    made = _append(
        builder_at_work(),
        "ConcatFromSequence",
        [sequence.value],
        ir.TensorType(sequence.dtype),
        [ir.AttrInt64("axis", 0)],
    )
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
    scope = f"{outer.scope}/element"
    number = ir.Value(name=f"{scope}/number", type=INDEX, shape=ir.Shape([]))
    going_on = ir.Value(name=f"{scope}/going_on", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    body = ir.Graph([number, going_on], [], nodes=[], opset_imports=outer.opsets, name=f"{scope}/body")
    inner = Builder(body)
    with inner.at_work(scope):
        elements = [_append(inner, "SequenceAt", [s.value, number], ir.TensorType(s.dtype)) for s in sequences]
        results = function(*elements, *(inner.tensor(t.value) for t in shared))
        body.outputs.append(inner.copy(inner.tensor(going_on)).value)
        kinds = [ir.SequenceType(ir.TensorType(r.dtype)) for r in results]
        for k, (result, kind) in enumerate(zip(results, kinds, strict=True)):
            before = ir.Value(name=f"{scope}/collected_{k}", type=kind)
            body.inputs.append(before)
            body.outputs.append(_append(inner, "SequenceInsert", [before, result.value], kind).value)
    length = _append(outer, "SequenceLength", [sequences[0].value], INDEX)
    empty = [
        _append(outer, "SequenceEmpty", [], kind, [ir.AttrInt64("dtype", r.dtype.value)])
        for kind, r in zip(kinds, results, strict=True)
    ]
    inputs = [length.value, None, *(e.value for e in empty)]
    loop = ir.Node("", "Loop", inputs, [ir.AttrGraph("body", body)], num_outputs=len(results))
    loop.name = outer.fresh_value_name(f"{outer.scope}/Loop")
    for value, kind in zip(loop.outputs, kinds, strict=True):
        value.name, value.type = outer.fresh_value_name(f"{loop.name}_output"), kind
    outer.graph.append(loop)
    return [outer.tensor(v) for v in loop.outputs]


def _append(
    builder: Builder, op_type: str, inputs: Sequence[ir.Value | None], kind: Any, attributes: Sequence[ir.Attr] = ()
) -> Tensor:
    """A node whose type is known; the builder infers only those of tensors."""
    node = ir.Node("", op_type, inputs, attributes, num_outputs=1)
    (value,) = node.outputs
    node.name = value.name = builder.fresh_value_name(f"{builder.scope}/{op_type}_output")
    value.type = kind
    if op_type == "SequenceLength":
        value.shape = ir.Shape([])
    builder.graph.append(node)
    return builder.tensor(value)
