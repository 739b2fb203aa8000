"""PermutedMatMul on CUDA: cuBLAS, by way of torch, which takes permuted tensors as they are."""

from collections.abc import Sequence

import torch

from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.cuda.core.launch import sums_dtype


def permuted_mat_mul(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    Y: torch.Tensor,
    alpha: float,
    permA: Sequence[int] | None,
    permB: Sequence[int] | None,
    permY: Sequence[int] | None,
    precision: str,
    bad: BadIndex,
) -> None:
    """No index can be bad."""
    work = sums_dtype(A.dtype)
    a, b = _permuted(A.to(work), permA), _permuted(B.to(work), permB)
    if alpha != 1:
        a = a * alpha
    if precision == "bfloat16" and work == torch.float32:
        a, b = (x.bfloat16().to(work) for x in (a, b))
    product = torch.matmul(a, b)
    if bias is not None:
        product = product + bias.to(work)
    Y.copy_(_permuted(product, permY))


def _permuted(x: torch.Tensor, perm: Sequence[int] | None) -> torch.Tensor:
    return x if not perm else x.permute(list(perm))
