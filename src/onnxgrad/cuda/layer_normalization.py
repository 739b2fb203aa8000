"""LayerNormalizationGrad and SimplifiedLayerNormalizationGrad on CUDA: one pass along rows, one down the columns.

A row that fits into one tile is read once; a longer one twice, tile after tile. Down the columns, programs add up
blocks of rows, and others these sums, always in the same order.
"""

import math

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.columns import add_up_columns
from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.cuda.core.launch import ceil_div, counting_type, launch, power_of_two, sums_dtype, to_type

TILE = 4096  # elements, at most
WARPS = 4


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
    dtype = sums_dtype(X.dtype)
    kinds = counting_type(X.numel()), tl.float64 if dtype == torch.float64 else tl.float32
    Y_grad, X, scale, mean, inv_std_var = (t.view(-1) for t in (Y_grad, X, scale, mean, inv_std_var))
    if X_grad is not None and rows > 0:
        length = min(power_of_two(size), TILE)
        height = max(1, min(power_of_two(rows), TILE // 4) // length)  # short rows go through together
        launch(
            _rows, ceil_div(rows, height), Y_grad, X, scale, mean, inv_std_var, X_grad.view(-1), rows, size,
            height, length, size <= length, centred, *kinds,
            num_warps=WARPS,
        )  # fmt: skip
    add_up_columns(Y_grad, rows, scale_grad, bias_grad, (X, mean, inv_std_var), centred)


@triton.jit
def _rows(
    Y_grad, X, scale, mean, inv_std_var, X_grad, rows, size,
    HEIGHT: tl.constexpr, LENGTH: tl.constexpr, ONE_TILE: tl.constexpr, CENTRED: tl.constexpr, KIND: tl.constexpr,
    WORK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(KIND) * HEIGHT + tl.arange(0, HEIGHT)
    step = tl.arange(0, LENGTH).to(KIND)
    inv = tl.load(inv_std_var + row, row < rows, other=0).to(WORK)[:, None]
    shift = tl.load(mean + row, row < rows, other=0).to(WORK)[:, None]
    level = tl.zeros([HEIGHT, 1], WORK)  # what of the gradient moves a row's mean
    along = tl.zeros([HEIGHT, 1], WORK)  # and what its deviation
    count = tl.cast(size, WORK)
    for start in range(0, size, LENGTH):
        column = start + step
        here = (row < rows)[:, None] & (column < size)[None, :]
        at = row[:, None] * size + column[None, :]
        g = tl.load(Y_grad + at, here, other=0).to(WORK) * tl.load(scale + column, column < size, other=0).to(WORK)
        xhat = tl.load(X + at, here, other=0).to(WORK)
        xhat = (xhat - shift if CENTRED else xhat) * inv
        if CENTRED:
            level += tl.sum(g, 1, keep_dims=True)
        along += tl.sum(tl.where(here, g * xhat, 0), 1, keep_dims=True)
        if ONE_TILE:
            result = inv * (g - level / count - xhat * (along / count))
            tl.store(X_grad + at, to_type(result, X_grad.dtype.element_ty), here)
    if not ONE_TILE:
        for start in range(0, size, LENGTH):
            column = start + step
            here = (row < rows)[:, None] & (column < size)[None, :]
            at = row[:, None] * size + column[None, :]
            g = tl.load(Y_grad + at, here, other=0).to(WORK) * tl.load(scale + column, column < size, other=0).to(WORK)
            xhat = tl.load(X + at, here, other=0).to(WORK)
            xhat = (xhat - shift if CENTRED else xhat) * inv
            result = inv * (g - level / count - xhat * (along / count))
            tl.store(X_grad + at, to_type(result, X_grad.dtype.element_ty), here)
