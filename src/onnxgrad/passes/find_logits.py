"""find_logits(): what is before the Softmax or Sigmoid that made an output, for losses that apply it themselves."""

from collections.abc import Sequence
from typing import NamedTuple

import onnx_ir as ir

from onnxgrad.domains import is_standard
from onnxgrad.graph.builder import Builder
from onnxgrad.graph.tensor import Tensor, dims_of

ACTIVATIONS = ("Softmax", "LogSoftmax", "Sigmoid")
SAME_NUMBERS = {"Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose"}


class Logits(NamedTuple):
    """What is before an activation."""

    activation: str
    before: str  # the name of the value there
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
        return None if axis is None else _of_two_classes(prediction, axis)
    source = node.inputs[0]
    assert source is not None
    tensor: Tensor | None = builder.tensor(source)
    if node.op_type not in activations or (axis is not None and _class_axis(node, after) != axis):
        tensor = None
    for step in after:
        tensor = None if tensor is None else _again(builder, step, tensor)
    return Logits(node.op_type, str(source.name), tensor)


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
    axis: int | None = (softmax.attributes["axis"].as_int() if "axis" in softmax.attributes else -1) % len(dims)
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
        perm = node.attributes["perm"].as_ints() if "perm" in node.attributes else range(len(before))[::-1]
        return list(perm).index(axis)
    if before[axis] is None or before[axis] == 1:
        return None
    if axis == len(before) - 1 and after and after[-1] == before[-1]:
        return len(after) - 1
    long_before, long_after = ([k for k, d in enumerate(dims) if d != 1] for dims in (before, after))
    same = [before[k] for k in long_before] == [after[k] for k in long_after] and None not in before
    return long_after[long_before.index(axis)] if same else None


def _of_two_classes(prediction: Tensor, axis: int) -> Logits | None:
    """Where the output is 1 - p and p, of one Sigmoid, as scikit-learn's networks have it."""
    builder, node = prediction.builder, prediction.value.producer()
    while node is not None and node.op_type == "Identity" and node.inputs[0] is not None:
        node = node.inputs[0].producer()
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
    return Logits("Sigmoid", str(score.value.name), tensor)
