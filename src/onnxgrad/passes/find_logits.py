"""find_logits(): the input of the Softmax or Sigmoid that computes an output, for losses that apply it themselves."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.builder import Builder
from onnxgrad.graph.node import permutation
from onnxgrad.graph.tensor import Tensor, dims_of
from onnxgrad.schema import is_standard

ACTIVATIONS = ("Softmax", "LogSoftmax", "Sigmoid")
SAME_NUMBERS = {"Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose"}


class Logits(NamedTuple):
    """What is before an activation."""

    activation: str
    taken: str  # what the loss takes, in words
    tensor: Tensor | None  # as the output is: cast and shaped alike; None if it is not what was looked for


def activation_of(value: ir.Value) -> tuple[ir.Node | None, list[ir.Node]]:
    """The Softmax, LogSoftmax or Sigmoid that a value comes from, and the nodes after it, which keep its numbers."""
    after: list[ir.Node] = []
    node = value.producer()
    while node is not None and is_standard(node.domain) and node.op_type in SAME_NUMBERS and node.inputs[0] is not None:
        after.insert(0, node)
        node = node.inputs[0].producer()
    found = node is not None and is_standard(node.domain) and node.op_type in ACTIVATIONS
    return (node, after) if found else (None, [])


def find_logits(prediction: Tensor, activations: Sequence[str], axis: int | None) -> Logits | None:
    """The logits of a prediction that an activation made; to be found, it is one of `activations`.

    With an `axis`, that of the classes, Softmax has to be along it.
    """
    builder = prediction.builder
    node, after = activation_of(prediction.value)
    if node is None:
        return None if axis is None else _of_two_classes(prediction, axis) or _of_shares(prediction, axis)
    source = node.inputs[0]
    assert source is not None
    tensor: Tensor | None = builder.tensor(source)
    if node.op_type not in activations or (axis is not None and _class_axis(node, after) != axis):
        tensor = None
    for step in after:
        tensor = None if tensor is None else _again(builder, step, tensor)
    return Logits(node.op_type, _before(source), tensor)


def _before(value: ir.Value) -> str:
    return f"what is before it, {value.name!r}"


def _again(builder: Builder, node: ir.Node, data: Tensor) -> Tensor:
    """What a node does to its first input, done to another tensor."""
    others = [None if v is None else builder.tensor(v) for v in node.inputs[1:]]
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    return builder.node(node.op_type, [data, *others], attributes)[0]


def _class_axis(softmax: ir.Node, after: Sequence[ir.Node]) -> int | None:
    """Where the axis of a Softmax is in what the nodes after it make of its result; None if that is not clear."""
    dims = dims_of(softmax.outputs[0])
    if dims is None:
        return None
    axis: int | None = softmax.attributes.get_int("axis", -1) % len(dims)
    for node in after:
        axis = None if axis is None else _axis_after(node, axis)
    return axis


def _axis_after(node: ir.Node, axis: int) -> int | None:
    assert node.inputs[0] is not None
    before, after = dims_of(node.inputs[0]), dims_of(node.outputs[0])
    if node.op_type in ("Identity", "Cast"):
        return axis
    if before is None or after is None:
        return None
    if node.op_type == "Transpose":
        return permutation(node).index(axis)
    if before[axis] is None or before[axis] == 1:
        return None
    if axis == len(before) - 1 and after and after[-1] == before[-1]:
        return len(after) - 1
    long_before, long_after = ([k for k, d in enumerate(dims) if d != 1] for dims in (before, after))
    same = [before[k] for k in long_before] == [after[k] for k in long_after] and None not in before
    return long_after[long_before.index(axis)] if same else None


def _of_two_classes(prediction: Tensor, axis: int) -> Logits | None:
    """Where the output is 1 - p and p, of one Sigmoid, as scikit-learn's networks have it."""
    builder, node = prediction.builder, _maker(prediction.value)
    if node is None or node.op_type != "Concat" or not is_standard(node.domain) or len(node.inputs) != 2:
        return None
    negative, positive = node.inputs
    assert negative is not None and positive is not None
    rest, sigmoid, dims = negative.producer(), positive.producer(), dims_of(positive)
    if rest is None or rest.op_type != "Sub" or rest.inputs[1] is not positive or rest.inputs[0] is None:
        return None
    one = builder.constant_of(rest.inputs[0])
    if one is None or (one != 1).any() or sigmoid is None or sigmoid.op_type != "Sigmoid" or dims is None:
        return None
    if node.attributes["axis"].as_int() % len(dims) != axis or dims[axis] != 1 or sigmoid.inputs[0] is None:
        return None
    score = builder.tensor(sigmoid.inputs[0])
    # Softmax of 0 and z is 1 - p and p.
    tensor = builder.node("Concat", [score * 0.0, score], {"axis": axis})[0]
    return Logits("Sigmoid", _before(score.value), tensor)


def _of_shares(prediction: Tensor, axis: int) -> Logits | None:
    """Where the output is positive numbers over their sum, as one-vs-rest classifiers have it: its logarithms do."""
    builder, node = prediction.builder, _maker(prediction.value)
    if node is None or node.op_type != "Div" or not is_standard(node.domain):
        return None
    whole, total = node.inputs[0], node.inputs[1]
    assert whole is not None and total is not None
    guard = _maker(total)
    if guard is not None and guard.op_type == "Where" and guard.inputs[2] is not None:  # 1 in place of 0
        guard = _maker(guard.inputs[2])
    if guard is None or guard.op_type not in ("ReduceSum", "ReduceL1") or guard.inputs[0] is not whole:
        return None
    axes = builder.constant_of(guard.inputs[1]) if len(guard.inputs) > 1 and guard.inputs[1] is not None else None
    if axes is None or [int(a) % prediction.rank for a in axes] != [axis] or not _is_positive(builder, whole):
        return None
    smallest = builder.constant(np.finfo(prediction.dtype.numpy()).tiny, prediction.dtype)
    tensor = builder.node("Log", [builder.node("Max", [prediction, smallest])[0]])[0]
    return Logits("a division by its sum", "its logarithm", tensor)


def _is_positive(builder: Builder, value: ir.Value, at_most_1: bool = False) -> bool:
    node = _maker(value)
    if node is None or not is_standard(node.domain):
        return False
    if node.op_type == "Concat":
        return all(v is not None and _is_positive(builder, v, at_most_1) for v in node.inputs)
    if node.op_type in (*SAME_NUMBERS, "Slice", "Gather"):
        return node.inputs[0] is not None and _is_positive(builder, node.inputs[0], at_most_1)
    if node.op_type == "Sub" and node.inputs[0] is not None and node.inputs[1] is not None:
        one = builder.constant_of(node.inputs[0])
        return one is not None and bool((one == 1).all()) and _is_positive(builder, node.inputs[1], at_most_1=True)
    return node.op_type in ("Softmax", "Sigmoid") or (node.op_type == "Exp" and not at_most_1)


def _maker(value: ir.Value) -> ir.Node | None:
    """The node that a value comes from, Identity aside."""
    node = value.producer()
    while node is not None and node.op_type == "Identity" and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node
