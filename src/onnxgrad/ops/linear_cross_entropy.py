"""LinearCrossEntropy: a linear layer and the cross entropy of its results, with their gradients, as one operator."""

import math
from collections.abc import Sequence
from typing import Annotated

import ml_dtypes
import numpy as np

from onnxgrad.op import op
from onnxgrad.ops.softmax_cross_entropy_loss import counted
from onnxgrad.schema import OWN, Dim, Known, agree
from onnxgrad.tensor_types import FLOATS, Array, Index, T, TypeConstraint, accumulator

# Weights, loss and sums over rows may be float32 where the rows are half numbers.
Wide = Annotated[Array, TypeConstraint("T1", FLOATS)]
Shape = tuple[Dim, ...] | None


def _shape_rule(
    X: Known,
    W: Known,
    labels: Known,
    bias: Known | None,
    weights: Known | None,
    scale: Known | None,
    transW: int,
    reduction: str,
    ignore_index: int,
    precision: str,
) -> tuple[Shape, Shape, Shape, Shape]:
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}, expected 'mean' or 'sum'")
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"precision is {precision!r}, expected 'float32' or 'bfloat16'")
    if W.dims is not None and len(W.dims) != 2:
        raise ValueError(f"W has shape {list(W.dims)}, expected two dimensions")
    depth, classes = (None, None) if W.dims is None else W.dims[::-1] if transW else W.dims
    if X.dims is not None:
        if len(X.dims) < 2:
            raise ValueError(f"X has shape {list(X.dims)}, expected at least two dimensions")
        if not agree(X.dims[-1:], (depth,)):
            raise ValueError(f"X has {X.dims[-1]} columns, expected {depth} for W of shape {list(W.dims or ())}")
        rows, given = _size(X.dims[:-1]), _size(labels.dims)
        if not agree((given,), (rows,)):
            raise ValueError(f"labels has {given} elements, expected {rows}, one for each row of X")
    for name, numbers in (("bias", bias), ("weights", weights)):
        if numbers is not None and numbers.dims is not None and not agree(numbers.dims, (classes,)):
            raise ValueError(f"{name} has shape {list(numbers.dims)}, expected {[classes]}, one per class")
    if scale is not None and scale.dims not in (None, (), (1,), (None,)):
        raise ValueError(f"scale has shape {list(scale.dims or ())}, expected a single number")
    return (), X.dims, W.dims, (classes,)


def _size(dims: Shape) -> Dim:
    """How many elements there are, if that is known."""
    if dims is None:
        return None
    numbers = [d for d in dims if isinstance(d, int)]
    return math.prod(numbers) if len(numbers) == len(dims) else None


@op("LinearCrossEntropy", domain=OWN, outputs=("loss", "dX?", "dW?", "dB?"), shape=_shape_rule)
def linear_cross_entropy(
    X: T,
    W: Wide,
    labels: Index,
    bias: Wide | None = None,
    weights: Wide | None = None,
    scale: Wide | None = None,
    *,
    transW: int = 0,
    reduction: str = "mean",
    ignore_index: int = -1,
    precision: str = "float32",
    outputs: Sequence[str] | None = None,
) -> tuple[Wide | None, T | None, Wide | None, Wide | None]:
    """The cross entropy of the logits X · W + bias, and its gradients, without memory for all logits at a time.

    X is rows of numbers, in as many dimensions as they have, with a label for each. W is [numbers, classes] or, with
    `transW`, [classes, numbers], as torch.nn.Linear and embeddings have it. `labels`, `weights`, `ignore_index` and
    `reduction`, "mean" or "sum", are as in SoftmaxCrossEntropyLoss. dX, dW and dB are the gradients of the loss, times
    `scale` where it is given: half numbers lose what is small.

    A few rows at a time are multiplied, replaced by the gradient of their logits, and multiplied again, so that loss
    and gradients take three products, as they do with all logits in memory. W is rounded to the type of X. float16
    and bfloat16 add up in float32, but may round logits and their gradients. With the `precision` bfloat16 what is
    multiplied is rounded to that, which is fast on processors with AVX512-BF16; not float64 and, on a GPU, float16.
    """
    work = accumulator(X.dtype)
    rows, classes = math.prod(X.shape[:-1]), W.shape[0 if transW else 1]
    ignored, chosen, counts = (a.reshape(-1) for a in counted(labels, weights, classes, ignore_index, work))

    def multiplied(a: Array, b: Array) -> Array:
        if precision == "bfloat16" and work == np.float32:
            a, b = (x.astype(ml_dtypes.bfloat16).astype(work) for x in (a, b))
        return a @ b

    x = X.reshape(rows, X.shape[-1]).astype(work)
    w = (W if transW else W.T).astype(X.dtype).astype(work)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # infinite logits make NaN, no classes log(0)
        logits = multiplied(x, w.T)
        if bias is not None:
            logits = logits + bias.astype(work)
        shifted = logits - np.max(logits, 1, keepdims=True, initial=-np.inf)
        powers = np.exp(shifted)
        total = np.sum(powers, 1, keepdims=True)
        right = np.arange(classes) == chosen[:, None]
        log_prob = np.sum(np.where(right, shifted, 0), 1) - np.log(total[:, 0])
        losses = np.where(ignored, work.type(0), -log_prob * counts)
        count = np.sum(counts, dtype=np.float64) if reduction == "mean" else 1
        each = counts / (count or 1) * (1 if scale is None else scale.reshape(()).astype(np.float64))
        gradient = np.where(ignored[:, None], 0, (powers / total - right) * each[:, None]).astype(work)
        found = {
            "loss": (np.sum(losses, dtype=np.float64) / (count or 1)).astype(W.dtype),
            "dX": multiplied(gradient, w).reshape(X.shape).astype(X.dtype),
            "dW": (multiplied(gradient.T, x) if transW else multiplied(x.T, gradient)).astype(W.dtype),
            "dB": np.sum(gradient, 0).astype(W.dtype),
        }
    wanted = (np.asarray(found[name]) if outputs is None or name in outputs else None for name in found)
    return tuple(wanted)  # type: ignore[return-value]
