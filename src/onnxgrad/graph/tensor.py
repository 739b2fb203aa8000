"""A value of a graph as rules see it: it has a type and as much of a shape as is known, and computes."""

from typing import TYPE_CHECKING, Any, Union

import numpy as np
import onnx_ir as ir

from onnxgrad.functions.arithmetic import Arithmetic

if TYPE_CHECKING:
    from onnxgrad.graph.builder import Builder

Dim = int | str | None  # known, known by name, or unknown
Number = Union["Tensor", float, int, bool, np.generic]
MOST_READ = 4096  # elements of an initializer that is looked into; weights are left where they are


def dims_of(value: ir.Value) -> tuple[Dim, ...] | None:
    """The dimensions of a value; None if not even their number is known."""
    if value.shape is None:
        return None
    return tuple(d if isinstance(d, int) else d.value for d in value.shape)


def known_dims(value: ir.Value | None) -> list[Any]:
    """The same as a list, which is empty if their number is not known."""
    return [] if value is None else list(dims_of(value) or ())


def rank_of(value: ir.Value | None) -> int:
    """The number of dimensions; 0 if it is not known, too."""
    return 0 if value is None or value.shape is None else len(value.shape)


def is_float(value: ir.Value) -> bool:
    """Whether it is known to hold floating-point numbers."""
    return value.dtype is not None and value.dtype.is_floating_point()


def may_be_float(value: ir.Value) -> bool:
    """Whether it is not known to hold anything else."""
    return value.dtype is None or value.dtype.is_floating_point()


class Tensor(Arithmetic):
    """A value and the builder that appends what is computed with it."""

    __slots__ = ("builder", "value")
    __hash__ = object.__hash__

    def __init__(self, builder: "Builder", value: ir.Value) -> None:
        self.builder, self.value = builder, value

    def __repr__(self) -> str:
        return f"{self.value.name}: {self.dtype.name if self.value.dtype else '?'}{list(self.shape or ['?'])}"

    @property
    def dtype(self) -> ir.DataType:
        """The element type."""
        if self.value.dtype is None:
            raise ValueError(f"the type of {self.value.name!r} is not known: declare it in the model's value_info")
        return self.value.dtype

    @property
    def is_float(self) -> bool:
        """Whether a gradient can belong to it."""
        return is_float(self.value)

    @property
    def is_sequence(self) -> bool:
        """Whether it is a sequence of tensors, whose type and shape these properties then show."""
        return isinstance(self.value.type, ir.SequenceType)

    @property
    def shape(self) -> tuple[Dim, ...] | None:
        """Its dimensions; None if not even their number is known."""
        return dims_of(self.value)

    @property
    def rank(self) -> int:
        """The number of dimensions, for rules that cannot do without."""
        if self.value.shape is None:
            raise ValueError(
                f"the number of dimensions of {self.value.name!r} is not known: declare its shape in the model's "
                "value_info, dimensions may stay unknown"
            )
        return len(self.value.shape)

    @property
    def static_shape(self) -> tuple[int, ...] | None:
        """The shape if all of it is known."""
        shape = self.shape
        return shape if shape is not None and all(isinstance(d, int) for d in shape) else None  # type: ignore[return-value]

    @property
    def constant(self) -> np.ndarray[Any, Any] | None:
        """The numbers, if the graph fixes them and they are few."""
        return self.builder.constant_of(self.value)

    def append(self, op_type: str, *operands: Number) -> "Tensor":
        """A number among the operands takes this one's type."""
        if len(operands) == 1:
            return self.builder.node(op_type, [self])[0]
        return self.builder.binary(op_type, *operands)
