"""FakeQuant of onnxruntime-training: the gradient passes as if nothing was rounded, where nothing was cut off."""

from typing import Any

import onnx
from onnx import defs, helper

from onnxgrad.domains import MICROSOFT
from onnxgrad.rules import nondiff, op, vjp

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
