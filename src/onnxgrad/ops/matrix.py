"""PermutedMatMul: the product of two tensors of matrices whose axes are permuted before and after."""

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from onnxgrad.op import op
from onnxgrad.schema import OWN, Dim, Known
from onnxgrad.tensor_types import Array, T, accumulator


def _shape_rule(
    A: Known,
    B: Known,
    bias: Known | None,
    alpha: float,
    permA: Sequence[int] | None,
    permB: Sequence[int] | None,
    permY: Sequence[int] | None,
    precision: str,
) -> tuple[Dim, ...] | None:
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"precision is {precision!r}, expected 'float32' or 'bfloat16'")
    if A.dims is None or B.dims is None:
        return None
    a, b = _permuted("A", A.dims, permA), _permuted("B", B.dims, permB)
    if isinstance(a[-1], int) and isinstance(b[-2], int) and a[-1] != b[-2]:
        raise ValueError(f"permuted, A has {a[-1]} columns and B has {b[-2]} rows, expected the same number")
    if bias is not None and bias.dims is not None and (len(bias.dims) != 1 or _differ(bias.dims[0], b[-1])):
        raise ValueError(f"bias has shape {list(bias.dims)}, expected [{b[-1]}], a number for each column of B")
    batches: list[Dim] = []
    for k in range(max(len(a), len(b)) - 2, 0, -1):
        one, other = (d[-2 - k] if len(d) >= 2 + k else 1 for d in (a, b))
        if _differ(one, other) and 1 not in (one, other):
            raise ValueError(f"A has {list(a[:-2])} matrices and B has {list(b[:-2])}, which do not broadcast")
        batches.append(_broadcast(one, other))
    return tuple(_permuted("Y", [*batches, a[-2], b[-1]], permY))


def _broadcast(one: Dim, other: Dim) -> Dim:
    if one == 1 or other == 1:
        return other if one == 1 else one
    if isinstance(one, int) or one == other:
        return one
    return other if isinstance(other, int) else None  # of a number above 1 and something unknown, it is the number


def _differ(one: Dim, other: Dim) -> bool:
    return isinstance(one, int) and isinstance(other, int) and one != other


def _permuted(name: str, dims: Sequence[Dim], perm: Sequence[int] | None) -> list[Dim]:
    if len(dims) < 2:
        raise ValueError(f"{name} has shape {list(dims)}, expected at least two dimensions")
    if not perm:
        return list(dims)
    if sorted(perm) != list(range(len(dims))):
        raise ValueError(f"perm{name} is {list(perm)}, expected the numbers 0 to {len(dims) - 1}, each of them once")
    return [dims[k] for k in perm]


@op("PermutedMatMul", domain=OWN, outputs="Y", shape=_shape_rule)
def permuted_mat_mul(
    A: T,
    B: T,
    bias: T | None = None,
    *,
    alpha: float = 1.0,
    permA: Sequence[int] | None = None,
    permB: Sequence[int] | None = None,
    permY: Sequence[int] | None = None,
    precision: str = "float32",
) -> T:
    """Y = Transpose(alpha · MatMul(Transpose(A, permA), Transpose(B, permB)) + bias, permY), without a transposed copy.

    A and B have at least two dimensions, those before the last two broadcast; bias is one number for each column. A
    permutation that is left out, or empty, changes nothing. float16 and bfloat16 compute in float32 and round once; on
    a GPU, before the bias is added, too.

    Training on a CPU multiplies with it if the processor has AVX2, AVX-512 or AMX. With AMX each float32 number is
    split into three bfloat16 numbers (the scheme bf16x6), with results as good as those of float32 at up to twice its
    speed. Numbers below 2⁻¹⁰² lose digits on the way.

    With the `precision` bfloat16, alpha · A and B are rounded to bfloat16 first, except float64; sums and bias are
    added in float32. That is fast on processors with AVX512-BF16.
    """
    work = accumulator(A.dtype)
    a, b = _transposed(A.astype(work), permA) * work.type(alpha), _transposed(B.astype(work), permB)
    if precision == "bfloat16" and work == np.float32:
        a, b = (x.astype(ml_dtypes.bfloat16).astype(work) for x in (a, b))
    product = np.matmul(a, b)
    if bias is not None:
        product = product + bias.astype(work)
    return _transposed(product, permY).astype(A.dtype)


def _transposed(array: Array, perm: Sequence[int] | None) -> Array:
    return array if not perm else array.transpose(perm)
