"""Numbers as integers of a few bits, as QuantizeLinear and DequantizeLinear have them: (integer - zero point) · scale.

`axis` and `block_size` say which scale a number has: there is one for all, one for each index along an axis, or, with
a block size, one for so many numbers along it.
"""

from typing import Any

import numpy as np

from onnxgrad.tensor_types import Array

# Products of integers, whose weights no optimizer moves.
OF_INTEGERS = {
    "ConvInteger", "DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat", "QGemm", "QLinearConv",
    "QLinearMatMul",
}  # fmt: skip


def spread(each: Array, shape: tuple[int, ...], axis: int, block_size: int) -> Array:
    """Scales or zero points in a shape that broadcasts to that of the numbers."""
    if each.size == 1:
        return each.reshape(())
    if block_size:
        return np.take(each.repeat(block_size, axis), range(shape[axis]), axis)
    return each.reshape([-1 if k == axis % len(shape) else 1 for k in range(len(shape))])


def ends_of(dtype: Any) -> tuple[int, int]:
    """The smallest and the largest integer of an onnx_ir.DataType."""
    count: int = 2**dtype.bitwidth
    return (-count // 2, count // 2 - 1) if dtype.is_signed() else (0, count - 1)


def quantized(numbers: Array, scale: Array, zero_point: Array, dtype: Any, axis: int, block_size: int) -> Array:
    """Rounded to the nearest integer, half to even, and cut off at the ends of the type."""
    wide = numbers.dtype  # float32 has all integers of 16 bits, float64 those of 32
    each = spread(scale.astype(wide), numbers.shape, axis, block_size)
    levels = np.rint(numbers / each) + spread(zero_point.astype(wide), numbers.shape, axis, block_size)
    found: Array = np.clip(levels, *ends_of(dtype)).astype(np.int32).astype(dtype.numpy())
    return found


def dequantized(integers: Array, scale: Array, zero_point: Array, axis: int, block_size: int) -> Array:
    """The numbers, in the type of the scale."""
    wide = np.float64 if integers.dtype == np.int32 else np.promote_types(scale.dtype, np.float32)
    zero = spread(zero_point.astype(wide), integers.shape, axis, block_size)
    each = spread(scale.astype(wide), integers.shape, axis, block_size)
    found: Array = ((integers.astype(wide) - zero) * each).astype(scale.dtype)
    return found
