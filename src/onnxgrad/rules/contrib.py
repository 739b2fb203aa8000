"""Forward operators of com.microsoft that onnxruntime's optimizer and exporters write (contrib_schemas.py)."""

import onnx_ir as ir

from onnxgrad.graph.broadcast import sum_to_shape
from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import by_rewriting, op, vjp
from onnxgrad.rules.contrib_schemas import CONV, activation_of_conv, activation_of_gemm, matrix_axes
from onnxgrad.rules.matrix import product_left, product_right
from onnxgrad.schema import MICROSOFT


def _axes(n: NodeView) -> tuple[list[int], list[int]]:
    return (
        matrix_axes(n.A.rank, bool(n.transA), bool(n.transBatchA)),
        matrix_axes(n.B.rank, bool(n.transB), bool(n.transBatchB)),
    )


def _fused_left(g: Tensor, n: NodeView) -> Tensor:
    a_axes, b_axes = _axes(n)
    A, B = reordered(n.A, a_axes), reordered(n.B, b_axes)
    return reordered(sum_to_shape(product_left(g * n.alpha, A, B), A), _inverse(a_axes))


def _fused_right(g: Tensor, n: NodeView) -> Tensor:
    a_axes, b_axes = _axes(n)
    A, B = reordered(n.A, a_axes), reordered(n.B, b_axes)
    return reordered(sum_to_shape(product_right(g * n.alpha, A, B), B), _inverse(b_axes))


def reordered(x: Tensor, axes: list[int]) -> Tensor:
    """Transposed, unless nothing moves."""
    return x if axes == sorted(axes) else op.Transpose(x, perm=axes)


def _inverse(axes: list[int]) -> list[int]:
    return [axes.index(k) for k in range(len(axes))]


vjp("FusedMatMul", domain=MICROSOFT, A=_fused_left, B=_fused_right)


def _inverse_matrix(g: Tensor, n: NodeView) -> Tensor:
    transposed = reordered(n.Y, matrix_axes(n.Y.rank, True, False))
    return -(transposed @ g @ transposed)


vjp("Inverse", domain=MICROSOFT, X=_inverse_matrix)


def _activated(x: Tensor, how: tuple[str, list[float], dict[str, float]]) -> list[Tensor]:
    op_type, inputs, attributes = how
    return [x if op_type == "Identity" else getattr(op, op_type)(x, *inputs, **attributes)]


def _gemm_and_activation(n: NodeView) -> list[Tensor]:
    Y = op.Gemm(n.A, n.B, n.C, alpha=n.alpha, beta=n.beta, transA=n.transA, transB=n.transB)
    how = activation_of_gemm(n.activation, alpha=n.activation_alpha, beta=n.activation_beta, gamma=n.activation_gamma)
    return _activated(Y, how)


def _conv_and_activation(n: NodeView) -> list[Tensor]:
    Y = op.Conv(n.X, n.W, n.B, **{name: getattr(n, name) for name in CONV})
    if Y.shape is None:  # inference may not find it without kernel_shape
        Y.value.shape = ir.Shape([None] * n.X.rank)
    return _activated(Y if n.Z is None else Y + n.Z, activation_of_conv(n.activation, n.activation_params))


# onnxruntime joins the two operators again where it can.
vjp(
    "FusedGemm",
    domain=MICROSOFT,
    rewrite=_gemm_and_activation,
    A=by_rewriting,
    B=by_rewriting,
    C=by_rewriting,
)
vjp(
    "FusedConv",
    domain=MICROSOFT,
    rewrite=_conv_and_activation,
    X=by_rewriting,
    W=by_rewriting,
    B=by_rewriting,
    Z=by_rewriting,
)
