"""Gradients of operators that rules/ has a rule for: DivGrad, ConvTransposeGrad, ResizeGrad, and of pools."""

from typing import Any

import onnx_ir as ir

from onnxgrad.graph.builder import op
from onnxgrad.graph.tensor import Tensor
from onnxgrad.passes.expand_training.registry import expands, gradients
from onnxgrad.schema import OWN, is_standard


@expands("DivGrad")
def _div_grad(dY: Tensor, A: Tensor, B: Tensor) -> list[Tensor]:
    return gradients(op.Div(A, B), dY, "A", "B")


@expands("ConvTransposeGrad")
def _conv_transpose_grad(dY: Tensor, X: Tensor, W: Tensor, **attributes: Any) -> list[Tensor]:
    return gradients(op.ConvTranspose(X, W, **attributes), dY, "X", "W", "B")


@expands("ResizeGrad")
def _resize_grad(
    dY: Tensor, X: Tensor, roi: Tensor | None = None, scales: Tensor | None = None, **attributes: Any
) -> list[Tensor]:
    if scales is not None and scales.shape == (0,):
        scales = None
    # Without scales, sizes were given, and the result had them.
    return gradients(op.Resize(X, roi, scales, op.Shape(dY) if scales is None else None, **attributes), dY, "X")


@expands("MaxPoolGrad")
def _max_pool_grad(dY: Tensor, Indices: Tensor, *, node: ir.Node) -> Tensor:
    pool = Indices.value.producer()
    if pool is not None and pool.op_type == "MaxPool" and is_standard(pool.domain) and pool.outputs[1] is Indices.value:
        # Its input says where the maxima are, and onnxruntime is ten times as fast if it need not tell.
        (dX,) = gradients(dY.builder.tensor(pool.outputs[0]), dY, "X")
        if all(user is node for user, _ in Indices.value.uses()) and not Indices.value.is_graph_output():
            node.replace_input_with(1, None)
            if not Indices.value.uses():
                pool.resize_outputs(1)
        return dX
    shape = _declared_shape(node, dY)
    size = op.ReduceProd(shape, keepdims=1)
    dX = op.GatherElementsGrad(op.Reshape(dY, [-1]), size, op.Reshape(Indices, [-1]), axis=0)
    return op.Reshape(dX, shape)  # type: ignore[no-any-return]


@expands("AveragePoolGrad")
def _average_pool_grad(dY: Tensor, *, node: ir.Node, **attributes: Any) -> Tensor:
    return op.AveragePoolGrad(dY, _declared_shape(node, dY), domain=OWN, **attributes)  # type: ignore[no-any-return]


def _declared_shape(node: ir.Node, dY: Tensor) -> Tensor:
    """The shape of the gradient, which nothing but the graph's value_info knows; the batch may be of any size."""
    dims = dY.builder.tensor(node.outputs[0]).shape
    if dims is None or not all(isinstance(d, int) for d in dims[1:]):
        raise ValueError(
            f"the shape of {node.outputs[0].name!r} is not known: declare it in the model's value_info, where the "
            "batch may stay unknown"
        )
    return op.Concat(op.Shape(dY, end=1), list(dims[1:]), axis=0)  # type: ignore[no-any-return]
