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
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from onnxgrad.schema import MICROSOFT

FLOATS = ["tensor(float16)", "tensor(float)", "tensor(double)", "tensor(bfloat16)"]
OPTION = OpSchema.FormalParameterOption
TYPE = OpSchema.AttrType
CONV = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")  # attributes of Conv
_DEFINITIONS: dict[str, functools.partial[Any]] = {}


def contrib(
    name: str,
    inputs: Sequence[str],
    output: str,
    definition: Callable[..., Any],
    infer: Callable[[Any], None],
    attributes: dict[str, Any] | None = None,
    types: dict[str, list[str]] | None = None,
) -> None:
    """Registers an operator of one type and one output; `?` after an input's name makes it optional.

    `attributes` are defaults, or the type of an attribute that has none; `types` those of inputs that have others.
    """
    given, others = attributes or {}, types or {}
    typed = {k: v for k, v in given.items() if isinstance(v, OpSchema.AttrType)}
    defaults = {k: v for k, v in given.items() if k not in typed}
    schema = OpSchema(
        name,
        MICROSOFT,
        1,
        definition.__doc__ or "",
        inputs=[
            OpSchema.FormalParameter(
                (input_name := i.removesuffix("?")),
                f"T_{input_name}" if input_name in others else "T",
                param_option=OPTION.Optional if i.endswith("?") else OPTION.Single,
            )
            for i in inputs
        ],
        outputs=[OpSchema.FormalParameter(output, "T")],
        type_constraints=[("T", FLOATS, ""), *((f"T_{i}", allowed, "") for i, allowed in others.items())],
        attributes=[
            *(OpSchema.Attribute(k, onnx.helper.make_attribute(k, v)) for k, v in defaults.items()),
            *(OpSchema.Attribute(k, v, required=False) for k, v in typed.items()),
        ],
    )
    schema.set_type_and_shape_inference_function(infer)
    _DEFINITIONS[name] = functools.partial(definition, **defaults, **dict.fromkeys(typed))
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


def _standard_shape(op_type: str, *names: str) -> Callable[[Any], None]:
    """The output is as that of ONNX's operator with these attributes, which only reads the first two inputs' shapes."""

    def infer(context: Any) -> None:
        types = {f"input_{k}": context.get_input_type(k) for k in (0, 1)}
        if any(t is None for t in types.values()):
            return
        node = onnx.helper.make_node(op_type, [*types], ["Y"])
        node.attribute.extend(a for a in map(context.get_attribute, names) if a is not None)
        inferred = onnx.shape_inference.infer_node_outputs(onnx.defs.get_schema(op_type), node, types)
        context.set_output_type(0, inferred.get("Y", onnx.TypeProto()))

    return infer


def _standard(op_type: str, *inputs: Any, **attributes: Any) -> Any:
    """The result of ONNX's operator."""
    names = ["" if x is None else f"input_{k}" for k, x in enumerate(inputs)]
    given = {k: v for k, v in attributes.items() if v is not None}
    node = onnx.helper.make_node(op_type, names, ["Y"], **given)
    (result,) = ReferenceEvaluator(node).run(None, dict(zip(names, inputs, strict=True)))
    return result


def activation_of_gemm(activation: str | None, **parameters: float | None) -> tuple[str, list[float], dict[str, float]]:
    """An activation of FusedGemm as an operator of ONNX, its further inputs and its attributes."""
    return activation or "Identity", [], {k: v for k, v in parameters.items() if v is not None}


def activation_of_conv(
    activation: str | None, parameters: Sequence[float] | None
) -> tuple[str, list[float], dict[str, float]]:
    """An activation of FusedConv as an operator of ONNX, its further inputs and its attributes."""
    if activation == "Clip":
        return "Clip", list(parameters or ()), {}
    return activation or "Identity", [], dict(zip(("alpha", "beta"), parameters or (), strict=False))


def _activated(x: Any, how: tuple[str, list[float], dict[str, float]]) -> Any:
    op_type, inputs, attributes = how
    return _standard(op_type, x, *(np.asarray(i, x.dtype) for i in inputs), **attributes)


def _fused_gemm(
    A: Any, B: Any, C: Any = None, *, activation: str | None, activation_alpha: float | None,
    activation_beta: float | None, activation_gamma: float | None, **attributes: Any,
) -> Any:  # fmt: skip
    """activation(Gemm(A, B, C))"""
    how = activation_of_gemm(activation, alpha=activation_alpha, beta=activation_beta, gamma=activation_gamma)
    return _activated(_standard("Gemm", A, B, C, **attributes), how)


def _fused_conv(
    X: Any, W: Any, B: Any = None, Z: Any = None, *, activation: str | None, activation_params: Any, **attributes: Any
) -> Any:
    """activation(Conv(X, W, B) + Z)"""
    Y = _standard("Conv", X, W, B, **attributes)
    return _activated(Y if Z is None else Y + Z, activation_of_conv(activation, activation_params))


def _inverse(X: Any) -> Any:
    """The inverse of every matrix."""
    return np.linalg.inv(X)


contrib("Inverse", ["X"], "Y", _inverse, _same_shape)
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
contrib(
    "FusedGemm",
    ["A", "B", "C?"],
    "Y",
    _fused_gemm,
    _standard_shape("Gemm", "transA", "transB"),
    {
        "alpha": 1.0,
        "beta": 1.0,
        "transA": 0,
        "transB": 0,
        "activation": TYPE.STRING,
        "activation_alpha": TYPE.FLOAT,
        "activation_beta": TYPE.FLOAT,
        "activation_gamma": TYPE.FLOAT,
    },
)
contrib(
    "FusedConv",
    ["X", "W", "B?", "Z?"],
    "Y",
    _fused_conv,
    _standard_shape("Conv", *CONV),
    {
        "auto_pad": "NOTSET",
        "group": 1,
        "kernel_shape": TYPE.INTS,
        "dilations": TYPE.INTS,
        "strides": TYPE.INTS,
        "pads": TYPE.INTS,
        "activation": TYPE.STRING,
        "activation_params": TYPE.FLOATS,
    },
)
