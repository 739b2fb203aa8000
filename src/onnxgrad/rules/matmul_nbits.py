"""MatMulNBits: a product with weights of a few bits, in blocks that have a scale each.

Its weights stay as they are; the gradient reaches what is multiplied with them, the scales, zero points that are
floating-point numbers, and the bias.
"""

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.graph.broadcast import sum_to_shape
from onnxgrad.graph.cast import in_type
from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import nondiff, op, vjp
from onnxgrad.rules.contrib_schemas import FLOATS, TYPE, contrib
from onnxgrad.schema import MICROSOFT


def _definition(
    A: Any, B: Any, scales: Any, zero_points: Any = None, g_idx: Any = None, bias: Any = None,
    *, K: int, N: int, bits: int, block_size: int, **_: Any,
) -> Any:  # fmt: skip
    """A @ Wᵀ + bias, with W = (B - zero_points) · scales, block by block."""

    def unpacked(packed: Any) -> Any:
        parts = packed[..., None] >> np.arange(0, 8, bits, dtype=np.uint8) & (2**bits - 1)
        return parts.reshape(N, -1).astype(np.float64)

    scale = scales.reshape(N, -1)
    if zero_points is None:
        zero = np.full_like(scale, 2 ** (bits - 1))
    else:
        zero = zero_points.reshape(N, -1)
        zero = (unpacked(zero) if zero.dtype == np.uint8 else zero)[:, : scale.shape[1]]
    block = np.arange(K) // block_size if g_idx is None else g_idx
    W = (unpacked(B)[:, :K] - zero[:, block]) * scale[:, block]
    return A @ W.T + (0 if bias is None else bias)


def _infer(context: Any) -> None:
    """The shape of A, with N for its last dimension."""
    given, columns = context.get_input_type(0), context.get_attribute("N")
    if given is None or columns is None:
        return
    result = onnx.TypeProto()
    result.CopyFrom(given)
    if result.tensor_type.HasField("shape") and result.tensor_type.shape.dim:
        last = result.tensor_type.shape.dim[-1]
        last.Clear()
        last.dim_value = columns.i
    context.set_output_type(0, result)


contrib(
    "MatMulNBits",
    ["A", "B", "scales", "zero_points?", "g_idx?", "bias?"],
    "Y",
    _definition,
    _infer,
    {"K": TYPE.INT, "N": TYPE.INT, "bits": 4, "block_size": TYPE.INT, "accuracy_level": 0, "weight_prepacked": 0},
    {
        "B": ["tensor(uint8)", "tensor(int32)"],
        "zero_points": ["tensor(uint8)", "tensor(int32)", *FLOATS],
        "g_idx": ["tensor(int32)"],
    },
)


class _Weights:
    """The weights, as far as they are known: [N, blocks, block size], or [N, K] where g_idx says which block."""

    def __init__(self, n: NodeView) -> None:
        if n.bits not in (2, 4, 8) or n.B.dtype != ir.DataType.UINT8 or n.weight_prepacked:
            raise ValueError(f"its weights of {n.bits} bits are packed in a way that no gradient is written for")
        self.n, self.blocks = n, -(-n.K // n.block_size)
        self.scales = op.Reshape(n.scales, [n.N, self.blocks])
        levels = in_type(self._unpacked(n.B, n.K), n.A.dtype)
        self.levels = levels - self.by_column(self._zero())  # [N, K]

    def _unpacked(self, packed: Tensor, count: int) -> Tensor:
        """[N, count], from what has several in a byte, the first in its lowest bits."""
        n = self.n
        numbers = op.Unsqueeze(op.Cast(packed, to=ir.DataType.INT32.value), [-1])
        shifted = op.Div(numbers, np.array([1 << k for k in range(0, 8, n.bits)], np.int32))
        low = op.Mod(shifted, np.array(1 << n.bits, np.int32))
        return op.Slice(op.Reshape(low, [n.N, -1]), [0], [count], [1])

    def _zero(self) -> Tensor:
        n = self.n
        if n.zero_points is None:
            return n.builder.constant(np.full((1, self.blocks), 1 << (n.bits - 1)), n.A.dtype)
        if n.zero_points.is_float:
            return op.Reshape(n.zero_points, [n.N, self.blocks])
        return in_type(self._unpacked(op.Reshape(n.zero_points, [n.N, -1]), self.blocks), n.A.dtype)

    def by_column(self, x: Tensor) -> Tensor:
        """What each block has, for each of its columns."""
        n = self.n
        block = np.arange(n.K) // n.block_size if n.g_idx is None else n.g_idx
        return op.Gather(x, block, axis=1)

    def by_block(self, x: Tensor) -> Tensor:
        """The sum over the columns of each block, in the shape of the scales."""
        n = self.n
        if n.g_idx is None:
            x = op.Pad(x, [0, 0, 0, self.blocks * n.block_size - n.K])
            total = op.ReduceSum(op.Reshape(x, [n.N, self.blocks, n.block_size]), [2], keepdims=0)
        else:
            total = op.GatherGrad([n.N, self.blocks], n.g_idx, x, axis=1)
        return op.Reshape(total, op.Shape(n.scales))

    def gradient(self, g: Tensor) -> Tensor:
        """[N, K]"""
        n = self.n
        rows = op.Reshape(g, [-1, n.N])
        return op.Transpose(rows, perm=[1, 0]) @ op.Reshape(n.A, [-1, n.K])


def _of_a(g: Tensor, n: NodeView) -> Tensor:
    weights = _Weights(n)
    return g @ (weights.levels * weights.by_column(weights.scales))


def _of_scales(g: Tensor, n: NodeView) -> Tensor:
    weights = _Weights(n)
    return weights.by_block(weights.gradient(g) * weights.levels)


def _of_zero_points(g: Tensor, n: NodeView) -> Tensor:
    weights = _Weights(n)
    return op.Reshape(weights.by_block(-weights.gradient(g)) * n.scales, op.Shape(n.zero_points))


vjp(
    "MatMulNBits",
    domain=MICROSOFT,
    A=_of_a,
    B=nondiff,
    scales=_of_scales,
    zero_points=_of_zero_points,
    g_idx=nondiff,
    bias=lambda g, n: sum_to_shape(g, n.bias),
    doc="Of weights of 2, 4 and 8 bits.",
)
