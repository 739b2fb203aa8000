"""Normalizations for onnx.reference, whose own are wrong, know float32 only, or are not there."""

from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

from onnxgrad.schema import MICROSOFT


class LpNormalization(OpRun):
    """onnx.reference sums what may be negative."""

    op_domain = ""

    def _run(self, x: Any, axis: int = -1, p: int = 2) -> tuple[Any]:
        norm = np.sum(np.abs(x) ** p, axis=axis, keepdims=True) ** (1 / p)
        return (np.divide(x, norm, out=np.zeros_like(x), where=norm != 0),)


class LRN(OpRun):
    """onnx.reference fills as many channels as there are samples."""

    op_domain = ""

    def _run(self, x: Any, alpha: float, beta: float, bias: float, size: int) -> tuple[Any]:
        before = (size - 1) // 2
        around = np.pad(x * x, [(0, 0), (before, size - 1 - before), *[(0, 0)] * (x.ndim - 2)])
        total = sum(around[:, k : k + x.shape[1]] for k in range(size))
        return (x / (bias + alpha / size * total) ** beta,)


class MeanVarianceNormalization(OpRun):
    """onnx.reference has it as a function of float32."""

    op_domain = ""

    def _run(self, x: Any, axes: Any = (0, 2, 3)) -> tuple[Any]:
        axes = tuple(axes)
        return ((x - x.mean(axes, keepdims=True)) / (x.std(axes, keepdims=True) + 1e-9),)


def _layer(x: Any, scale: Any, epsilon: float, axes: tuple[int, ...], mean: Any = 0.0) -> tuple[Any, Any]:
    inv = 1 / np.sqrt(np.mean((x - mean) ** 2, axes, keepdims=True) + epsilon)
    return (x - mean) * inv * scale, inv


class SimplifiedLayerNormalization(OpRun):
    """An operator of onnxruntime."""

    op_domain = ""

    def _run(self, x: Any, scale: Any, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> tuple[Any, ...]:
        results = _layer(x, scale, epsilon, tuple(range(axis % x.ndim, x.ndim)))
        return results[: len(self.onnx_node.output)]


class SkipLayerNormalization(OpRun):
    """An operator of onnxruntime."""

    op_domain = MICROSOFT

    def _run(
        self, x: Any, skip: Any, gamma: Any, beta: Any = None, bias: Any = None, epsilon: float = 1e-5
    ) -> tuple[Any, ...]:
        total = x + skip + (0 if bias is None else bias)
        mean = total.mean(-1, keepdims=True)
        y, inv = _layer(total, gamma, epsilon, (-1,), mean)
        return (y + (0 if beta is None else beta), mean, inv, total)[: len(self.onnx_node.output)]


class SkipSimplifiedLayerNormalization(OpRun):
    """An operator of onnxruntime."""

    op_domain = MICROSOFT

    def _run(self, x: Any, skip: Any, gamma: Any, bias: Any = None, epsilon: float = 1e-5) -> tuple[Any, ...]:
        total = x + skip + (0 if bias is None else bias)
        y, inv = _layer(total, gamma, epsilon, (-1,))
        return (y, np.zeros_like(inv), inv, total)[: len(self.onnx_node.output)]


NORMALIZATIONS = [
    LpNormalization,
    LRN,
    MeanVarianceNormalization,
    SimplifiedLayerNormalization,
    SkipLayerNormalization,
    SkipSimplifiedLayerNormalization,
]
