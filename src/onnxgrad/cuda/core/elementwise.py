"""Element-wise kernels on CUDA, compiled from formulas: one pass."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.launch import bits_of, ceil_div, float_of, launch, to_type
from onnxgrad.ops.families.formulas import NUMBERS, bind

BLOCK = 1024


class Elementwise:
    """dX[i] = formula(dY[i], X[i]), with alpha if there is one; X[i] + B[i % B.size] in place of X[i] with a bias."""

    def __init__(self, formula: Callable[..., Any]) -> None:
        name = formula.__name__
        # Triton looks up all names that the source has, its annotations among them.
        self.compute: Any = triton.jit(bind(formula, name, where=_where, **KNOWN, T=None, tl=tl))
        self._kernel = triton.jit(bind(_elements, f"{name}_elements", compute=self.compute))

    def __call__(
        self, dY: torch.Tensor, X: torch.Tensor, dX: torch.Tensor, *, alpha: float | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        if dX.numel() == 0:
            return
        B, columns = (X, 1) if bias is None else (bias, bias.numel())  # without a bias the kernel reads nothing of it
        launch(
            self._kernel, ceil_div(dX.numel(), BLOCK), dY.view(-1), X.view(-1), B.view(-1), dX.view(-1), dX.numel(),
            columns, bits_of(alpha or 0.0), bias is not None, alpha is not None, BLOCK,
            tl.float64 if dX.dtype == torch.float64 else tl.float32,
        )  # fmt: skip


KNOWN = {name: tl.constexpr(number) for name, number in NUMBERS.items()}
compute: Any = None  # the name that is bound to each formula


@triton.jit
def _where(condition, a, b):
    return tl.where(condition, a, b)


def _elements(
    dY, X, B, dX, count, columns, alpha,
    HAS_BIAS: tl.constexpr, HAS_ALPHA: tl.constexpr, BLOCK: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    g = tl.load(dY + at, here, other=0).to(WORK)
    x = tl.load(X + at, here, other=0).to(WORK)
    if HAS_BIAS:
        x += tl.load(B + at % columns, here, other=0).to(WORK)
    result = compute(g, x, float_of(alpha, WORK)) if HAS_ALPHA else compute(g, x)
    tl.store(dX + at, to_type(result, dX.dtype.element_ty), here)
