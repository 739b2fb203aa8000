"""ONNX's Gather, GatherElements, Slice and GRU for torch, with onnxgrad's kernels behind their gradients.

They take tensors on the CPU or a GPU and work with torch.autograd like torch's own functions. gather_elements and slice
can be differentiated any number of times, gather too; gru once.
"""

from collections.abc import Callable, Sequence
from operator import index
from typing import Any, NamedTuple

import torch

from onnxgrad.arguments import check_axis
from onnxgrad.ops.gather import gather_grad
from onnxgrad.ops.gather_elements import gather_elements_grad
from onnxgrad.ops.gru import gru_grad, gru_training
from onnxgrad.ops.slice import slice_grad, slice_ranges
from onnxgrad.schema import Known

__all__ = ["gather", "gather_elements", "gru", "slice"]


def gather(data: torch.Tensor, indices: torch.Tensor, axis: int = 0) -> torch.Tensor:
    """ONNX's Gather: whole slices of `data` along `axis`, in the order of `indices` (int32 or int64, any shape)."""
    return _Gather.apply(_ROWS, data, _checked(indices), check_axis(axis, data.ndim))


def gather_elements(data: torch.Tensor, indices: torch.Tensor, axis: int = 0) -> torch.Tensor:
    """ONNX's GatherElements: single elements of `data`, the index standing in for the coordinate along `axis`."""
    return _Gather.apply(_ELEMENTS, data, _checked(indices), check_axis(axis, data.ndim))


def slice(
    data: torch.Tensor,
    starts: Sequence[int],
    ends: Sequence[int],
    axes: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
) -> torch.Tensor:
    """ONNX's Slice; unlike torch's own indexing it takes negative steps."""
    where = [None if given is None else tuple(map(index, given)) for given in (starts, ends, axes, steps)]
    known = [None if given is None else Known((len(given),), given) for given in (tuple(data.shape), *where)]
    slice_grad.output_shapes([Known(None, None), *known], {})  # refuses what the gradient would
    return _Slice.apply(data, *where)


def gru(
    X: torch.Tensor,
    W: torch.Tensor,
    R: torch.Tensor,
    B: torch.Tensor | None = None,
    SL: torch.Tensor | None = None,
    Ht0: torch.Tensor | None = None,
    **attributes: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """ONNX's GRU: every state [S, D, N, H] and the last one [D, N, H]; the attributes are those of gru_training."""
    return _GRU.apply(attributes, X, W, R, B, SL, Ht0)


def _checked(indices: torch.Tensor) -> torch.Tensor:
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices is {str(indices.dtype).removeprefix('torch.')}, expected int32 or int64")
    return indices


class _Kind(NamedTuple):
    """What an operator reads of its data, at places that are not negative, and what its gradient adds there."""

    read: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
    add: Callable[[torch.Tensor, tuple[int, ...], torch.Tensor, int], torch.Tensor]


def _rows(data: torch.Tensor, places: torch.Tensor, axis: int) -> torch.Tensor:
    shape = (*data.shape[:axis], *places.shape, *data.shape[axis + 1 :])
    return data.index_select(axis, places.reshape(-1)).reshape(shape)


# The operator itself has looked at the indices.
_ROWS = _Kind(_rows, lambda dY, shape, indices, axis: gather_grad(shape, indices, dY, axis, check=False))
_ELEMENTS = _Kind(
    lambda data, places, axis: data.gather(axis, places.to(torch.int64)),
    lambda dY, shape, indices, axis: gather_elements_grad(dY, shape, indices, axis, check=False),
)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: _Kind, data: torch.Tensor, indices: torch.Tensor, axis: int) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.kind, ctx.shape, ctx.axis = kind, tuple(data.shape), axis
        return kind.read(data, torch.where(indices < 0, indices + data.shape[axis], indices), axis)

    @staticmethod
    def backward(ctx: Any, dY: torch.Tensor) -> Any:
        return None, _GatherGrad.apply(ctx.kind, dY, ctx.shape, ctx.saved_tensors[0], ctx.axis), None, None


class _GatherGrad(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kind: _Kind, dY: torch.Tensor, shape: tuple[int, ...], indices: torch.Tensor, axis: int
    ) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.kind, ctx.axis = kind, axis
        return kind.add(dY, shape, indices, axis)

    @staticmethod
    def backward(ctx: Any, ddX: torch.Tensor) -> Any:
        return None, _Gather.apply(ctx.kind, ddX, ctx.saved_tensors[0], ctx.axis), None, None, None


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, *where: Any) -> torch.Tensor:
        ctx.shape, ctx.where = tuple(data.shape), where
        out = data
        for axis, taken in enumerate(slice_ranges(data.shape, *where)):
            if taken == (0, 1, data.shape[axis]):
                continue
            places = taken.start + taken.step * torch.arange(taken.length, device=data.device)
            out = out.index_select(axis, places)
        return out.clone()

    @staticmethod
    def backward(ctx: Any, dY: torch.Tensor) -> Any:
        return _SliceGrad.apply(dY, ctx.shape, *ctx.where), None, None, None, None


class _SliceGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dY: torch.Tensor, shape: tuple[int, ...], *where: Any) -> torch.Tensor:
        ctx.where = where
        return slice_grad(dY, shape, *where)

    @staticmethod
    def backward(ctx: Any, ddX: torch.Tensor) -> Any:
        return _Slice.apply(ddX, *ctx.where), None, None, None, None, None


class _GRU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, attributes: dict[str, Any], *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        HAll, HFinal, ZRH = gru_training(*inputs, **attributes)
        ctx.attributes = attributes
        ctx.save_for_backward(*inputs, HAll, ZRH)
        return HAll, HFinal

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dHAll: torch.Tensor, dHFinal: torch.Tensor) -> Any:
        X, W, R, B, SL, Ht0, HAll, ZRH = ctx.saved_tensors
        names = ("dX", "dW", "dR", "dB", None, "dH0")
        wanted = [name for name, asked in zip(names, ctx.needs_input_grad[1:], strict=True) if name and asked]
        results = gru_grad(
            X, W, R, B, SL, Ht0, HAll, ZRH, dHAll, dHFinal, **ctx.attributes, outputs=wanted, check=False
        )
        dX, dW, dR, dB, dH0 = results
        return None, dX, dW, dR, dB, None, dH0
