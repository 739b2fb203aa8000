"""LayerNormalizationGrad and SimplifiedLayerNormalizationGrad on CUDA: one pass, and the sums of its programs' sums.

A row that fits into one tile is read once; a longer one twice, tile after tile. Down the columns, programs add up
the rows that they see, and others these sums, always in the same order.
"""

import math

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.columns import add_up_columns
from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.cuda.core.launch import ceil_div, counting_type, launch, power_of_two, sums_dtype, to_type

TILE = 4096  # elements, at most
SHORT = 1024  # elements of a row for which 4 warps have registers enough to run four programs on a multiprocessor
AT_ONCE = 32 * 8  # elements of a warp: 16 bytes of a half type for each thread
WARPS = 2112  # that share the rows, at most: 16 for each multiprocessor of an H200


def layer_normalization_grad(
    Y_grad: torch.Tensor,
    X: torch.Tensor,
    scale: torch.Tensor,
    mean: torch.Tensor,
    inv_std_var: torch.Tensor,
    X_grad: torch.Tensor | None,
    scale_grad: torch.Tensor | None,
    bias_grad: torch.Tensor | None,
    axis: int,
    bad: BadIndex,
) -> None:
    _run(Y_grad, X, scale, mean, inv_std_var, X_grad, scale_grad, bias_grad, axis, True)


def simplified_layer_normalization_grad(
    Y_grad: torch.Tensor,
    X: torch.Tensor,
    scale: torch.Tensor,
    inv_std_var: torch.Tensor,
    X_grad: torch.Tensor | None,
    scale_grad: torch.Tensor | None,
    axis: int,
    bad: BadIndex,
) -> None:
    _run(Y_grad, X, scale, inv_std_var, inv_std_var, X_grad, scale_grad, None, axis, False)


