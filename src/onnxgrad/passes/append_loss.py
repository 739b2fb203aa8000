"""The loss at the end of a graph: each part at the output it is of, an input for each target, all added up."""

from collections.abc import Sequence
from typing import Protocol

import onnx_ir as ir

from onnxgrad.graph.builder import Builder, op
from onnxgrad.graph.tensor import Dim, Tensor


class Term(Protocol):
    """One term of a loss, as train/losses.py has them."""

    prediction: str
    target: str
    share: float

    def target_like(self, prediction: Tensor) -> tuple[ir.DataType, tuple[Dim, ...] | None]:
        """Type and shape of the target's input."""

    def formula(self, prediction: Tensor, target: Tensor) -> Tensor:
        """The loss, a scalar."""

    def as_part(self) -> "Term":
        """The loss of a part of a batch, to be weighted."""


def append_loss(builder: Builder, loss: Sequence[Term] | str, weights: ir.Value | None = None) -> ir.Value:
    """Adds the loss to the graph, with an input for each target; gives its value.

    With `weights`, one for each part of the loss, that of one rank's part of a batch.
    """
    outputs = {str(v.name): v for v in builder.graph.outputs}
    if isinstance(loss, str):
        if loss not in outputs:
            raise ValueError(f"loss is {loss!r}, expected an output of the model ({', '.join(outputs)}) or a loss")
        if builder.tensor(outputs[loss]).shape not in ((), (1,)):
            raise ValueError(f"the output {loss!r} has shape {list(outputs[loss].shape or '?')}, a loss is one number")
        if weights is None:
            return outputs[loss]
        with builder.at_work(f"{loss}_weighted"):
            return _weighted(builder.tensor(outputs[loss]), builder.tensor(weights), 0).value
    targets: dict[str, Tensor] = {}
    total: Tensor | None = None
    for number, part in enumerate(loss):
        if part.prediction not in outputs:
            raise ValueError(
                f"{type(part).__name__}: {part.prediction!r} is not an output of the model, expected "
                f"{', '.join(outputs)}"
            )
        prediction = builder.tensor(outputs[part.prediction])
        with builder.at_work(f"{part.prediction}_loss"):
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
    if total.shape not in ((), (1,)):
        raise ValueError(f"the loss has shape {list(total.shape or '?')}, expected a scalar: reduce it")
    return total.value


def _weighted(loss: Tensor, weights: Tensor, number: int) -> Tensor:
    weight: Tensor = op.CastLike(op.Gather(weights, number, axis=0), loss)
    return loss * weight


def _target_input(builder: Builder, part: Term, prediction: Tensor) -> Tensor:
    for value in (*builder.graph.inputs, *builder.graph.initializers.values()):
        if value.name == part.target:
            return builder.tensor(value)  # the model takes its target itself
    dtype, shape = part.target_like(prediction)
    value = ir.Value(name=part.target, shape=None if shape is None else ir.Shape(list(shape)))
    value.dtype = dtype
    builder.graph.inputs.append(value)
    return builder.tensor(value)
