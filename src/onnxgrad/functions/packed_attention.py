"""PackedAttention and PackedAttentionGrad as ONNX functions, with the matrix of scores."""

from onnxgrad.functions.attention import expect_agreement, flash_attention, flash_attention_grad
from onnxgrad.functions.body import Body, Value
from onnxgrad.ops.packed_attention import packed_axes, result_axes


def packed_attention(o: Body, QKV: Value, mask: Value | None, scale: float, is_causal: int, layout: str) -> list[Value]:
    expect_agreement("PackedAttention", mask)
    Q, K, V = _unpacked(o, QKV, layout)
    Y, statistics = flash_attention(o, Q, K, V, mask, scale, is_causal)
    return [o.Transpose(Y, perm=result_axes(layout)), statistics]


def packed_attention_grad(
    o: Body,
    dY: Value,
    QKV: Value,
    mask: Value | None,
    Y: Value,
    statistics: Value,
    scale: float,
    is_causal: int,
    layout: str,
) -> list[Value]:
    expect_agreement("PackedAttentionGrad", mask)
    axes = result_axes(layout)
    back = [axes.index(k) for k in range(4)]
    g, y = (o.Transpose(x, perm=back) for x in (dY, Y))
    Q, K, V = _unpacked(o, QKV, layout)
    parts = flash_attention_grad(o, g, Q, K, V, mask, y, statistics, scale, is_causal)
    axes = packed_axes(layout)
    stacked = o.Concat(*(o.Unsqueeze(x, [0]) for x in parts), axis=0)
    return [o.Transpose(stacked, perm=[axes.index(k) for k in range(5)])]


def _unpacked(o: Body, QKV: Value, layout: str) -> list[Value]:
    """Queries, keys and values: [batch, length, heads, numbers]."""
    parts = o.Transpose(QKV, perm=packed_axes(layout))
    return [o.Squeeze(o.slice(parts, k, k + 1), [0]) for k in range(3)]
