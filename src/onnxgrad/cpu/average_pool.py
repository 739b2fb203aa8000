"""AveragePoolGrad on the CPU: a row of windows is spread along its last axis, then added to the rows it lies on.

A task has whole planes, images of one channel, so that what it adds up stays in its cache.
"""

import math
from collections.abc import Sequence

import numpy as np

from onnxgrad.cpu.core.halves import finish_sums, flat, load, store, sums_for
from onnxgrad.cpu.core.jit import native
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.pooling.windows import as_three, axis_at, end_inside, first_inside
from onnxgrad.cpu.core.threads import launch
from onnxgrad.ops.average_pool import counts_of
from onnxgrad.ops.families.windows import pool_axes, pool_settings
from onnxgrad.tensor_types import Array, accumulator

TASK = 1 << 14  # elements of one task, at least


def average_pool_grad(
    dY: Array,
    shape: Array,
    dX: Array,
    auto_pad: str,
    ceil_mode: int,
    count_include_pad: int,
    dilations: Sequence[int] | None,
    kernel_shape: Sequence[int] | None,
    pads: Sequence[int] | None,
    strides: Sequence[int] | None,
) -> None:
    if dX.size == 0:
        return
    axes = pool_axes(dX.shape[2:], pool_settings(auto_pad, ceil_mode, dilations, kernel_shape, pads, strides))
    planes, windows = math.prod(dX.shape[:2]), dY.shape[2:]
    counts = [np.ones(1)] * (3 - len(axes)) + [
        np.maximum(counts_of(axis, n, count_include_pad), 1) for axis, n in zip(axes, windows, strict=True)
    ]
    D, H, W = (c.astype(accumulator(dX.dtype)) for c in counts)
    work = (flat(dY), flat(dX), D, H, W, as_three(axes, windows), planes)
    launch(_all_planes, *work, bytes_touched=dX.nbytes + dY.nbytes)


@native
def _all_planes(
    dY: Array, dX: Array, depths: Array, heights: Array, widths: Array, layout: Array, planes: int, scheduler: int
) -> None:
    per_task = max(1, TASK // (dX.size // planes))
    work = (dY, dX, depths, heights, widths, layout, planes, per_task)
    parallel(scheduler, (planes + per_task - 1) // per_task, _planes, work)


@native
def _planes(
    task: int,
    dY: Array,
    dX: Array,
    depths: Array,
    heights: Array,
    widths: Array,
    layout: Array,
    planes: int,
    per_task: int,
) -> None:
    D, OD, KD, SD, DD, BD = axis_at(layout, 0)
    H, OH, KH, SH, DH, BH = axis_at(layout, 1)
    W, OW, KW, SW, DW, BW = axis_at(layout, 2)
    number_type = type(load(widths, 0))  # float32 for half numbers
    nothing = number_type(0)
    quotients, line = np.empty(OW, number_type), np.empty(W, number_type)
    for plane in range(task * per_task, min(planes, (task + 1) * per_task)):
        start, y = plane * D * H * W, plane * OD * OH * OW
        sums = sums_for(dX, start, D * H * W)
        for i in range(sums.size):
            store(sums, i, nothing)
        for od in range(OD):
            z = od * SD - BD
            for oh in range(OH):
                top, count = oh * SH - BH, depths[od] * heights[oh]
                for ow in range(OW):
                    store(quotients, ow, load(dY, y + ow) / (count * load(widths, ow)))
                for i in range(W):
                    store(line, i, nothing)
                for kw in range(KW):
                    shift = kw * DW - BW
                    for ow in range(first_inside(shift, SW), end_inside(shift, SW, OW, W)):
                        at = ow * SW + shift
                        store(line, at, load(line, at) + load(quotients, ow))
                for kd in range(first_inside(z, DD), end_inside(z, DD, KD, D)):
                    for kh in range(first_inside(top, DH), end_inside(top, DH, KH, H)):
                        row = ((z + kd * DD) * H + top + kh * DH) * W
                        for i in range(W):
                            store(sums, row + i, load(sums, row + i) + load(line, i))
                y += OW
        finish_sums(dX, start, sums)
