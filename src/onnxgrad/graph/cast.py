"""Types that formulas compute in: a cast where one is needed."""

import onnx_ir as ir

from onnxgrad.graph.builder import op
from onnxgrad.graph.tensor import Tensor


def in_type(x: Tensor, dtype: ir.DataType) -> Tensor:
    """The numbers in another type, if it is another."""
    return x if x.dtype == dtype else op.Cast(x, to=dtype.value)


def wide_type(*tensors: Tensor) -> ir.DataType:
    """The type to compute statistics in: float32 for half numbers, as the operators themselves do."""
    return ir.DataType.DOUBLE if any(x.dtype == ir.DataType.DOUBLE for x in tensors) else ir.DataType.FLOAT
