"""PackedAttention and PackedAttentionGrad: FlashAttention to parts of one tensor, on GPUs."""

import numpy as np

from onnxgrad.op import op
from onnxgrad.ops.attention import (
    Mask,
    Sizes,
    Statistic,
    T,
    flash_attention,
    flash_attention_grad,
    sizes_of,
)
from onnxgrad.schema import OWN, Dim, Known, agree

PACKED = "3NSHD"  # queries, keys and values; batch, length, heads, numbers


def packed_axes(layout: str) -> list[int]:
    """The permutation that makes [3, batch, length, heads, numbers] of QKV."""
    return [layout.index(letter) for letter in PACKED]


def result_axes(layout: str) -> list[int]:
    """The permutation that gives [batch, length, heads, numbers] the order of Y."""
    return ["NSHD".index(letter) for letter in layout.replace("3", "")]


def _packed_sizes(QKV: Known, mask: Known | None, layout: str) -> Sizes | None:
    if sorted(layout) != sorted(PACKED) or layout[-1:] != "D":
        raise ValueError(f"layout is {layout!r}, expected an order of the letters N, S, 3 and H, then D")
    if QKV.dims is None:
        return None
    if len(QKV.dims) != 5:
        raise ValueError(f"QKV has shape {list(QKV.dims)}, expected five dimensions, {' '.join(layout)}")
    three, N, S, H, D = (QKV.dims[axis] for axis in packed_axes(layout))
    if not agree((three,), (3,)):
        raise ValueError(f"QKV has shape {list(QKV.dims)}, expected 3 at axis {layout.index('3')}")
    one = Known((N, S, H, D), None)
    return sizes_of(one, one, one, mask)


def _result_dims(sizes: Sizes, layout: str) -> tuple[Dim, ...]:
    return tuple((sizes.N, sizes.S, sizes.H, sizes.D)[axis] for axis in result_axes(layout))


def _packed_shapes(
    QKV: Known, mask: Known | None, scale: float, is_causal: int, layout: str
) -> tuple[tuple[Dim, ...] | None, tuple[Dim, ...] | None]:
    sizes = _packed_sizes(QKV, mask, layout)
    return (None, None) if sizes is None else (_result_dims(sizes, layout), (2, sizes.N, sizes.H, sizes.S))


def _packed_grad_shapes(
    dY: Known, QKV: Known, mask: Known | None, Y: Known, statistics: Known, scale: float, is_causal: int, layout: str
) -> tuple[Dim, ...] | None:
    sizes = _packed_sizes(QKV, mask, layout)
    if sizes is not None:
        dims = _result_dims(sizes, layout)
        for name, given, wanted in (
            ("dY", dY, dims), ("Y", Y, dims), ("statistics", statistics, (2, sizes.N, sizes.H, sizes.S))
        ):  # fmt: skip
            if given.dims is not None and not agree(given.dims, wanted):
                raise ValueError(f"{name} has shape {list(given.dims)}, expected {list(wanted)}")
    return QKV.dims


@op("PackedAttention", domain=OWN, outputs=("Y", "statistics?"), shape=_packed_shapes)
def packed_attention(
    QKV: T, mask: Mask | None = None, *, scale: float = 1.0, is_causal: int = 0, layout: str = "NS3HD"
) -> tuple[T, Statistic]:
    """FlashAttention whose queries, keys and values are in one tensor, as one product makes them.

    `layout` says which axis of QKV is which: N the batch, S the length, 3 the queries, keys and values, H the heads,
    and, always last, D the numbers of a head. Y has the same order of axes, without the 3.
    """
    Q, K, V = QKV.transpose(packed_axes(layout))
    Y, statistics = flash_attention.body(Q, K, V, mask, scale=scale, is_causal=is_causal)
    return np.ascontiguousarray(Y.transpose(result_axes(layout))), statistics


@op("PackedAttentionGrad", domain=OWN, outputs="dQKV", shape=_packed_grad_shapes)
def packed_attention_grad(
    dY: T,
    QKV: T,
    mask: Mask | None,
    Y: T,
    statistics: Statistic,
    *,
    scale: float = 1.0,
    is_causal: int = 0,
    layout: str = "NS3HD",
) -> T:
    """Gradient of PackedAttention in QKV, as FlashAttentionGrad computes its three parts."""
    Q, K, V = QKV.transpose(packed_axes(layout))
    back = np.argsort(result_axes(layout))
    given = (dY.transpose(back), Q, K, V, mask, Y.transpose(back), statistics)
    parts = np.stack(flash_attention_grad.body(*given, scale=scale, is_causal=is_causal))
    return np.ascontiguousarray(parts.transpose(np.argsort(packed_axes(layout))))
