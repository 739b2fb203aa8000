"""Dropout after a sum or a Softmax, and with 32 truth values in each number of its mask."""

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.builder import builder_at_work, op
from onnxgrad.graph.tensor import Tensor
from onnxgrad.passes.expand_training.registry import expands
from onnxgrad.passes.expand_training.softmax import flat_softmax, softmax_gradient

BOOL, INT64, UINT32 = ir.DataType.BOOL, ir.DataType.INT64, ir.DataType.UINT32
WIDTH = 32  # bits in an element of a mask


def _dropout(
    data: Tensor, ratio: Tensor | None, training_mode: Tensor | None, seed: int | None
) -> tuple[Tensor, Tensor]:
    dropped: tuple[Tensor, Tensor] = op.Dropout(data, ratio, training_mode, seed=seed, outputs=2)
    return dropped


def _packed(mask: Tensor) -> Tensor:
    """Each bit is an element, the first one the lowest; the last number is filled up with zeros."""
    bits = op.Reshape(op.Cast(mask, to=INT64.value), [-1])
    missing = op.Mod(-op.Shape(bits), [WIDTH])
    rows = op.Reshape(op.Pad(bits, op.Concat([0], missing, axis=0)), [-1, WIDTH])
    return op.Cast(op.ReduceSum(rows * _powers(INT64), [1], keepdims=0), to=UINT32.value)  # type: ignore[no-any-return]


def _unpacked(mask: Tensor, like: Tensor) -> Tensor:
    bits = op.Mod(op.Unsqueeze(op.Reshape(mask, [-1]), [1]) / _powers(UINT32), builder_at_work().constant(2, UINT32))
    shape = op.Shape(like)
    size = op.ReduceProd(op.Concat([1], shape, axis=0), keepdims=1)
    chosen = op.Slice(op.Reshape(op.Cast(bits, to=BOOL.value), [-1]), [0], size, [0])
    return op.Reshape(chosen, shape, allowzero=1)  # type: ignore[no-any-return]


def _powers(dtype: ir.DataType) -> Tensor:
    return builder_at_work().constant(2 ** np.arange(WIDTH), dtype)


@expands("BitmaskDropout")
def _bitmask_dropout(
    data: Tensor, ratio: Tensor | None = None, training_mode: Tensor | None = None, *, seed: int | None = None
) -> list[Tensor]:
    output, mask = _dropout(data, ratio, training_mode, seed)
    return [output, _packed(mask)]


@expands("BitmaskDropoutGrad")
def _bitmask_dropout_grad(
    dy: Tensor, mask: Tensor, ratio: Tensor | None = None, training_mode: Tensor | None = None
) -> Tensor:
    # As in onnxruntime-training, whose kernel does not look at training_mode.
    return op.DropoutGrad(dy, _unpacked(mask, dy), ratio, _training())  # type: ignore[no-any-return]


def _training() -> Tensor:
    return builder_at_work().constant(True, BOOL)


@expands("BiasDropout")
def _bias_dropout(
    data: Tensor, bias: Tensor, residual: Tensor | None = None, ratio: Tensor | None = None,
    training_mode: Tensor | None = None, *, seed: int | None = None,
) -> list[Tensor]:  # fmt: skip
    output, mask = _dropout(data + bias, ratio, training_mode, seed)
    return [output if residual is None else output + residual, mask]


@expands("BitmaskBiasDropout")
def _bitmask_bias_dropout(
    data: Tensor, bias: Tensor, residual: Tensor | None = None, ratio: Tensor | None = None,
    training_mode: Tensor | None = None, *, seed: int | None = None,
) -> list[Tensor]:  # fmt: skip
    output, mask = _bias_dropout(data, bias, residual, ratio, training_mode, seed=seed)
    return [output, _packed(mask)]


@expands("BiasSoftmaxDropout")
def _bias_softmax_dropout(
    data: Tensor, bias: Tensor, ratio: Tensor | None = None, *, axis: int = 1, seed: int | None = None
) -> list[Tensor]:
    softmax = flat_softmax("Softmax", data + bias, axis)
    return [*_dropout(softmax, ratio, _training(), seed), softmax]


@expands("SoftmaxDropoutGrad")
def _softmax_dropout_grad(
    dy: Tensor, mask: Tensor, softmax_y: Tensor, ratio: Tensor | None = None, *, axis: int
) -> Tensor:
    return softmax_gradient("SoftmaxGrad_13", op.DropoutGrad(dy, mask, ratio, _training()), softmax_y, axis)
