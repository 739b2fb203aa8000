"""Schemas of forward operators of com.microsoft, for onnx, which does not know them; onnxruntime has their kernels.

Exporters and onnxruntime's own optimizer write them. Without a schema, shape inference would stop at them.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.defs import OpSchema
from onnx.reference.op_run import OpRun

from onnxgrad.domains import MICROSOFT

FLOATS = ["tensor(float16)", "tensor(float)", "tensor(double)", "tensor(bfloat16)"]
OPTION = OpSchema.FormalParameterOption
_DEFINITIONS: dict[str, functools.partial[Any]] = {}


def contrib(
    name: str,
    inputs: Sequence[str],
    output: str,
    definition: Callable[..., Any],
    infer: Callable[[Any], None],
    attributes: dict[str, Any] | None = None,
) -> None:
    """Registers an operator of one type and one output; `?` after an input's name makes it optional."""
    schema = OpSchema(
        name,
        MICROSOFT,
        1,
        definition.__doc__ or "",
        inputs=[
            OpSchema.FormalParameter(
                i.removesuffix("?"), "T", param_option=OPTION.Optional if i.endswith("?") else OPTION.Single
            )
            for i in inputs
        ],
        outputs=[OpSchema.FormalParameter(output, "T")],
        type_constraints=[("T", FLOATS, "")],
        attributes=[OpSchema.Attribute(k, onnx.helper.make_attribute(k, v)) for k, v in (attributes or {}).items()],
    )
    schema.set_type_and_shape_inference_function(infer)
    _DEFINITIONS[name] = functools.partial(definition, **(attributes or {}))
    if not onnx.defs.has(name, MICROSOFT):  # a schema that is registered already stays
        onnx.defs.register_schema(schema)


def contrib_ops() -> list[type[OpRun]]:
    """The operators as classes for onnx.reference."""

    def run(self: Any, *inputs: Any, **attributes: Any) -> tuple[Any]:
        definition = _DEFINITIONS[type(self).__name__]
        # onnx.reference also hands over attributes of an operator of its own that has the same name.
        given = {k: v for k, v in attributes.items() if k in definition.keywords and v is not None}
        return (definition(*inputs, **given).astype(inputs[0].dtype),)

    return [type(name, (OpRun,), {"op_domain": MICROSOFT, "_run": run}) for name in _DEFINITIONS]


def _same_shape(context: Any) -> None:
    """The output is like the first input."""
    if context.get_input_type(0) is not None:
        context.set_output_type(0, context.get_input_type(0))


def _product_shape(context: Any) -> None:
    types = [context.get_input_type(k) for k in (0, 1)]
    if types[0] is None:
        return
    result = onnx.TypeProto()
    result.tensor_type.elem_type = types[0].tensor_type.elem_type
    if all(t is not None and t.tensor_type.HasField("shape") for t in types):
        node = onnx.helper.make_node("MatMul", ["A", "B"], ["Y"])
        flags = {name: context.get_attribute(name) for name in ("transA", "transB", "transBatchA", "transBatchB")}
        on = {name: proto is not None and bool(proto.i) for name, proto in flags.items()}
        moved = {}
        for side, kind in zip("AB", types, strict=True):
            dims = list(kind.tensor_type.shape.dim)
            order = matrix_axes(len(dims), on[f"trans{side}"], on[f"transBatch{side}"])
            moved[side] = onnx.TypeProto()
            moved[side].tensor_type.elem_type = result.tensor_type.elem_type
            moved[side].tensor_type.shape.dim.extend(dims[k] for k in order)
        schema = onnx.defs.get_schema("MatMul")
        result = onnx.shape_inference.infer_node_outputs(schema, node, moved).get("Y", result)
    context.set_output_type(0, result)


def matrix_axes(rank: int, trans: bool, trans_batch: bool) -> list[int]:
    """The order of axes that FusedMatMul brings an input into: the first one next to the last, then the last two."""
    axes = list(range(rank))
    if trans_batch and rank > 2:
        axes = [*axes[1:-1], 0, axes[-1]]
    return [*axes[:-2], axes[-1], axes[-2]] if trans and rank > 1 else axes


def gelu(X: Any) -> Any:
    """X · Φ(X), with Φ the normal distribution."""
    return X * 0.5 * (1 + np.vectorize(math.erf, otypes=[np.float64])(X * math.sqrt(0.5)))


def _bias_gelu(A: Any, B: Any) -> Any:
    """Gelu(A + B)"""
    return gelu(A + B)


def fast_gelu(X: Any, bias: Any = None) -> Any:
    """Gelu(X + bias), with tanh in place of the normal distribution."""
    x = X if bias is None else X + bias
    return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _quick_gelu(X: Any, alpha: float) -> Any:
    """X · sigmoid(alpha · X)"""
    return X * 0.5 * (1 + np.tanh(X * (0.5 * alpha)))


def _fused_matmul(A: Any, B: Any, alpha: float, transA: int, transB: int, transBatchA: int, transBatchB: int) -> Any:
    """alpha · A @ B, with A and B transposed before."""
    left = A.transpose(matrix_axes(A.ndim, bool(transA), bool(transBatchA)))
    right = B.transpose(matrix_axes(B.ndim, bool(transB), bool(transBatchB)))
    return np.asarray(np.matmul(left, right) * alpha)


contrib("Gelu", ["X"], "Y", gelu, _same_shape)
contrib("BiasGelu", ["A", "B"], "C", _bias_gelu, _same_shape)
contrib("FastGelu", ["X", "bias?"], "Y", fast_gelu, _same_shape)
contrib("QuickGelu", ["X"], "Y", _quick_gelu, _same_shape, {"alpha": 1.702})
contrib(
    "FusedMatMul",
    ["A", "B"],
    "Y",
    _fused_matmul,
    _product_shape,
    {"alpha": 1.0, "transA": 0, "transB": 0, "transBatchA": 0, "transBatchB": 0},
)
