"""AllReduceSum: the sum over all processes of a group, each of which runs the operator on numbers of its own."""

from typing import Annotated

from onnxgrad.op import op
from onnxgrad.schema import OWN, Dim, Known
from onnxgrad.tensor_types import Array, TypeConstraint

Summed = Annotated[Array, TypeConstraint("T", ("float", "double"))]


def _shape_rule(data: Known, group: int) -> tuple[Dim, ...] | None:
    return data.dims


@op("AllReduceSum", domain=OWN, outputs="reduced", shape=_shape_rule)
def all_reduce_sum(data: Summed, group: int = 0) -> Summed:
    """Adds up the numbers of all processes of a group: those that `onnxgrad.Trainer` was given a communicator for.

    `group` is a number that the trainer has from the process; group 0 is the process alone, whose sum is what it has.
    All processes of a group run the operator equally often, on as many numbers, in the same order. Its gradient is the
    operator itself.
    """
    return data.copy()
