"""FlashAttention and PackedAttention, and gradients of their gradients, which hold the matrices that they do not."""

from typing import Any

import onnx_ir as ir

from onnxgrad.graph.broadcast import sum_to_shape
from onnxgrad.graph.cast import in_type
from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.ops.packed_attention import packed_axes, result_axes
from onnxgrad.rules import nondiff, op, vjp
from onnxgrad.rules.matrix import transposed
from onnxgrad.schema import OWN

LOWEST = float("-inf")
FLOAT, BOOL = ir.DataType.FLOAT, ir.DataType.BOOL


def _gradients(g: Tensor, n: NodeView) -> tuple[Tensor, Tensor, Tensor]:
    """Those of Q, K and V, by one node."""
    found: tuple[Tensor, Tensor, Tensor] = op.FlashAttentionGrad(
        g, n.Q, n.K, n.V, n.mask, n.Y, n.statistics, scale=n.scale, is_causal=n.is_causal, outputs=3
    )
    return found


class _Matrices:
    """What FlashAttentionGrad computes, written out in float32: matrices for each head of K.

    dP = dY · Vᵀ, dS = P · (dP - sum of P · dP), dQ = scale · dS · K, dK = scale · dSᵀ · Q and dV = Pᵀ · dY. The queries
    of all heads of Q that share one of K are the rows of one matrix, so no head is repeated.
    """

    def __init__(self, n: "NodeView | _Unpacked", dY: Tensor) -> None:
        self.n, self.scale = n, n.scale
        N, S, H, D = (op.Shape(n.Q, start=k, end=k + 1) for k in range(4))
        T, groups = (op.Shape(n.K, start=k, end=k + 1) for k in (1, 2))
        rows = H / groups * S
        self._rows, self._by_heads = op.Concat(N, groups, rows, D, axis=0), op.Concat(N, H, S, D, axis=0)
        self.as_rows, self.as_heads = op.Concat(N, groups, rows, T, axis=0), op.Concat(N, H, S, T, axis=0)
        self.q, self.dY = self.of_queries(n.Q), self.of_queries(dY)
        self.k, self.v = self.of_keys(n.K), self.of_keys(n.V)
        scores = self._scores()
        sees_nothing = op.ReduceMax(scores, [-1], keepdims=1).equals(LOWEST)
        self.P = op.Where(sees_nothing, 0, op.Softmax(op.Where(sees_nothing, 0, scores), axis=-1))
        self.dP = self.dY @ transposed(self.v)
        self.centred = self.dP - self.sum(self.P * self.dP)
        self.dS: Tensor = self.P * self.centred

    def of_queries(self, x: Tensor) -> Tensor:
        """Matrices of what has the shape of Q."""
        return op.Reshape(op.Transpose(in_type(x, FLOAT), perm=[0, 2, 1, 3]), self._rows, allowzero=1)

    def of_keys(self, x: Tensor) -> Tensor:
        """Matrices of what has the shape of K."""
        return op.Transpose(in_type(x, FLOAT), perm=[0, 2, 1, 3])

    def like_q(self, x: Tensor) -> Tensor:
        """Undoes `of_queries`."""
        return in_type(op.Transpose(op.Reshape(x, self._by_heads, allowzero=1), perm=[0, 2, 1, 3]), self.n.Q.dtype)

    def like_k(self, x: Tensor) -> Tensor:
        """Undoes `of_keys`."""
        return in_type(op.Transpose(x, perm=[0, 2, 1, 3]), self.n.K.dtype)

    def sum(self, x: Tensor) -> Tensor:
        """Over the keys."""
        return op.ReduceSum(x, [-1], keepdims=1)

    def _scores(self) -> Tensor:
        n, found = self.n, self.q @ transposed(self.k) * self.scale
        if n.mask is None and not n.is_causal:
            return found
        found = op.Reshape(found, self.as_heads, allowzero=1)
        if n.mask is not None:
            found = op.Where(n.mask, found, LOWEST) if n.mask.dtype == BOOL else found + n.mask
        if n.is_causal:
            queries, keys = (op.Range(0, op.Squeeze(op.Shape(x, start=1, end=2), [0]), 1) for x in (n.Q, n.K))
            found = op.Where(op.Unsqueeze(queries, [1]) < keys, LOWEST, found)
        return op.Reshape(found, self.as_rows, allowzero=1)

    def like_mask(self, x: Tensor) -> Tensor:
        """Summed to the shape of the mask."""
        return sum_to_shape(op.Reshape(x, self.as_heads, allowzero=1), self.n.mask)


vjp(
    "FlashAttention",
    domain=OWN,
    Q=lambda g, n: _gradients(g, n)[0],
    K=lambda g, n: _gradients(g, n)[1],
    V=lambda g, n: _gradients(g, n)[2],
    mask=lambda g, n: _Matrices(n, g).like_mask(_Matrices(n, g).dS),
)


