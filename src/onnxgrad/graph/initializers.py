"""Initializers: new ones, and other numbers for those that are there."""

import onnx_ir as ir

from onnxgrad.tensor_types import Array


def add_initializer(graph: ir.Graph, name: str, numbers: Array, dtype: ir.DataType) -> ir.Value:
    """A new one of a name that is free, with the numbers in this type."""
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(numbers.shape))
    value.const_value = tensor_of(numbers, dtype, name)
    graph.register_initializer(value)
    return value


def copy_initializer(graph: ir.Graph, value: ir.Value, name: str) -> ir.Value:
    """Another one of the same numbers."""
    copy = ir.Value(name=name, type=value.type, shape=value.shape, const_value=value.const_value)
    graph.register_initializer(copy)
    return copy


def set_numbers(value: ir.Value, numbers: Array) -> None:
    """Gives one other numbers of the same type, maybe of another shape."""
    dtype = value.dtype if value.const_value is None else value.const_value.dtype
    assert dtype is not None
    value.const_value = tensor_of(numbers, dtype, value.name)


def tensor_of(numbers: Array, dtype: ir.DataType, name: str | None = None) -> ir.Tensor[Array]:
    """The numbers in a type."""
    return ir.Tensor(numbers.astype(dtype.numpy(), order="C", copy=False), dtype=dtype, name=name)
