"""Arithmetic on values of a graph: the one language in which rules, losses and ONNX functions are written."""

from typing import Any, Self


class Arithmetic:
    """+ - * / ** @ and comparisons append a node; a number on the other side takes this value's type."""

    __slots__ = ()

    def append(self, op_type: str, *operands: Any) -> Self:
        """Adds a node of operands, of which this value is one; gives its result."""
        raise NotImplementedError

    def __add__(self, other: Any) -> Self:
        return self.append("Add", self, other)

    def __radd__(self, other: Any) -> Self:
        return self.append("Add", other, self)

    def __sub__(self, other: Any) -> Self:
        return self.append("Sub", self, other)

    def __rsub__(self, other: Any) -> Self:
        return self.append("Sub", other, self)

    def __mul__(self, other: Any) -> Self:
        return self.append("Mul", self, other)

    def __rmul__(self, other: Any) -> Self:
        return self.append("Mul", other, self)

    def __truediv__(self, other: Any) -> Self:
        return self.append("Div", self, other)

    def __rtruediv__(self, other: Any) -> Self:
        return self.append("Div", other, self)

    def __pow__(self, other: Any) -> Self:
        return self.append("Pow", self, other)

    def __rpow__(self, other: Any) -> Self:
        return self.append("Pow", other, self)

    def __matmul__(self, other: Any) -> Self:
        return self.append("MatMul", self, other)

    def __neg__(self) -> Self:
        return self.append("Neg", self)

    def __lt__(self, other: Any) -> Self:
        return self.append("Less", self, other)

    def __le__(self, other: Any) -> Self:
        return self.append("LessOrEqual", self, other)

    def __gt__(self, other: Any) -> Self:
        return self.append("Greater", self, other)

    def __ge__(self, other: Any) -> Self:
        return self.append("GreaterOrEqual", self, other)

    def equals(self, other: Any) -> Self:
        """Element by element; == would make values useless as keys."""
        return self.append("Equal", self, other)

    def __and__(self, other: Any) -> Self:
        return self.append("And", self, other)

    def __or__(self, other: Any) -> Self:
        return self.append("Or", self, other)

    def __invert__(self) -> Self:
        return self.append("Not", self)
