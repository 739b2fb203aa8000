"""Forward operators of com.microsoft that onnxruntime's optimizer and exporters write (contrib_schemas.py)."""

from onnxgrad.domains import MICROSOFT
from onnxgrad.graph.broadcast import sum_to_shape
from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import op, vjp
from onnxgrad.rules.contrib_schemas import matrix_axes
from onnxgrad.rules.matrix import product_left, product_right


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
