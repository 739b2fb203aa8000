"""FakeQuant and its gradient, and activations that are kept in a smaller type meanwhile."""

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.builder import builder_at_work, op
from onnxgrad.graph.tensor import Tensor
from onnxgrad.passes.expand_training.registry import expands, scalar

BOOL, INT64, UINT8 = ir.DataType.BOOL, ir.DataType.INT64, ir.DataType.UINT8


@expands("FakeQuant")
def _fake_quant(
    input: Tensor, scale: Tensor, zero_point: Tensor, *, quant_min: int = 0, quant_max: int = 255
) -> list[Tensor]:
    step, zero = scalar(scale), op.CastLike(op.Cast(scalar(zero_point), to=INT64.value), input)
    quantized = op.Round(input / step) + zero
    inside = (quantized >= quant_min) & (quantized <= quant_max)
    return [(op.Clip(quantized, quant_min, quant_max) - zero) * step, inside]


@expands("FakeQuantGrad")
def _fake_quant_grad(dY: Tensor, gradient_mask: Tensor) -> Tensor:
    return op.Where(gradient_mask, dY, 0)  # type: ignore[no-any-return]


@expands("GistBinarizeEncoder")
def _positive(X: Tensor) -> Tensor:
    return X > 0


@expands("GistBinarizeDecoder", "GistPack16Decoder")
def _decoded(X: Tensor, *, to: int) -> Tensor:
    return op.Cast(X, to=to)  # type: ignore[no-any-return]


@expands("GistPack16Encoder")
def _halved(X: Tensor) -> Tensor:
    return op.Cast(X, to=ir.DataType.FLOAT16.value)  # type: ignore[no-any-return]


def _bits(dtype: ir.DataType) -> Tensor:
    """The first of eight is the highest."""
    return builder_at_work().constant(2 ** np.arange(7, -1, -1), dtype)


@expands("GistPack1Encoder")
def _packed(X: Tensor) -> Tensor:
    bits = op.Reshape(op.Cast(X if X.dtype == BOOL else X > 0, to=INT64.value), [-1])
    rows = op.Reshape(op.Pad(bits, op.Concat([0], op.Mod(-op.Shape(bits), [8]), axis=0)), [-1, 8])
    return op.Cast(op.ReduceSum(rows * _bits(INT64), [1], keepdims=0), to=UINT8.value)  # type: ignore[no-any-return]


@expands("GistPack1Decoder")
def _unpacked(X: Tensor, *, to: int) -> Tensor:
    wide = op.Cast(op.Unsqueeze(X, [1]), to=INT64.value)
    bits = op.Mod(wide / _bits(INT64), 2)
    return op.Cast(op.Reshape(bits, [-1]), to=to)  # type: ignore[no-any-return]
