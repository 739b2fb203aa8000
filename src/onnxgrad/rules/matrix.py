"""Products and determinants of matrices."""

from collections.abc import Sequence

import onnx_ir as ir

from onnxgrad.graph.broadcast import sum_to_shape
from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import op, vjp
from onnxgrad.rules.shape import reshaped_like, size_along
from onnxgrad.schema import OWN

RANK = 8  # more than any tensor has


def transposed(x: Tensor) -> Tensor:
    """With its last two axes swapped."""
    rank = x.rank
    return op.Transpose(x, perm=[*range(rank - 2), rank - 1, rank - 2])


def product_left(g: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """The gradient of A in A @ B, before the sum over axes along which A was broadcast."""
    if B.rank == 1:
        return op.Unsqueeze(g, [-1]) * B
    if A.rank == 1:
        # A column, as onnxruntime 1.31 multiplies a vector wrongly by a matrix that a Transpose has made.
        return op.Squeeze(B @ op.Unsqueeze(g, [-1]), [-1])
    if A.rank == 2 and B.rank == 2:
        return op.Gemm(g, B, transB=1)
    return g @ transposed(B)


def product_right(g: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """The gradient of B in A @ B, before the sum over axes along which B was broadcast."""
    if A.rank == 1:
        return op.Unsqueeze(A, [-1]) * op.Unsqueeze(g, [-2]) if B.rank > 1 else A * g
    if B.rank == 1:
        return op.Squeeze(op.Gemm(_as_matrix(A), op.Reshape(g, [-1, 1]), transA=1), [1])
    if B.rank == 2:  # one product over all rows, instead of a matrix for each batch and their sum
        return op.Gemm(_as_matrix(A), _as_matrix(g), transA=1)
    return transposed(A) @ g


def _as_matrix(x: Tensor) -> Tensor:
    """All axes but the last made one."""
    return x if x.rank == 2 else op.Flatten(x, axis=x.rank - 1)


def _matmul_left(g: Tensor, n: NodeView) -> Tensor:
    if None in (n.A.shape, n.B.shape):
        g, A, B = _of_same_rank(g, n.A, n.B)
        return reshaped_like(sum_to_shape(g @ transposed(B), A), n.A)
    part = product_left(g, n.A, n.B)
    return part if _batches_as(n.B, n.A) else sum_to_shape(part, n.A)


def _matmul_right(g: Tensor, n: NodeView) -> Tensor:
    if None in (n.A.shape, n.B.shape):
        g, A, B = _of_same_rank(g, n.A, n.B)
        return reshaped_like(sum_to_shape(transposed(A) @ g, B), n.B)
    part = product_right(g, n.A, n.B)
    return part if (n.B.rank <= 2 and n.A.rank > 1) or _batches_as(n.A, n.B) else sum_to_shape(part, n.B)


def _of_same_rank(g: Tensor, A: Tensor, B: Tensor) -> list[Tensor]:
    """With as many dimensions of 1 before their own as it takes, where their rank is not known."""
    rows, columns = op.Shape(A), op.Shape(B)
    columns = op.Concat(columns, op.Slice([1], [0], 2 - op.Shape(columns)), axis=0)  # a vector on the right is a column
    rows, columns = (op.Concat(op.Slice([1] * RANK, [0], RANK - op.Shape(s)), s, axis=0) for s in (rows, columns))
    for shape in (rows, columns):
        shape.value.shape = ir.Shape([RANK])
    ones = rows.equals(op.Expand(1, [RANK]))
    batch = op.Slice(op.Where(ones, columns, rows), [0], [RANK - 2])
    matrix = op.Concat(op.Gather(rows, [RANK - 2]), op.Gather(columns, [RANK - 1]), axis=0)
    shapes = (op.Concat(batch, matrix, axis=0), rows, columns)
    return [op.Reshape(x, shape, allowzero=1) for x, shape in zip((g, A, B), shapes, strict=True)]


def _batches_as(other: Tensor, x: Tensor) -> bool:
    """Whether it is known that x was not broadcast, having all batch axes of the other."""
    if other.rank <= 2:
        return True
    theirs, ours = (other.shape or ())[:-2], (x.shape or ())[:-2]
    return len(theirs) <= len(ours) and all(
        t == 1 or (t is not None and t == o) for t, o in zip(theirs, ours[len(ours) - len(theirs) :], strict=True)
    )


vjp("MatMul", A=_matmul_left, B=_matmul_right)


def gemm(a: Tensor, b: Tensor, alpha: float, transA: int, transB: int) -> Tensor:
    """Gemm without C; attributes that say nothing are left out."""
    return op.Gemm(a, b, alpha=None if alpha == 1 else alpha, transA=transA or None, transB=transB or None)


def _gemm_left(g: Tensor, n: NodeView) -> Tensor:
    if n.transA:
        return gemm(n.B, g, n.alpha, n.transB, 1)
    return gemm(g, n.B, n.alpha, 0, 1 - n.transB)


def _gemm_right(g: Tensor, n: NodeView) -> Tensor:
    if n.transB:
        return gemm(g, n.A, n.alpha, 1, n.transA)
    return gemm(n.A, g, n.alpha, 1 - n.transA, 0)


vjp("Gemm", A=_gemm_left, B=_gemm_right, C=lambda g, n: sum_to_shape(g, n.C) * n.beta)


def _cofactors(X: Tensor) -> Tensor:
    """Each is the determinant of X with one row replaced by a unit vector: finite also where X is singular."""
    at = op.Range(0, op.Squeeze(size_along(X, -1), [0]), 1)
    is_same = at.equals(op.Unsqueeze(at, [1]))
    row, unit = op.Unsqueeze(is_same, [1, 3]), op.Unsqueeze(op.CastLike(is_same, X), [0, 2])
    return op.Det(op.Where(row, unit, op.Unsqueeze(X, [-4, -3])))


vjp(
    "Det",
    doc="By as many determinants as the matrix has elements: exact where it is singular, slow where it is large.",
    X=lambda g, n: op.Unsqueeze(g, [-2, -1]) * _cofactors(n.X),
)


def _permuted(x: Tensor, perm: Sequence[int] | None) -> Tensor:
    return x if not perm else op.Transpose(x, perm=list(perm))


def _back(x: Tensor, perm: Sequence[int] | None) -> Tensor:
    """What `_permuted` was given, of what it gave."""
    return x if not perm else op.Transpose(x, perm=[list(perm).index(k) for k in range(len(perm))])


def _permuted_left(g: Tensor, n: NodeView) -> Tensor:
    A, B = _permuted(n.A, n.permA), _permuted(n.B, n.permB)
    part = product_left(_back(g, n.permY), A, B)
    return _back(part if _batches_as(B, A) else sum_to_shape(part, A), n.permA) * n.alpha


def _permuted_right(g: Tensor, n: NodeView) -> Tensor:
    A, B = _permuted(n.A, n.permA), _permuted(n.B, n.permB)
    part = product_right(_back(g, n.permY), A, B)
    return _back(part if B.rank == 2 or _batches_as(A, B) else sum_to_shape(part, B), n.permB) * n.alpha


def _permuted_bias(g: Tensor, n: NodeView) -> Tensor:
    return sum_to_shape(_back(g, n.permY), n.bias)


vjp("PermutedMatMul", domain=OWN, A=_permuted_left, B=_permuted_right, bias=_permuted_bias)
