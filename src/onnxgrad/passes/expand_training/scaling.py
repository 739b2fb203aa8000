"""Gradients that are added up, scaled, reset or looked through, and nodes that only order others."""

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.builder import builder_at_work, op
from onnxgrad.graph.cast import in_type, wide_type
from onnxgrad.graph.tensor import Tensor
from onnxgrad.passes.expand_training.registry import expands, scalar, where

BOOL, FLOAT, INT32 = ir.DataType.BOOL, ir.DataType.FLOAT, ir.DataType.INT32


def _true() -> Tensor:
    return builder_at_work().constant([True], BOOL)


@expands("InPlaceAccumulator")
def _accumulator(old_sum: Tensor, value: Tensor, update_signal: Tensor | None = None) -> Tensor:
    dtype = wide_type(old_sum)  # onnxruntime adds no bfloat16 on the CPU
    before = in_type(old_sum, dtype)
    return in_type(where(update_signal, before + in_type(value, dtype), before), old_sum.dtype)


@expands("InPlaceAccumulatorV2", in_place={1: 0})
def _accumulator_2(accumulation_buffer: Tensor, value: Tensor, overwrite_flag: Tensor | None = None) -> list[Tensor]:
    dtype = wide_type(accumulation_buffer)
    new = in_type(value, dtype)
    total = in_type(accumulation_buffer, dtype) + new
    total = total if overwrite_flag is None else where(overwrite_flag, new, total)
    return [_true(), in_type(total, accumulation_buffer.dtype)]


@expands("ZeroGradient")
def _zero(old_gradient: Tensor, reset_signal: Tensor) -> Tensor:
    zero = builder_at_work().constant(0, old_gradient.dtype)
    return op.Expand(zero, op.Shape(old_gradient))  # type: ignore[no-any-return]


@expands("Scale")
def _scale(input: Tensor, scale: Tensor, *, scale_down: int = 0) -> Tensor:
    factor = in_type(scalar(scale), FLOAT)
    return input * in_type(op.Reciprocal(factor) if scale_down else factor, input.dtype)


@expands("MixedPrecisionScale")
def _mixed_precision_scale(S: Tensor, *X: Tensor, to: int, fuse_outputs: int = 0) -> list[Tensor]:
    dtype, factor = wide_type(*X), scalar(S)
    scaled = [in_type(in_type(x, dtype) * in_type(factor, dtype), ir.DataType(to)) for x in X]
    return [op.Concat(*(op.Reshape(x, [-1]) for x in scaled), axis=0)] if fuse_outputs else scaled


@expands("ScaledSum")
def _scaled_sum(
    input_0: Tensor, input_1: Tensor, input_2: Tensor | None = None, *, scale_0: float, scale_1: float,
    scale_2: float | None = None,
) -> Tensor:  # fmt: skip
    total = input_0 * scale_0 + input_1 * scale_1
    if input_2 is None:
        return total
    if scale_2 is None:
        raise ValueError("it has three inputs and no attribute scale_2")
    return total + input_2 * scale_2


@expands("BatchScale")
def _batch_scale(input: Tensor, *, scale_0: float, scale_1: float, scale_2: float | None = None) -> list[Tensor]:
    return [input * factor for factor in (scale_0, scale_1, scale_2) if factor is not None]


@expands("ReduceAllL2")
def _norm(*X: Tensor, node: ir.Node) -> Tensor:
    squares = [op.ReduceSumSquare(in_type(x, wide_type(x)), keepdims=0) for x in X]
    total: Tensor = op.Sqrt(op.Sum(*squares))
    return in_type(total, node.outputs[0].dtype or X[0].dtype)


def _is_bad(x: Tensor, isinf_only: int = 0, isnan_only: int = 0) -> Tensor:
    wide = in_type(x, wide_type(x))
    if isnan_only:
        return op.IsNaN(wide)  # type: ignore[no-any-return]
    return op.IsInf(wide) if isinf_only else op.IsInf(wide) | op.IsNaN(wide)  # type: ignore[no-any-return]


def _none(bad: Tensor) -> Tensor:
    """Whether none is true; of nothing, too."""
    counted = op.Reshape(op.Cast(bad, to=INT32.value), [-1])
    counted = op.Concat(counted, np.zeros(1, np.int32), axis=0)  # CUDA adds up nothing that is empty
    return op.ReduceSum(counted, keepdims=0).equals(0)  # type: ignore[no-any-return]


@expands("IsFinite")
def _is_finite(X: Tensor) -> Tensor:
    return ~_is_bad(X)


@expands("IsAllFinite")
def _is_all_finite(*input: Tensor, isinf_only: int = 0, isnan_only: int = 0) -> Tensor:
    if isinf_only and isnan_only:
        raise ValueError("isinf_only and isnan_only are both set, expected one of them or none")
    flags = [_none(_is_bad(x, isinf_only, isnan_only)) for x in input]
    result = flags[0]
    for flag in flags[1:]:
        result = result & flag
    return result


@expands("All")
def _all(X: Tensor) -> Tensor:
    return op.Reshape(_none(~X), [1])  # type: ignore[no-any-return]


@expands("Group")
def _group(*input_tensors: Tensor) -> Tensor:
    return _true()


@expands("PassThrough")
def _pass_through(*inputs: Tensor) -> list[Tensor]:
    return list(inputs)
