"""expand_preview: operators of ONNX's preview domains become standard ones, which have gradients.

ONNX itself defines FlexAttention by others, but loses the initializers of its subgraphs on the way. The optimizers are
differentiated by whoever learns how to learn.
"""

import math
from collections.abc import Callable

import onnx_ir as ir

from onnxgrad.graph.builder import builder_at_work, op
from onnxgrad.graph.cast import in_type
from onnxgrad.graph.tensor import Tensor
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.expand_contrib import repeated_heads
from onnxgrad.passes.expand_nodes import Writer, expand_nodes
from onnxgrad.schema import PREVIEW, PREVIEW_TRAINING


def expand_preview(draft: Draft) -> None:
    """Writes other operators in place of those that have a writer here."""
    expand_nodes(draft, WRITERS, lambda node: node.domain in (PREVIEW, PREVIEW_TRAINING) and node.op_type in WRITERS)


def _flex_attention(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    *,
    scale: float | None = None,
    softmax_precision: int | None = None,
    score_mod: ir.Graph | None = None,
    prob_mod: ir.Graph | None = None,
) -> Tensor:
    """The subgraphs change the scores, and what Softmax makes of them."""
    wide = ir.DataType.DOUBLE if Q.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    wide = ir.DataType(softmax_precision) if softmax_precision else wide
    times = op.Div(op.Shape(Q, start=1, end=2), op.Shape(K, start=1, end=2))
    K, V = repeated_heads(K, times), repeated_heads(V, times)
    if scale is None:
        size = op.Shape(Q, start=3)
        factor = 1 / op.Sqrt(op.Sqrt(op.Cast(size, to=Q.dtype.value)))  # on both sides: half types reach far less
    else:
        factor = math.sqrt(scale)
    scores = in_type((Q * factor) @ op.Transpose(K * factor, perm=[0, 1, 3, 2]), wide)
    weights = op.Softmax(_modified(scores, score_mod), axis=-1)
    return in_type(_modified(weights, prob_mod), V.dtype) @ V


def _modified(x: Tensor, graph: ir.Graph | None) -> Tensor:
    """What a subgraph makes of it, which has the same type and shape."""
    if graph is None:
        return x
    (result,) = builder_at_work().inline(graph, [x])
    result.value.type, result.value.shape = x.value.type, x.value.shape
    return result


def _for_each(function: Callable[..., tuple[Tensor, ...]], parts: int, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The results for every tensor, all of one kind after the other, as the inputs are."""
    count = len(inputs) // parts
    results = [function(*inputs[k::count]) for k in range(count)]
    return [x for kind in zip(*results, strict=True) for x in kind]


def _adagrad(
    R: Tensor,
    T: Tensor,
    *inputs: Tensor,
    decay_factor: float = 0.0,
    epsilon: float = 1e-6,
    norm_coefficient: float = 0.0,
) -> list[Tensor]:
    def update(X: Tensor, G: Tensor, H: Tensor) -> tuple[Tensor, ...]:
        G = X * norm_coefficient + G
        H = H + G * G
        return X - rate * G / (op.Sqrt(H) + epsilon), H

    rate = R / (in_type(T, R.dtype) * decay_factor + 1)
    return _for_each(update, 3, inputs)


def _adam(
    R: Tensor,
    T: Tensor,
    *inputs: Tensor,
    alpha: float = 0.9,
    beta: float = 0.999,
    epsilon: float = 1e-6,
    norm_coefficient: float = 0.0,
    norm_coefficient_post: float = 0.0,
) -> list[Tensor]:
    def update(X: Tensor, G: Tensor, V: Tensor, H: Tensor) -> tuple[Tensor, ...]:
        G = X * norm_coefficient + G
        V = V * alpha + G * (1 - alpha)
        H = H * beta + G * G * (1 - beta)
        return (X - rate * V / (op.Sqrt(H) + epsilon)) * (1 - norm_coefficient_post), V, H

    steps = in_type(T, R.dtype)
    kept_of_v, kept_of_h = (op.Pow(builder_at_work().constant(k, R.dtype), steps) for k in (alpha, beta))
    rate = op.Where(T > 0, R * op.Sqrt(1 - kept_of_h) / op.Where(T > 0, 1 - kept_of_v, 1), R)
    return _for_each(update, 4, inputs)


def _momentum(
    R: Tensor, T: Tensor, *inputs: Tensor, alpha: float, beta: float, mode: str, norm_coefficient: float
) -> list[Tensor]:
    def update(X: Tensor, G: Tensor, V: Tensor) -> tuple[Tensor, ...]:
        G = X * norm_coefficient + G
        V = V * alpha + G * new
        return X - R * (G + V * alpha if mode == "nesterov" else V), V

    constant = builder_at_work().constant
    new = op.Where(T > 0, constant(beta, R.dtype), constant(1, R.dtype))
    return _for_each(update, 3, inputs)


WRITERS: dict[str, Writer] = {
    "FlexAttention": _flex_attention,
    "Adagrad": _adagrad,
    "Adam": _adam,
    "Momentum": _momentum,
}
