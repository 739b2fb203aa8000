"""AveragePoolGrad on CUDA: each element of the image asks the windows it lies in for its share."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.cuda.core.launch import ceil_div, counting_type, launch, to_type
from onnxgrad.cuda.core.windows import BLOCK, coordinates, three_axes, window_of
from onnxgrad.ops.families.windows import ALONE, pool_axes, pool_settings
from onnxgrad.tensor_types import Array


def average_pool_grad(
    dY: torch.Tensor,
    shape: Array,
    dX: torch.Tensor,
    auto_pad: str,
    ceil_mode: int,
    count_include_pad: int,
    dilations: Sequence[int] | None,
    kernel_shape: Sequence[int] | None,
    pads: Sequence[int] | None,
    strides: Sequence[int] | None,
    bad: BadIndex,
) -> None:
    if dX.numel() == 0:
        return
    axes = pool_axes(dX.shape[2:], pool_settings(auto_pad, ceil_mode, dilations, kernel_shape, pads, strides))
    ends = [axis.size + (axis.after if count_include_pad else 0) for axis in [ALONE] * (3 - len(axes)) + axes]
    launch(
        _ask, ceil_div(dX.numel(), BLOCK), dY.view(-1), dX.view(-1), dX.numel(), *three_axes(axes, dY.shape[2:]), *ends,
        bool(count_include_pad), BLOCK, counting_type(dX.numel(), dY.numel()),
        tl.float64 if dX.dtype == torch.float64 else tl.float32,
    )  # fmt: skip


@triton.jit
def _count(window, END, K: tl.constexpr, S: tl.constexpr, D: tl.constexpr, B: tl.constexpr, PADS: tl.constexpr):
    """How many elements windows count along an axis; END is where the image ends, or its pads if these count."""
    begin = window * S - B
    last = tl.minimum((tl.maximum(END - begin, 0) + D - 1) // D, K)
    first = 0 if PADS else (tl.maximum(-begin, 0) + D - 1) // D
    return tl.maximum(last - first, 1)


@triton.jit
def _ask(
    dY, dX, elements, D, H, W, OD, OH, OW,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    DD: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr,
    ED, EH, EW, PADS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(KIND) * BLOCK + tl.arange(0, BLOCK)
    plane, d, h, w = coordinates(at, D, H, W)
    total = tl.zeros([BLOCK], WORK)
    for k in range(KD * KH * KW):
        od, deep = window_of(d, k // (KH * KW), OD, SD, DD, BD)
        oh, high = window_of(h, k // KW % KH, OH, SH, DH, BH)
        ow, wide = window_of(w, k % KW, OW, SW, DW, BW)
        there = (at < elements) & deep & high & wide
        g = tl.load(dY + ((plane * OD + od) * OH + oh) * OW + ow, there, other=0).to(WORK)
        count = _count(od, ED, KD, SD, DD, BD, PADS) * _count(oh, EH, KH, SH, DH, BH, PADS)
        total += g / (count * _count(ow, EW, KW, SW, DW, BW, PADS)).to(WORK)
    tl.store(dX + at, to_type(total, dX.dtype.element_ty), at < elements)
