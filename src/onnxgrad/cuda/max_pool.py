"""MaxPoolGrad on CUDA: each window notes which of its elements is the largest, then each element asks its windows."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.cuda.core.launch import ceil_div, counting_type, launch, to_type
from onnxgrad.cuda.core.windows import BLOCK, Layout, coordinates, three_axes, window_of
from onnxgrad.ops.families.windows import pool_axes, pool_settings


def max_pool_grad(
    dY: torch.Tensor,
    X: torch.Tensor,
    dX: torch.Tensor,
    auto_pad: str,
    ceil_mode: int,
    dilations: Sequence[int] | None,
    kernel_shape: Sequence[int] | None,
    pads: Sequence[int] | None,
    strides: Sequence[int] | None,
    bad: BadIndex,
) -> None:
    if dX.numel() == 0:
        return
    axes = pool_axes(X.shape[2:], pool_settings(auto_pad, ceil_mode, dilations, kernel_shape, pads, strides))
    layout: Layout = three_axes(axes, dY.shape[2:])
    kind = counting_type(X.numel(), dY.numel())
    where = torch.empty(max(dY.numel(), 1), dtype=torch.int32, device=dY.device)
    work = tl.float64 if X.dtype == torch.float64 else tl.float32
    flat_X, flat_dY, flat_dX = X.view(-1), dY.view(-1), dX.view(-1)
    if dY.numel():
        programs = ceil_div(dY.numel(), BLOCK)
        launch(_find, programs, flat_X, where, dY.numel(), *layout, BLOCK, kind, work)
    launch(_ask, ceil_div(dX.numel(), BLOCK), flat_dY, where, flat_dX, dX.numel(), *layout, BLOCK, kind, work)


@triton.jit
def _find(
    X, where, windows, D, H, W, OD, OH, OW,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    DD: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr,
    BLOCK: tl.constexpr, KIND: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(KIND) * BLOCK + tl.arange(0, BLOCK)
    plane, od, oh, ow = coordinates(at, OD, OH, OW)
    best = tl.full([BLOCK], float("-inf"), WORK)
    found = tl.full([BLOCK], -1, tl.int32)
    for k in range(KD * KH * KW):
        d, h, w = od * SD - BD + k // (KH * KW) * DD, oh * SH - BH + k // KW % KH * DH, ow * SW - BW + k % KW * DW
        inside = (at < windows) & (d >= 0) & (d < D) & (h >= 0) & (h < H) & (w >= 0) & (w < W)
        x = tl.load(X + ((plane * D + d) * H + h) * W + w, inside, other=float("-inf")).to(WORK)
        # The first element is it until a larger one comes: nothing is larger than -inf where all are.
        found = tl.where((inside & (found < 0)) | (x > best), k, found)
        best = tl.where(x > best, x, best)
    tl.store(where + at, found, at < windows)


@triton.jit
def _ask(
    dY, where, dX, elements, D, H, W, OD, OH, OW,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    DD: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr,
    BLOCK: tl.constexpr, KIND: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(KIND) * BLOCK + tl.arange(0, BLOCK)
    plane, d, h, w = coordinates(at, D, H, W)
    total = tl.zeros([BLOCK], WORK)
    for k in range(KD * KH * KW):
        od, deep = window_of(d, k // (KH * KW), OD, SD, DD, BD)
        oh, high = window_of(h, k // KW % KH, OH, SH, DH, BH)
        ow, wide = window_of(w, k % KW, OW, SW, DW, BW)
        there = (at < elements) & deep & high & wide
        window = ((plane * OD + od) * OH + oh) * OW + ow
        mine = tl.load(where + window, there, other=-1) == k
        total += tl.load(dY + window, there & mine, other=0).to(WORK)
    tl.store(dX + at, to_type(total, dX.dtype.element_ty), at < elements)
