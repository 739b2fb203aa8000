"""Appends the loss to a graph: each part reads its prediction and an input for its target, and all are summed."""

import difflib
from collections.abc import Sequence
from typing import ClassVar, Protocol

import onnx_ir as ir

from onnxgrad.graph.builder import Builder, op
from onnxgrad.graph.tensor import Dim, Tensor
from onnxgrad.passes.find_logits import find_logits


class Term(Protocol):
    """One term of a loss, as train/losses.py has them."""

    prediction: str
    target: str
    share: float
    activations: ClassVar[tuple[str, ...]]

    def class_axis(self, prediction: Tensor) -> int | None:
        """Where the classes are, for a loss of classes."""

    def of_logits(self) -> "Term":
        """The loss that uses the input of its activation."""

    def target_like(self, prediction: Tensor) -> tuple[ir.DataType, tuple[Dim, ...] | None]:
        """Type and shape of the target's input."""

    def formula(self, prediction: Tensor, target: Tensor) -> Tensor:
        """The loss, a scalar."""

    def as_part(self) -> "Term":
        """The loss of a part of a batch, to be weighted."""


def prediction_of(graph: ir.Graph, loss: Term | str) -> ir.Value:
    """The value that a loss is of, or that is the loss: an output of the model, or any value inside it, by its name."""
    name = loss if isinstance(loss, str) else loss.prediction
    for value in (*graph.outputs, *(v for node in graph for v in node.outputs)):
        if value.name == name:
            return value
    inner = [str(v.name) for node in graph for v in node.outputs]
    outputs = ", ".join(repr(v.name) for v in graph.outputs)
    close = difflib.get_close_matches(name, inner, n=1)
    expected = f"did you mean {close[0]!r}?" if close else f"expected {outputs} or an inner value"
    if isinstance(loss, str):
        raise ValueError(f"loss is {loss!r}, expected a loss, an output of the model ({outputs}) or a value inside it")
    raise ValueError(
        f"{type(loss).__name__}: {name!r} is neither an output of the model nor a value inside it, {expected}"
    )


def append_loss(
    builder: Builder,
    loss: Sequence[Term] | str,
    weights: ir.Value | None = None,
    remarks: list[str] | None = None,
) -> ir.Value:
    """Adds the loss to the graph, with an input for each target; gives its value.

    With `weights`, one for each part of the loss, that of one rank's part of a batch. `remarks` gets sentences.
    """
    if isinstance(loss, str):
        own = builder.tensor(prediction_of(builder.graph, loss))
        if own.shape not in ((), (1,)):
            raise ValueError(
                f"the output {loss!r} has shape {list(own.shape or '?')}, expected one number, the loss: "
                "losses such as CrossEntropy and MSE compare an output with a target"
            )
        if weights is None:
            return own.value
        with builder.at_work(f"{loss}_weighted"):
            return _weighted(own, builder.tensor(weights), 0).value
    targets: dict[str, Tensor] = {}
    total: Tensor | None = None
    for number, given in enumerate(loss):
        prediction, part = builder.tensor(prediction_of(builder.graph, given)), given
        _expect_float(prediction, given, builder.graph)
        with builder.at_work(f"{given.prediction}_loss"):
            if given.activations:
                prediction, part = _before_activation(prediction, given, [] if remarks is None else remarks)
            if part.target not in targets:
                targets[part.target] = _target_input(builder, part, prediction)
            if weights is None:
                value = part.formula(prediction, targets[part.target])
            else:
                value = part.as_part().formula(prediction, targets[part.target])
                value = _weighted(value, builder.tensor(weights), number)
            value = value * part.share
            total = value if total is None else total + value
    assert total is not None
    if total.shape is None:
        for given in loss:
            _ = builder.tensor(prediction_of(builder.graph, given)).rank  # which raises one sentence if nobody knows it
    if total.shape not in ((), (1,)):
        raise ValueError(f"the loss has shape {list(total.shape or '?')}, expected a scalar: reduce it")
    return total.value


def _expect_float(prediction: Tensor, part: Term, graph: ir.Graph) -> None:
    """Classifiers have an output of labels beside their scores."""
    if isinstance(prediction.value.type, ir.TensorType) and not prediction.is_float:
        others = [repr(v.name) for v in graph.outputs if v.dtype is not None and v.dtype.is_floating_point()]
        raise ValueError(
            f"{type(part).__name__}: {part.prediction!r} holds {prediction.dtype.name.lower()}, which has no gradient, "
            f"expected an output of floating-point numbers{': ' * bool(others)}{', '.join(others)}"
        )


def _before_activation(prediction: Tensor, part: Term, remarks: list[str]) -> tuple[Tensor, Term]:
    """What a loss takes in place of a prediction that an activation made, and the loss of that."""
    found = find_logits(prediction, part.activations, part.class_axis(prediction))
    if found is None:
        return prediction, part
    begin = f"{type(part).__name__}: {prediction.value.name!r} comes from {found.activation}"
    if found.tensor is not None:
        remarks.append(f"{begin}, so that the loss takes {found.taken}; the output stays as it is.")
        return found.tensor, part.of_logits()
    if found.activation in part.activations:
        remarks.append(
            f"{begin}, but not along the classes as far as can be seen, so that the loss takes it for logits; to have "
            f"{found.taken}, name that."
        )
    elif part.of_logits() is part:
        remarks.append(f"{begin}, but the loss is of logits and applies {part.activations[0]} to it.")
    return prediction, part


def _weighted(loss: Tensor, weights: Tensor, number: int) -> Tensor:
    weight: Tensor = op.CastLike(op.Gather(weights, number, axis=0), loss)
    return loss * weight


def _target_input(builder: Builder, part: Term, prediction: Tensor) -> Tensor:
    for value in builder.graph.inputs:
        if value.name == part.target:
            return builder.tensor(value)  # the model takes its target itself
    inner = (value for node in builder.graph for value in node.outputs)
    if any(value.name == part.target for value in (*builder.graph.initializers.values(), *inner)):
        raise ValueError(
            f"{type(part).__name__}: the target {part.target!r} has the name of a value in the model: give it another"
        )
    dtype, shape = part.target_like(prediction)
    value = ir.Value(name=part.target, shape=None if shape is None else ir.Shape(list(shape)))
    value.dtype = dtype
    builder.graph.inputs.append(value)
    return builder.tensor(value)
