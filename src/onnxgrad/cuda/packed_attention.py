"""PackedAttention and PackedAttentionGrad on CUDA: FlashAttention's kernels, which read parts where they lie."""

import torch

from onnxgrad.cuda.attention import flash_attention, flash_attention_grad
from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.ops.packed_attention import packed_axes, result_axes


def packed_attention(
    QKV: torch.Tensor,
    mask: torch.Tensor | None,
    Y: torch.Tensor,
    statistics: torch.Tensor,
    scale: float,
    is_causal: int,
    layout: str,
    bad: BadIndex,
) -> None:
    """No index can be bad."""
    Q, K, V = QKV.permute(packed_axes(layout))
    flash_attention(Q, K, V, mask, _by_batch(Y, layout), statistics, scale, is_causal, bad)


def packed_attention_grad(
    dY: torch.Tensor,
    QKV: torch.Tensor,
    mask: torch.Tensor | None,
    Y: torch.Tensor,
    statistics: torch.Tensor,
    dQKV: torch.Tensor,
    scale: float,
    is_causal: int,
    layout: str,
    bad: BadIndex,
) -> None:
    """No index can be bad."""
    (Q, K, V), (dQ, dK, dV) = (x.permute(packed_axes(layout)) for x in (QKV, dQKV))
    given, result = (_by_batch(x, layout) for x in (dY, Y))
    flash_attention_grad(given, Q, K, V, mask, result, statistics, dQ, dK, dV, scale, is_causal, bad)


def _by_batch(Y: torch.Tensor, layout: str) -> torch.Tensor:
    """[batch, length, heads, numbers]."""
    axes = result_axes(layout)
    return Y.permute([axes.index(k) for k in range(4)])
