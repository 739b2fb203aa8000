"""MaxPoolGrad on the CPU: the largest numbers of a row of windows are found together, then dY goes where they are.

A task has whole planes, images of one channel, so that what it adds up stays in its cache. Windows of two by two
elements side by side, which most networks have, take code of their own.
"""

import math
from collections.abc import Sequence

import numpy as np

from onnxgrad.cpu.core.halves import finish_sums, flat, load, store, sums_for
from onnxgrad.cpu.core.jit import inlined, int64, native
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.pooling.squares import are_squares, squares_gradient
from onnxgrad.cpu.core.pooling.windows import as_three, axis_at, end_inside, first_inside
from onnxgrad.cpu.core.threads import launch
from onnxgrad.ops.families.windows import pool_axes, pool_settings
from onnxgrad.tensor_types import Array

TASK = 1 << 14  # elements of one task, at least
TOGETHER = 1024  # windows whose maxima are found together, about
LANES = 32  # of the vectors that a loop takes in one step
FEW = 4  # windows that are not worth whole vectors
NOWHERE = np.int32(-1)


def max_pool_grad(
    dY: Array,
    X: Array,
    dX: Array,
    auto_pad: str,
    ceil_mode: int,
    dilations: Sequence[int] | None,
    kernel_shape: Sequence[int] | None,
    pads: Sequence[int] | None,
    strides: Sequence[int] | None,
) -> None:
    if dX.size == 0:
        return
    axes = pool_axes(X.shape[2:], pool_settings(auto_pad, ceil_mode, dilations, kernel_shape, pads, strides))
    planes = math.prod(X.shape[:2])
    layout = as_three(axes, dY.shape[2:])
    touched = X.nbytes + dX.nbytes + dY.nbytes
    kernel = squares_gradient if X.itemsize >= 4 and are_squares(layout) else _all_planes
    launch(kernel, flat(dY), flat(X), flat(dX), layout, planes, bytes_touched=touched)


@native
def _all_planes(dY: Array, X: Array, dX: Array, layout: Array, planes: int, scheduler: int) -> None:
    _, _, KD, _, DD, _ = axis_at(layout, 0)
    H, _, KH, _, DH, _ = axis_at(layout, 1)
    W, _, KW, _, DW, _ = axis_at(layout, 2)
    offsets = np.empty(KD * KH * KW, np.int64)  # of each element of a window from its first, in the image
    for k in range(offsets.size):
        offsets[k] = (k // (KH * KW) * DD * H + k // KW % KH * DH) * W + k % KW * DW
    per_task = max(1, TASK // (dX.size // planes))
    work = (dY, X, dX, layout, offsets, planes, per_task)
    parallel(scheduler, (planes + per_task - 1) // per_task, _planes, work)


@inlined
def _take(X: Array, taken: Array, to: int, line: int, first: int, end: int, stride: int) -> None:
    """One element of each window of a row, side by side; a stride known when compiling goes faster."""
    if stride == 1:
        for ow in range(first, end):
            store(taken, to + ow, load(X, line + ow))
    elif stride == 2:
        for ow in range(first, end):
            store(taken, to + ow, load(X, line + 2 * ow))
    else:
        for ow in range(first, end):
            store(taken, to + ow, load(X, line + stride * ow))


@inlined
def _compare(taken: Array, best: Array, where: Array, count: int, number: int) -> None:
    """`count` is a number of whole vectors: a rest would be compared by jumps that nothing predicts."""
    for i in range(count):
        x, before = load(taken, i), load(best, i)
        store(best, i, x if x > before else before)
        store(where, i, number if x > before else load(where, i))


@native
def _planes(
    task: int, dY: Array, X: Array, dX: Array, layout: Array, offsets: Array, planes: int, per_task: int
) -> None:
    D, OD, KD, SD, DD, BD = axis_at(layout, 0)
    H, OH, KH, SH, DH, BH = axis_at(layout, 1)
    W, OW, KW, SW, DW, BW = axis_at(layout, 2)
    number_type = type(load(X, 0))  # float32 for half numbers
    nothing, lowest = number_type(0), number_type(-np.inf)
    rows = max(1, min(OH, TOGETHER // OW))
    room = (rows * OW + LANES - 1) // LANES * LANES if rows * OW > FEW else rows * OW
    taken, best, where = np.full(room, lowest), np.empty(room, number_type), np.empty(room, np.int32)
    for plane in range(task * per_task, min(planes, (task + 1) * per_task)):
        start, y = plane * D * H * W, plane * OD * OH * OW
        sums = sums_for(dX, start, D * H * W)
        for i in range(sums.size):
            store(sums, i, nothing)
        for od in range(OD):
            z = od * SD - BD
            for some in range(0, OH, rows):
                here = min(rows, OH - some)
                for i in range(room):
                    store(best, i, lowest)
                    store(where, i, NOWHERE)
                for kd in range(first_inside(z, DD), end_inside(z, DD, KD, D)):
                    for kh in range(KH):
                        for kw in range(KW):
                            shift = kw * DW - BW
                            first, end = min(OW, first_inside(shift, SW)), end_inside(shift, SW, OW, W)
                            for r in range(here):
                                row = (some + r) * SH - BH + kh * DH
                                last = end if 0 <= row < H else first  # of what is in the image
                                for i in range(first):
                                    store(taken, r * OW + i, lowest)
                                line = start + ((z + kd * DD) * H + row) * W + shift
                                _take(X, taken, r * OW, line, first, last, SW)
                                for i in range(max(first, last), OW):
                                    store(taken, r * OW + i, lowest)
                            _compare(taken, best, where, room, np.int32((kd * KH + kh) * KW + kw))
                for r in range(here):
                    top = (some + r) * SH - BH
                    corner = (z * H + top) * W - BW
                    for ow in range(OW):
                        number = int64(load(where, r * OW + ow))
                        if number < 0:  # nothing is larger than -inf: the first element, if there is one in the image
                            kd, kh = first_inside(z, DD), first_inside(top, DH)
                            kw = first_inside(ow * SW - BW, DW)
                            inside = end_inside(z, DD, KD, D) > kd and end_inside(top, DH, KH, H) > kh
                            if not inside or end_inside(ow * SW - BW, DW, KW, W) <= kw:
                                continue
                            number = (kd * KH + kh) * KW + kw
                        at = corner + ow * SW + load(offsets, number)
                        store(sums, at, load(sums, at) + load(dY, y + ow))
                    y += OW
        finish_sums(dX, start, sums)