def _run(
    Y_grad: torch.Tensor,
    X: torch.Tensor,
    scale: torch.Tensor,
    mean: torch.Tensor,
    inv_std_var: torch.Tensor,
    X_grad: torch.Tensor | None,
    scale_grad: torch.Tensor | None,
    bias_grad: torch.Tensor | None,
    axis: int,
    centred: bool,
) -> None:
    rows, size = math.prod(X.shape[: axis % X.ndim]), scale.numel()
    if size == 0:
        return
    length = min(power_of_two(size), TILE)
    height = max(1, min(power_of_two(rows), TILE // length))  # rows that go through together
    warps = 4 if length <= SHORT else 8
    programs = min(WARPS // warps, ceil_div(rows, height))
    results = [result.view(-1) for result in (scale_grad, bias_grad) if result is not None]
    dtype = sums_dtype(X.dtype)
    sums = torch.empty(programs * len(results) * size, dtype=dtype, device=X.device)
    if rows > 0:
        Y_grad, X, mean, inv_std_var = (t.view(-1) for t in (Y_grad, X, mean, inv_std_var))
        launch(
            _rows, programs, Y_grad, X, scale.view(-1), mean, inv_std_var,
            Y_grad if X_grad is None else X_grad.view(-1), sums, rows, size,
            height, length, max(1, min(height, warps * AT_ONCE // length)), size <= length, centred, X_grad is not None,
            scale_grad is not None, bias_grad is not None,
            counting_type(X.numel()), tl.float64 if dtype == torch.float64 else tl.float32,
            num_warps=warps,
        )  # fmt: skip
    if results:
        add_up_columns(sums, programs, results)


@triton.jit
def _rows(
    Y_grad, X, scale, mean, inv_std_var, X_grad, sums, rows, size,
    HEIGHT: tl.constexpr, LENGTH: tl.constexpr, KEPT: tl.constexpr, ONE_TILE: tl.constexpr, CENTRED: tl.constexpr,
    OF_X: tl.constexpr, OF_SCALE: tl.constexpr, OF_BIAS: tl.constexpr, KIND: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """The gradients of X, and of scale and bias what a program's rows add to them.

    Of rows that fit into a tile, sums are kept for KEPT rows beside each other, of longer ones in memory.
    """
    first = tl.program_id(0).to(KIND) * HEIGHT
    step = tl.arange(0, LENGTH).to(KIND)
    w = tl.load(scale + step, step < size, other=0).to(WORK)  # for all rows, if they fit into a tile
    plain = tl.zeros([KEPT, LENGTH], WORK)
    scaled = tl.zeros([KEPT, LENGTH], WORK)
    to_scaled = sums + tl.program_id(0).to(KIND) * (OF_SCALE + OF_BIAS) * size
    to_plain = to_scaled + OF_SCALE * size
    for start in range(first, rows, tl.num_programs(0) * HEIGHT):
        row = start + tl.arange(0, HEIGHT)
        inv = tl.load(inv_std_var + row, row < rows, other=0).to(WORK)[:, None]
        shift = tl.load(mean + row, row < rows, other=0).to(WORK)[:, None]
        if ONE_TILE:
            g, xhat, here, at = _read(Y_grad, X, inv, shift, row, step, rows, size, CENTRED, WORK)
            if OF_X:
                gw = g * w
                level, along = _moments(gw, xhat, here, size, CENTRED, WORK)
                result = inv * (gw - level - xhat * along)
                tl.store(X_grad + at, to_type(result, X_grad.dtype.element_ty), here)
            if OF_SCALE:
                scaled += tl.sum(tl.reshape(g * xhat, [HEIGHT // KEPT, KEPT, LENGTH]), 0)
            if OF_BIAS:
                plain += tl.sum(tl.reshape(g, [HEIGHT // KEPT, KEPT, LENGTH]), 0)
        else:
            level = tl.zeros([HEIGHT, 1], WORK)
            along = tl.zeros([HEIGHT, 1], WORK)
            if OF_X:
                for begin in range(0, size, LENGTH):
                    column = begin + step
                    g, xhat, here, at = _read(Y_grad, X, inv, shift, row, column, rows, size, CENTRED, WORK)
                    gw = g * tl.load(scale + column, column < size, other=0).to(WORK)
                    more, further = _moments(gw, xhat, here, size, CENTRED, WORK)
                    level += more
                    along += further
            for begin in range(0, size, LENGTH):
                column = begin + step
                g, xhat, here, at = _read(Y_grad, X, inv, shift, row, column, rows, size, CENTRED, WORK)
                if OF_X:
                    gw = g * tl.load(scale + column, column < size, other=0).to(WORK)
                    result = inv * (gw - level - xhat * along)
                    tl.store(X_grad + at, to_type(result, X_grad.dtype.element_ty), here)
                if OF_SCALE:
                    _add_to(to_scaled + column, tl.sum(g * xhat, 0), start == first, column < size)
                if OF_BIAS:
                    _add_to(to_plain + column, tl.sum(g, 0), start == first, column < size)
            tl.debug_barrier()  # threads may read what others have added
    if ONE_TILE:
        if OF_SCALE:
            tl.store(to_scaled + step, tl.sum(scaled, 0), step < size)
        if OF_BIAS:
            tl.store(to_plain + step, tl.sum(plain, 0), step < size)


@triton.jit
def _read(Y_grad, X, inv, shift, row, column, rows, size, CENTRED: tl.constexpr, WORK: tl.constexpr):
    """A tile of the gradient and of what was scaled, which of it is there, and where."""
    here = (row < rows)[:, None] & (column < size)[None, :]
    at = row[:, None] * size + column[None, :]
    g = tl.load(Y_grad + at, here, other=0).to(WORK)
    x = tl.load(X + at, here, other=0).to(WORK)
    return g, tl.where(here, (x - shift if CENTRED else x) * inv, 0), here, at


@triton.jit
def _moments(gw, xhat, here, size, CENTRED: tl.constexpr, WORK: tl.constexpr):
    """What of the gradient moves a row's mean, and what its deviation."""
    count = tl.cast(size, WORK)
    along = tl.sum(gw * xhat, 1, keep_dims=True) / count
    return tl.sum(gw, 1, keep_dims=True) / count if CENTRED else along * 0, along


@triton.jit
def _add_to(to, numbers, is_first, here):
    before = tl.load(to, here & (is_first == 0), other=0)
    tl.store(to, before + numbers, here)