class _Second(_Matrices):
    """The gradients of a FlashAttentionGrad: what those of dQ, dK and dV make of those of its inputs."""

    def __init__(self, n: "NodeView | _Unpacked") -> None:
        super().__init__(n, n.dY)
        to_dQ, to_dK, to_dV = (
            (op.CastLike(0, m) * m if g is None else write(g)) * factor
            for g, m, write, factor in (
                (n.grad(0), self.q, self.of_queries, self.scale),
                (n.grad(1), self.k, self.of_keys, self.scale),
                (n.grad(2), self.v, self.of_keys, 1),
            )
        )
        self.to_dQ, self.to_dK, self.to_dV = to_dQ, to_dK, to_dV
        to_dS = to_dQ @ transposed(self.k) + self.q @ transposed(to_dK)
        kept = self.sum(self.P * to_dS)
        self.to_dP = self.P * (to_dS - kept)
        to_P = to_dS * self.centred - self.dP * kept + self.dY @ transposed(to_dV)
        self.to_scores: Tensor = self.P * (to_P - self.sum(self.P * to_P))

    def of_gradient(self) -> Tensor:
        """The gradient of dY."""
        return self.like_q(self.P @ self.to_dV + self.to_dP @ self.v)

    def of_q(self) -> Tensor:
        """The gradient of Q."""
        return self.like_q(self.dS @ self.to_dK + self.to_scores @ self.k * self.scale)

    def of_k(self) -> Tensor:
        """The gradient of K."""
        return self.like_k(transposed(self.dS) @ self.to_dQ + transposed(self.to_scores) @ self.q * self.scale)

    def of_v(self) -> Tensor:
        """The gradient of V."""
        return self.like_k(transposed(self.to_dP) @ self.dY)


vjp(
    "FlashAttentionGrad",
    domain=OWN,
    doc="Y and statistics are taken for what FlashAttention makes of the other inputs.",
    outputs=("dQ", "dK", "dV"),
    dY=lambda g, n: _Second(n).of_gradient(),
    Q=lambda g, n: _Second(n).of_q(),
    K=lambda g, n: _Second(n).of_k(),
    V=lambda g, n: _Second(n).of_v(),
    mask=lambda g, n: _Second(n).like_mask(_Second(n).to_scores),
    Y=nondiff,
    statistics=nondiff,
)


class _Unpacked:
    """A PackedAttention or PackedAttentionGrad as FlashAttention's would be: with three tensors in place of one."""

    def __init__(self, n: NodeView) -> None:
        self.n, self.mask, self.scale, self.is_causal = n, n.mask, n.scale, n.is_causal
        self.Q, self.K, self.V = self._parts(n.QKV)
        self.dY: Any = self.unfolded(n.dY) if n.node.op_type == "PackedAttentionGrad" else None

    def _parts(self, x: Tensor) -> list[Tensor]:
        axes = packed_axes(self.n.layout)
        return [op.Gather(op.Transpose(x, perm=axes), k, axis=0) for k in range(3)]

    def unfolded(self, x: Tensor) -> Tensor:
        """[batch, length, heads, numbers], of what has the axes of Y."""
        axes = result_axes(self.n.layout)
        return op.Transpose(x, perm=[axes.index(k) for k in range(4)])

    def result(self, x: Tensor) -> Tensor:
        """Undoes `unfolded`."""
        return op.Transpose(x, perm=result_axes(self.n.layout))

    def packed(self, *parts: Tensor) -> Tensor:
        """Of what has the shapes of Q, K and V."""
        axes = packed_axes(self.n.layout)
        stacked = op.Concat(*(op.Unsqueeze(x, [0]) for x in parts), axis=0)
        return op.Transpose(stacked, perm=[axes.index(k) for k in range(5)])

    def grad(self, index: int) -> Tensor | None:
        """The gradient of dQ, dK or dV."""
        g = self.n.grad(0)
        return None if g is None else self._parts(g)[index]


vjp(
    "PackedAttention",
    domain=OWN,
    QKV=lambda g, n: op.PackedAttentionGrad(
        g, n.QKV, n.mask, n.Y, n.statistics, scale=n.scale, is_causal=n.is_causal, layout=n.layout
    ),
    mask=lambda g, n: _Matrices(_Unpacked(n), _Unpacked(n).unfolded(g)).like_mask(
        _Matrices(_Unpacked(n), _Unpacked(n).unfolded(g)).dS
    ),
)


vjp(
    "PackedAttentionGrad",
    domain=OWN,
    doc="Y and statistics are taken for what PackedAttention makes of the other inputs.",
    dY=lambda g, n: _Unpacked(n).result(_Second(_Unpacked(n)).of_gradient()),
    QKV=lambda g, n: _Unpacked(n).packed(
        *(of(_Second(_Unpacked(n))) for of in (_Second.of_q, _Second.of_k, _Second.of_v))
    ),
    mask=lambda g, n: _Second(_Unpacked(n)).like_mask(_Second(_Unpacked(n)).to_scores),
    Y=nondiff,
    statistics=nondiff,
)
