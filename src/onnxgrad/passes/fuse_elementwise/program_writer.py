"""ProgramWriter: the program of a group of element-wise nodes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.builder import Builder
from onnxgrad.ops.dropout import threshold
from onnxgrad.ops.families.elementwise_program import ROW_MEAN, Line, Program
from onnxgrad.passes.fuse_elementwise.fusible import CHAINED, WITH_NUMBERS, inputs_of, number_of, type_name


class ProgramWriter:
    """Writes the program of a group."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.inputs: dict[ir.Value, Line] = {}
        self._lines: list[Line] = []
        self._names: dict[Any, str] = {}  # of values, and of constants by type and number

    def line(self, dtype: str, operation: str, *arguments: str) -> str:
        """Adds one; its name."""
        self._lines.append(Line(f"v{len(self.inputs) + len(self._lines)}", dtype, operation, arguments))
        return self._lines[-1].name

    def constant(self, dtype: str, number: Any) -> str:
        text = repr(number)
        if (dtype, text) not in self._names:
            self._names[dtype, text] = self.line(dtype, "Constant", text)
        return self._names[dtype, text]

    def read(self, value: ir.Value) -> str:
        """The name of a value, an input of the group if it is none of its results."""
        if value not in self._names:
            number = number_of(self.builder, value)
            if number is not None:
                return self.constant(type_name(value), number)
            line = Line(f"v{len(self.inputs) + len(self._lines)}", type_name(value))
            self.inputs[value] = line
            self._names[value] = line.name
        return self._names[value]

    def write(self, node: ir.Node) -> None:
        """Adds what a node computes."""
        dtype = type_name(node.outputs[0])
        write = {"LayerNormalization": _normalized, "LayerNormalizationGrad": _normalized_grad}.get(node.op_type)
        names = [_written(self, node, dtype)] if write is None else write(self, node, dtype)
        self._names.update(zip(node.outputs, names, strict=False))

    def program(self, results: Sequence[ir.Value]) -> Program:
        """All of it."""
        return Program((*self.inputs.values(), *self._lines), tuple(self._names[v] for v in results))


def _written(to: ProgramWriter, node: ir.Node, dtype: str) -> str:
    """The name of what a node gives."""
    operation = node.op_type
    if operation == "Pow":
        x, exponent = inputs_of(node)
        return _power(to, to.read(x), dtype, number_of(to.builder, exponent))
    given = [None if v is None else to.read(v) for v in node.inputs]
    names = [name for name in given if name is not None]
    if operation in CHAINED:
        result = names[0]
        for name in names[1:]:
            result = to.line(dtype, CHAINED[operation], result, name)
        return result
    if operation == "Clip":
        result = names[0]
        for bound, chosen in zip(given[1:], ("Max", "Min"), strict=False):
            result = result if bound is None else to.line(dtype, chosen, result, bound)
        return result
    if operation == "Gelu":
        approximate = node.attributes.get_string("approximate", "none")
        return to.line(dtype, "FastGelu" if approximate == "tanh" else "Gelu", *names)
    if operation == "SeededDropout":
        ratio = node.attributes.get_float("ratio", 0.5)
        numbers = [to.constant(dtype, 1 / (1 - ratio)), to.constant("int64", threshold(ratio))]
        return to.line(dtype, operation, *names, *numbers)
    numbers = [
        to.constant(dtype, float(np.float32(node.attributes.get_float(name, default))))
        for name, default in WITH_NUMBERS.get(operation, {}).items()
    ]
    return to.line(dtype, operation, *names, *numbers)


def _normalized(to: ProgramWriter, node: ir.Node, dtype: str) -> list[str]:
    """The names of the result, the means and the inverse deviations."""
    x, *factors = (to.read(v) for v in inputs_of(node))
    work = _work_type(dtype)
    mean = to.line(work, ROW_MEAN, x)
    shifted = to.line(work, "Sub", x, mean)
    variance = to.line(work, ROW_MEAN, to.line(work, "Mul", shifted, shifted))
    epsilon = to.constant(work, float(np.float32(node.attributes.get_float("epsilon", 1e-5))))
    inverse = to.line(work, "Reciprocal", to.line(work, "Sqrt", to.line(work, "Add", variance, epsilon)))
    result = to.line(dtype, "Mul", shifted, inverse)
    for operation, factor in zip(("Mul", "Add"), factors, strict=False):
        result = to.line(dtype, operation, result, factor)
    return [result, mean, inverse]


def _normalized_grad(to: ProgramWriter, node: ir.Node, dtype: str) -> list[str]:
    """The name of the input's gradient: inverse · (g - mean of g - x̂ · mean of g · x̂)."""
    dY, x, scale, mean, inverse = (to.read(v) for v in inputs_of(node))
    work = _work_type(dtype)
    normal = to.line(work, "Mul", to.line(work, "Sub", x, mean), inverse)
    g = to.line(work, "Mul", dY, scale)
    along = to.line(work, "Mul", normal, to.line(work, ROW_MEAN, to.line(work, "Mul", g, normal)))
    rest = to.line(work, "Sub", to.line(work, "Sub", g, to.line(work, ROW_MEAN, g)), along)
    return [to.line(dtype, "Mul", rest, inverse)]


def _work_type(dtype: str) -> str:
    """The one that statistics are in."""
    return "float64" if dtype == "float64" else "float32"


def _power(to: ProgramWriter, name: str, dtype: str, exponent: Any) -> str:
    """One of POWERS."""
    result = to.line(dtype, "Sqrt", name) if abs(exponent) == 0.5 else name
    for _ in range(int(abs(exponent)) - 1):
        result = to.line(dtype, "Mul", result, name)
    return result if exponent > 0 else to.line(dtype, "Reciprocal", result)
