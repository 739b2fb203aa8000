"""Quantization: the gradient passes straight through, as if nothing was rounded, where nothing was cut off.

Integers have gradients from QuantizeLinear to DequantizeLinear. What these two add to the gradient of one scale is that
of LSQ (Esser et al. 2020): g · (round(x/s) - x/s), and g times the end of the range for what was cut off. It is not
divided by √(elements · end of the range), as the paper does for the learning rate's sake.
"""

from typing import Any

import ml_dtypes
import onnx
import onnx_ir as ir
from onnx import defs, helper

from onnxgrad.graph.broadcast import sum_to_shape
from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import nondiff, op, vjp
from onnxgrad.rules.shape import reshaped_like, size_along
from onnxgrad.schema import MICROSOFT

STRAIGHT_THROUGH = "Straight through: rounding counts for nothing, and what lies outside the range has no gradient."


def _types(context: Any) -> None:
    """The output is like the input, and so is the mask, of truth values."""
    kind = context.get_input_type(0)
    if kind is not None:
        mask = onnx.TypeProto()
        mask.CopyFrom(kind)
        mask.tensor_type.elem_type = onnx.TensorProto.BOOL
        context.set_output_type(0, kind)
        context.set_output_type(1, mask)


def _schema() -> Any:
    parameter = defs.OpSchema.FormalParameter
    schema = defs.OpSchema(
        "FakeQuant",
        MICROSOFT,
        1,
        "Rounds to multiples of scale, and tells where the result is within quant_min and quant_max.",
        inputs=[parameter(name, "T") for name in ("input", "scale", "zero_point")],
        outputs=[parameter("output", "T"), parameter("mask", "B")],
        type_constraints=[("T", ["tensor(float)"], ""), ("B", ["tensor(bool)"], "")],
        attributes=[
            defs.OpSchema.Attribute(name, helper.make_attribute(name, default))
            for name, default in (("quant_min", 0), ("quant_max", 255))
        ],
    )
    schema.set_type_and_shape_inference_function(_types)
    return schema


if not defs.has("FakeQuant", MICROSOFT):  # a schema that is registered already stays
    defs.register_schema(_schema())

vjp(
    "FakeQuant",
    domain=MICROSOFT,
    doc=STRAIGHT_THROUGH,
    input=lambda g, n: op.Where(n.mask, g, 0),
    scale=nondiff,
    zero_point=nondiff,
)


class Spread:
    """A node's scale or zero point for every element; there is one for all, for each index along an axis, or blocks."""

    def __init__(self, n: NodeView, x: Tensor, given: Tensor) -> None:
        self.given = given
        self.block_size = getattr(n, "block_size", 0)  # from opset 21 on; axis from 13 on
        self.axis = getattr(n, "axis", 1) % max(x.rank, 1)
        wide = _wide(given)
        if self.block_size:
            self.block = op.Range(0, op.Squeeze(size_along(x, self.axis), [0]), 1) / self.block_size
            self.each = op.Gather(wide, self.block, axis=self.axis)
        elif given.rank == 0 or x.rank == 1:
            self.each = wide
        else:
            self.each = op.Unsqueeze(wide, [k for k in range(x.rank) if k != self.axis])

    def collected(self, part: Tensor) -> Tensor:
        """The gradient of the scale, which is the sum of those that the elements have for it."""
        if self.block_size:
            total = op.GatherGrad(op.Shape(self.given), self.block, part, axis=self.axis)
        else:
            total = reshaped_like(sum_to_shape(part, self.each), self.given)
        return _like(total, self.given)


def _wide(x: Tensor) -> Tensor:
    """In float32, or in float64."""
    return x if x.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE) else op.Cast(x, to=ir.DataType.FLOAT)


def _like(g: Tensor, x: Tensor) -> Tensor:
    return g if g.dtype == x.dtype else op.Cast(g, to=x.dtype)


def _quantize_input(g: Tensor, n: NodeView) -> Tensor:
    return _like(_within_range(g, n) / Spread(n, n.x, n.y_scale).each, n.x)


def _quantize_scale(g: Tensor, n: NodeView) -> Tensor:
    scale = Spread(n, n.x, n.y_scale)
    return scale.collected(-_within_range(g, n) * _wide(n.x) / (scale.each * scale.each))


def _within_range(g: Tensor, n: NodeView) -> Tensor:
    """The gradient, zero for what was cut off."""
    y, quotient = n.y, _wide(n.x) / Spread(n, n.x, n.y_scale).each
    described: Any = ml_dtypes.finfo if y.is_float else ml_dtypes.iinfo
    limits = described(y.dtype.numpy())
    rounded = quotient if y.is_float else op.Round(quotient)
    if n.y_zero_point is not None:
        rounded = rounded + Spread(n, n.x, n.y_zero_point).each
    return op.Where((rounded < float(limits.min)) | (rounded > float(limits.max)), 0, _wide(g))


def _dequantize_scale(g: Tensor, n: NodeView) -> Tensor:
    ones = op.Expand(n.builder.constant(1, ir.DataType.FLOAT), op.Shape(n.x_scale))
    attributes = {name: getattr(n, name, None) for name in ("axis", "block_size")}
    unscaled = op.DequantizeLinear(n.x, ones, n.x_zero_point, **attributes)
    wide = _wide(g)
    return Spread(n, n.x, n.x_scale).collected(wide * _like(unscaled, wide))


def _dynamic(g: Tensor | None, n: NodeView) -> Tensor:
    """Of the input, and by the scale, (max(x, 0) - min(x, 0)) / 255, of its largest and its smallest element."""
    x, scale, scale_grad = n.x, n.y_scale, n.grad(1)
    largest, smallest = x.equals(op.ReduceMax(x, keepdims=0)) & (x > 0), x.equals(op.ReduceMin(x, keepdims=0)) & (x < 0)
    scale_by_x = (_share(largest, x) - _share(smallest, x)) / 255
    if g is None:
        return scale_by_x * scale_grad
    by_quotient = -op.ReduceSum(g * x, keepdims=0) / (scale * scale)
    return g / scale + scale_by_x * (by_quotient if scale_grad is None else scale_grad + by_quotient)


def _share(where: Tensor, x: Tensor) -> Tensor:
    """Of those that tie."""
    here = op.CastLike(where, x)
    return here / op.Max(op.ReduceSum(here, keepdims=0), 1)


vjp("QuantizeLinear", doc=STRAIGHT_THROUGH, x=_quantize_input, y_scale=_quantize_scale, y_zero_point=nondiff)
vjp(
    "DequantizeLinear",
    doc=STRAIGHT_THROUGH,
    x=lambda g, n: _wide(g) * Spread(n, n.x, n.x_scale).each,
    x_scale=_dequantize_scale,
    x_zero_point=nondiff,
)
vjp("DynamicQuantizeLinear", doc=STRAIGHT_THROUGH, outputs=("y", "y_scale"), x=_dynamic)
