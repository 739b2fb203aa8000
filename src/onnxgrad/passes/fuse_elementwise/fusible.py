"""Which nodes a FusedElementwise can have: what a program knows, and shapes and types that it takes."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.builder import Builder
from onnxgrad.graph.tensor import dims_of, is_float
from onnxgrad.ops.families.elementwise_program import DTYPES
from onnxgrad.schema import MICROSOFT, OWN, is_standard

FEW = 16  # elements: what is smaller may be about shapes, which onnxruntime computes on the CPU
FEW_INTEGERS = 1024
FOR_INTEGERS = {
    "Abs", "Add", "Cast", "Clip", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mul",
    "Neg", "Sub", "Sum", "Where",
}  # fmt: skip
FOR_FLAGS = {"And", "Cast", "Equal", "Not", "Or", "Where", "Xor"}
AS_THEY_ARE = {  # with inputs only
    "Abs", "Add", "And", "Cos", "Div", "Equal", "Erf", "Exp", "Greater", "GreaterOrEqual", "HardSwish", "IsNaN", "Less",
    "LessOrEqual", "Log", "Mul", "Neg", "Not", "Or", "Reciprocal", "Relu", "Sigmoid", "Sin", "Softplus", "Sqrt", "Sub",
    "Tanh", "Where", "Xor", "FastGeluGrad", "GeluGrad", "HardSwishGrad", "ReluGrad", "SigmoidGrad", "TanhGrad",
}  # fmt: skip
WITH_NUMBERS = {  # attributes, which become constants behind the inputs, and their defaults
    "LeakyRelu": {"alpha": 0.01},
    "Elu": {"alpha": 1.0},
    "HardSigmoid": {"alpha": 0.2, "beta": 0.5},
    "QuickGelu": {"alpha": 1.702},
    "LeakyReluGrad": {"alpha": 0.01},
    "QuickGeluGrad": {"alpha": 1.702},
}
HALF_TYPES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
CHAINED = {"Sum": "Add", "Max": "Max", "Min": "Min"}  # of any number of inputs
POWERS = {2.0, 3.0, 0.5, -0.5, -1.0, -2.0}
ROW_WISE = {"LayerNormalization": {"axis", "epsilon", "stash_type"}, "LayerNormalizationGrad": {"axis"}}
LONGEST_ROW = 4096  # elements: a kernel has a row in its registers
KNOWN: dict[str, set[str]] = {  # operators, and their attributes
    **{name: set() for name in (*AS_THEY_ARE, *CHAINED)},
    **{name: set(numbers) for name, numbers in WITH_NUMBERS.items()},
    **ROW_WISE,
    "Clip": set(),
    "FastGelu": set(),
    "Pow": set(),
    "Cast": {"to", "saturate", "round_mode"},
    "Gelu": {"approximate"},
    "SeededDropout": {"ratio"},
}


def is_elementwise(builder: Builder, node: ir.Node) -> bool:
    """Whether a program can have it."""
    operation, given = node.op_type, inputs_of(node)
    if operation not in KNOWN or not (is_standard(node.domain) or node.domain in (MICROSOFT, OWN)):
        return False
    if set(node.attributes) - KNOWN[operation]:  # of old opsets, say
        return False
    if not _is_of_rows(node) if operation in ROW_WISE else len(node.outputs) != 1:
        return False
    if any(type_name(v) not in DTYPES for v in (*given, node.outputs[0])):
        return False
    variable = [v for v in given if number_of(builder, v) is None]
    shape = dims_of(node.outputs[0])
    if shape is None or all(v.shape is None or len(v.shape) != len(shape) for v in variable):
        return False  # a constant has dimensions that the others have not, and would be missed
    if operation == "SeededDropout":
        return True
    kinds = {v.dtype for v in variable if not is_float(v)}
    if ir.DataType.BOOL in kinds and operation not in FOR_FLAGS:
        return False
    if kinds - {ir.DataType.BOOL} and operation not in FOR_INTEGERS:
        return False
    if operation == "Pow":
        return given[0] in variable and number_of(builder, given[1]) in POWERS
    return operation not in ("Gelu", "FastGelu") or len(given) == 1  # FastGelu may have a bias


def _is_of_rows(node: ir.Node) -> bool:
    """Whether a LayerNormalization is along a last dimension that is short; if it is a gradient, that of the input."""
    shape = dims_of(node.outputs[0])
    if not shape or not isinstance(shape[-1], int) or not 1 < shape[-1] <= LONGEST_ROW:
        return False
    if node.attributes.get_int("axis", -1) not in (-1, len(shape) - 1):
        return False
    if node.outputs[0].dtype == ir.DataType.DOUBLE:  # whose statistics may be float32
        return False
    return node.op_type == "LayerNormalization" or len(node.outputs) == 1


def is_fusible(builder: Builder, node: ir.Node) -> bool:
    """Whether it is element-wise, and its shape is known, by numbers or names, and not that of a few numbers."""
    if not is_elementwise(builder, node):
        return False
    shape = dims_of(node.outputs[0])
    if shape is None or None in shape or len(shape) == 0:
        return False
    least = FEW if is_float(node.outputs[0]) else FEW_INTEGERS
    return any(isinstance(d, str) for d in shape) or math.prod(shape) >= least  # type: ignore[arg-type]


def widens(node: ir.Node) -> bool:
    """Whether it casts a half type to float32."""
    if node.op_type != "Cast" or node.outputs[0].dtype != ir.DataType.FLOAT:
        return False
    return any(v.dtype in HALF_TYPES for v in inputs_of(node))


def narrows(node: ir.Node) -> bool:
    """Whether it casts float32 to a half type."""
    if node.op_type != "Cast" or node.outputs[0].dtype not in HALF_TYPES:
        return False
    return all(v.dtype == ir.DataType.FLOAT for v in inputs_of(node))


def inputs_of(node: ir.Node) -> list[ir.Value]:
    return [v for v in node.inputs if v is not None]


def type_name(value: ir.Value) -> str:
    """As torch calls it."""
    return "" if value.dtype is None else str(value.dtype.numpy())


# What constants are computed with here: exporters write the square root of a constant, rules a number less 1.
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "Cast": lambda x: x, "CastLike": lambda x, _: x, "Identity": lambda x: x, "Sqrt": np.sqrt, "Neg": np.negative,
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide,
}  # fmt: skip


def number_of(builder: Builder, value: ir.Value) -> Any:
    """Of a constant that is a single number, or computed from such."""
    shape, node = dims_of(value), value.producer()
    if shape is None or any(d != 1 for d in shape):
        return None
    constant = builder.constant_of(value)
    if constant is not None:
        return constant.item()
    if node is None or node.op_type not in ARITHMETIC or not is_standard(node.domain) or not is_float(value):
        return None
    given = [number_of(builder, v) for v in inputs_of(node)]
    if node.op_type == "CastLike":
        given[1] = 0  # whose number does not matter
    if None in given:
        return None
    assert value.dtype is not None
    dtype = value.dtype.numpy()
    with np.errstate(all="ignore"):
        result = ARITHMETIC[node.op_type](*(np.asarray(x, dtype) for x in given))
    return np.asarray(result, dtype).item()
