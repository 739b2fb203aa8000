"""PermutedMatMul on CUDA: cuBLAS, by way of torch, which takes permuted tensors as they are."""

from collections.abc import Sequence

import torch

from onnxgrad.cuda.core.cublas import sums_in_float32
from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.cuda.core.launch import INTERPRETED, sums_dtype


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
    a, b = _permuted(A, permA), _permuted(B, permB)
    y = _permuted(Y, None if not permY else [list(permY).index(k) for k in range(len(permY))])  # as the product has it
    kept = torch.float64, *([torch.bfloat16] if alpha == 1 else [])  # types that such rounding does not change
    rounds = precision == "bfloat16" and A.dtype not in kept
    if y.ndim == 2 and bias is None and y.mT.is_contiguous():
        a, b, y = b.mT, a.mT, y.mT  # the other way round, it is written as it lies
    if INTERPRETED or rounds or 0 in (*a.shape, *b.shape) or not (b.ndim == 2 and y.is_contiguous()):
        _multiply(a, b, bias, y, alpha, rounds)
        return
    rows, to = a.reshape(-1, a.shape[-1]), y.view(-1, y.shape[-1])
    with sums_in_float32():
        if bias is not None:  # cuBLAS adds it as it writes
            torch.addmm(bias, rows, b, alpha=alpha, out=to)
        elif alpha != 1:
            torch.addmm(to, rows, b, beta=0, alpha=alpha, out=to)
        else:
            torch.mm(rows, b, out=to)


def _multiply(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, alpha: float, rounds: bool
) -> None:
    """Any product, by way of a copy; half types in float32 if more than the product has to be rounded."""
    is_plain = bias is None and alpha == 1 and not rounds and not INTERPRETED  # a CPU's products round as they like
    work = a.dtype if is_plain else sums_dtype(a.dtype)
    a, b = a.to(work) * alpha if alpha != 1 else a.to(work), b.to(work)
    if rounds:
        a, b = (x.bfloat16().to(work) for x in (a, b))
    with sums_in_float32():
        product = torch.matmul(a, b)
    if bias is not None:
        product = product + bias.to(work)
    y.copy_(product)


def _permuted(x: torch.Tensor, perm: Sequence[int] | None) -> torch.Tensor:
    return x if not perm else x.permute(list(perm))
