"""BatchNormInternal, which tells the statistics of a batch, and the gradient of LayerNormalization by its output."""

import onnx_ir as ir

from onnxgrad.domains import MICROSOFT
from onnxgrad.graph.builder import op
from onnxgrad.graph.cast import in_type, wide_type
from onnxgrad.graph.tensor import Tensor
from onnxgrad.passes.expand_training.registry import expands
from onnxgrad.rules.normalization import inverse_rms


@expands("BatchNormInternal", in_place={1: 3, 2: 4})
def _batch_norm(
    X: Tensor, scale: Tensor, B: Tensor, input_mean: Tensor, input_var: Tensor, *, epsilon: float = 1e-5,
    momentum: float = 0.9, training_mode: int = 1, node: ir.Node,
) -> list[Tensor]:  # fmt: skip
    dtype = wide_type(X, scale, input_mean)
    x, *given = (in_type(t, dtype) for t in (X, scale, B, input_mean, input_var))
    if not training_mode:
        return [in_type(op.BatchNormalization(x, *given, epsilon=epsilon), X.dtype)]
    Y, mean, variance = op.BatchNormalization(x, *given, epsilon=epsilon, momentum=momentum, training_mode=1, outputs=3)
    running = [in_type(mean, input_mean.dtype), in_type(variance, input_var.dtype)]
    _let_gradients_find_statistics(node, epsilon)
    return [in_type(Y, X.dtype), *running, *_statistics(x, epsilon, input_mean, input_var)]


def _statistics(x: Tensor, epsilon: float, mean: Tensor, variance: Tensor) -> list[Tensor]:
    """Mean and inverse deviation of each channel, in the types of the running statistics."""
    axes = [k for k in range(x.rank) if k != 1]
    average = op.ReduceMean(x, axes, keepdims=1)
    inverse = inverse_rms(x - average, axes, epsilon)
    return [in_type(op.Reshape(s, [-1]), v.dtype) for s, v in ((average, mean), (inverse, variance))]


def _let_gradients_find_statistics(node: ir.Node, epsilon: float) -> None:
    """Our BatchNormalizationGrad computes them from X in one go, so that nobody else has to."""
    if len(node.outputs) < 5:
        return
    for user, _ in list(node.outputs[3].uses()):
        if user.op_type != "BatchNormalizationGrad" or user.domain != MICROSOFT:
            continue
        _, X, _, mean, inverse = user.inputs
        if X is node.inputs[0] and mean is node.outputs[3] and inverse is node.outputs[4]:
            user.replace_input_with(3, None)
            user.replace_input_with(4, None)
            user.attributes["epsilon"] = ir.AttrFloat32("epsilon", epsilon)


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
