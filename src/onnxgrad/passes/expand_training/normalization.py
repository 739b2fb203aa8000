"""The gradient of LayerNormalization by its output."""

from onnxgrad.graph.builder import op
from onnxgrad.graph.cast import in_type, wide_type
from onnxgrad.graph.tensor import Tensor
from onnxgrad.passes.expand_training.registry import IN_PLACE, expands

IN_PLACE["BatchNormInternal"] = {1: 3, 2: 4}  # which has a kernel


@expands("InvertibleLayerNormalizationGrad")
def _layer_norm_by_output(
    Y_grad: Tensor, Y: Tensor, scale: Tensor, bias: Tensor, inv_std_var: Tensor, *, axis: int = -1
) -> list[Tensor]:
    dtype = wide_type(Y)
    standardized = (in_type(Y, dtype) - in_type(bias, dtype)) / in_type(scale, dtype)
    inverse = in_type(inv_std_var, dtype)
    centred = standardized / inverse  # X, but for its mean
    parts = op.LayerNormalizationGrad(
        in_type(Y_grad, dtype), centred, in_type(scale, dtype), inverse - inverse, inverse, axis=axis, outputs=3
    )
    return [in_type(part, Y.dtype) for part in parts]
