"""Convolutions, pools and Pad for onnx.reference: its own are slow, and wrong for groups, dilations and some pads."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from onnx.reference.op_run import OpRun

Sizes = Sequence[int]


def _or_ones(numbers: Sizes | None, rank: int) -> list[int]:
    return list(numbers) if numbers else [1] * rank


def _pads(auto_pad: str, pads: Sizes | None, totals: Sizes) -> tuple[list[int], list[int]]:
    """Beginnings and ends."""
    rank = len(totals)
    if auto_pad == "SAME_UPPER":
        return [t // 2 for t in totals], [t - t // 2 for t in totals]
    if auto_pad == "SAME_LOWER":
        return [t - t // 2 for t in totals], [t // 2 for t in totals]
    if auto_pad == "VALID" or not pads:
        return [0] * rank, [0] * rank
    return list(pads[:rank]), list(pads[rank:])


def _same_totals(sizes: Sizes, extents: Sizes, strides: Sizes) -> list[int]:
    return [max(-(-i // s) * s - s + e - i, 0) for i, e, s in zip(sizes, extents, strides, strict=True)]


def _extents(kernel: Sizes, dilations: Sizes) -> list[int]:
    return [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]


def _view(x: Any, kernel: Sizes, strides: Sizes, dilations: Sizes) -> Any:
    """[N, C, windows…, kernel…]"""
    rank = len(kernel)
    view = sliding_window_view(x, _extents(kernel, dilations), axis=tuple(range(2, 2 + rank)))
    steps = [slice(None, None, s) for s in [*strides, *dilations]]
    return view[(slice(None), slice(None), *steps)]


def _groups(channels: int, group: int) -> Iterator[slice]:
    size = channels // group
    return (slice(k * size, (k + 1) * size) for k in range(group))


class Conv(OpRun):
    """As ONNX defines it."""

    op_domain = ""

    def _run(self, x: Any, w: Any, b: Any = None, auto_pad: str = "NOTSET", dilations: Any = None, group: int = 1,
             kernel_shape: Any = None, pads: Any = None, strides: Any = None) -> tuple[Any]:  # fmt: skip
        rank = x.ndim - 2
        strides, dilations = _or_ones(strides, rank), _or_ones(dilations, rank)
        extents = _extents(w.shape[2:], dilations)
        first, last = _pads(auto_pad, pads, _same_totals(x.shape[2:], extents, strides))
        view = _view(np.pad(x, [(0, 0), (0, 0), *zip(first, last, strict=True)]), w.shape[2:], strides, dilations)
        taken = [1, *range(2 + rank, 2 + 2 * rank)], [1, *range(2, 2 + rank)]
        inputs, outputs = _groups(x.shape[1], group), _groups(w.shape[0], group)
        parts = [np.tensordot(view[:, i], w[o], taken) for i, o in zip(inputs, outputs, strict=True)]
        y = np.moveaxis(np.concatenate(parts, axis=-1), -1, 1)
        return (y if b is None else y + b.reshape(-1, *[1] * rank),)


class ConvTranspose(OpRun):
    """As ONNX defines it."""

    op_domain = ""

    def _run(self, x: Any, w: Any, b: Any = None, auto_pad: str = "NOTSET", dilations: Any = None, group: int = 1,
             kernel_shape: Any = None, output_padding: Any = None, output_shape: Any = None, pads: Any = None,
             strides: Any = None) -> tuple[Any]:  # fmt: skip
        rank = x.ndim - 2
        strides, dilations = _or_ones(strides, rank), _or_ones(dilations, rank)
        more = list(output_padding) if output_padding else [0] * rank
        extents = _extents(w.shape[2:], dilations)
        whole = [(i - 1) * s + e + m for i, s, e, m in zip(x.shape[2:], strides, extents, more, strict=True)]
        wanted = (
            list(output_shape)[-rank:] if output_shape else [i * s for i, s in zip(x.shape[2:], strides, strict=True)]
        )
        totals = [max(a - b, 0) for a, b in zip(whole, wanted, strict=True)]
        if output_shape and auto_pad not in ("SAME_UPPER", "SAME_LOWER"):
            auto_pad = "SAME_LOWER"
        first, last = _pads(auto_pad, pads, totals)
        if not output_shape:
            wanted = [a - f - e for a, f, e in zip(whole, first, last, strict=True)]
        room = [max(a, f + i) for a, f, i in zip(whole, first, wanted, strict=True)]
        y = np.zeros((x.shape[0], w.shape[1] * group, *room), x.dtype)
        for inputs, outputs in zip(_groups(x.shape[1], group), _groups(y.shape[1], group), strict=True):
            for at in np.ndindex(*w.shape[2:]):
                where = tuple(
                    slice(k * d, k * d + (i - 1) * s + 1, s)
                    for k, d, i, s in zip(at, dilations, x.shape[2:], strides, strict=True)
                )
                term = np.tensordot(x[:, inputs], w[(inputs, slice(None), *at)], ([1], [0]))
                y[(slice(None), outputs, *where)] += np.moveaxis(term, -1, 1)
        y = y[(slice(None), slice(None), *(slice(f, f + i) for f, i in zip(first, wanted, strict=True)))]
        return (y if b is None else y + b.reshape(-1, *[1] * rank),)


class _Pool(OpRun):
    op_domain = ""

    def windows(self, x: Any, fill: float, auto_pad: str, ceil_mode: int, dilations: Any, kernel: Any, pads: Any,
                strides: Any) -> tuple[Any, list[Any]]:  # fmt: skip
        """The windows [N, C, windows…, kernel…], and where in x each lies, by axis; NaN there is past the end pads."""
        rank = x.ndim - 2
        strides, dilations = _or_ones(strides, rank), _or_ones(dilations, rank)
        extents, sizes = _extents(kernel, dilations), x.shape[2:]
        first, last = _pads(auto_pad, pads, _same_totals(sizes, extents, strides))
        room, places = [], []
        for i, e, s, d, k, f, end in zip(sizes, extents, strides, dilations, kernel, first, last, strict=True):
            count = (i + f + end - e) // s + 1
            if ceil_mode and (i + f + end - e) % s and count * s < i + f:  # the last window starts within the image
                count += 1
            room.append((f, max((count - 1) * s + e - i - f, 0), count))
            place = (np.arange(count) * s - f)[:, None] + np.arange(k) * d
            places.append(np.where(place < i + end, place.astype(float), np.nan))
        x = np.pad(x, [(0, 0), (0, 0), *((f, end) for f, end, _ in room)], constant_values=fill)
        view = _view(x, kernel, strides, dilations)
        return view[(slice(None), slice(None), *(slice(count) for *_, count in room))], places


class MaxPool(_Pool):
    """With Indices."""

    def _run(self, x: Any, auto_pad: str = "NOTSET", ceil_mode: int = 0, dilations: Any = None,
             kernel_shape: Any = None, pads: Any = None, storage_order: int = 0,
             strides: Any = None) -> tuple[Any, Any]:  # fmt: skip
        view, places = self.windows(x, -np.inf, auto_pad, ceil_mode, dilations, kernel_shape, pads, strides)
        rank = x.ndim - 2
        flat = view.reshape(*view.shape[: 2 + rank], -1)
        chosen = np.argmax(flat, axis=-1)
        within = np.unravel_index(chosen, kernel_shape)
        at = []
        for axis, (place, k) in enumerate(zip(places, within, strict=True)):
            window = np.arange(place.shape[0]).reshape(-1, *[1] * (rank - 1 - axis))
            at.append(np.nan_to_num(place)[window, k].astype(np.int64))
        order = range(rank) if storage_order == 0 else reversed(range(rank))
        image, size = np.zeros_like(chosen), 1
        for axis in reversed(list(order)):
            image, size = image + at[axis] * size, size * x.shape[2 + axis]
        start = np.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *[1] * rank) * size
        return np.take_along_axis(flat, chosen[..., None], -1)[..., 0], start + image


class AveragePool(_Pool):
    """Windows count what lies within the image, or within its pads."""

    def _run(self, x: Any, auto_pad: str = "NOTSET", ceil_mode: int = 0, count_include_pad: int = 0,
             dilations: Any = None, kernel_shape: Any = None, pads: Any = None,
             strides: Any = None) -> tuple[Any]:  # fmt: skip
        view, places = self.windows(x, 0, auto_pad, ceil_mode, dilations, kernel_shape, pads, strides)
        rank, count = x.ndim - 2, np.ones(())
        for axis, place in enumerate(places):
            counted = ~np.isnan(place) if count_include_pad else (place >= 0) & (place < x.shape[2 + axis])
            count = count * counted.sum(1).reshape(-1, *[1] * (rank - 1 - axis))
        return (view.sum(axis=tuple(range(2 + rank, view.ndim))) / count,)


class LpPool(_Pool):
    """Roots of sums of powers."""

    def _run(self, x: Any, auto_pad: str = "NOTSET", ceil_mode: int = 0, dilations: Any = None,
             kernel_shape: Any = None, p: int = 2, pads: Any = None, strides: Any = None) -> tuple[Any]:  # fmt: skip
        view, _ = self.windows(np.abs(x) ** p, 0, auto_pad, ceil_mode, dilations, kernel_shape, pads, strides)
        return (view.sum(axis=tuple(range(x.ndim, view.ndim))) ** (1 / p),)


class GlobalMaxPool(OpRun):
    """Of any number of dimensions."""

    op_domain = ""

    def _run(self, x: Any) -> tuple[Any]:
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


class CausalConvWithState(OpRun):
    """onnx.reference computes the activation in float32, whatever it is given."""

    op_domain = ""

    def _run(
        self, x: Any, weight: Any, bias: Any = None, past_state: Any = None, activation: str | None = None
    ) -> tuple[Any, Any]:
        before = weight.shape[2] - 1
        past = np.zeros((*x.shape[:2], before), x.dtype) if past_state is None else past_state
        padded = np.concatenate([past, x], axis=2)
        windows = sliding_window_view(padded, before + 1, axis=2)
        y = np.einsum("nclk,ck->ncl", windows, weight[:, 0])
        if bias is not None:
            y = y + bias[:, None]
        if activation in ("silu", "swish"):
            y = y / (1 + np.exp(-y))
        return y, padded[:, :, padded.shape[2] - before :]


class GlobalLpPool(OpRun):
    """onnx.reference has none."""

    op_domain = ""

    def _run(self, x: Any, p: int = 2) -> tuple[Any]:
        return ((np.abs(x) ** p).sum(axis=tuple(range(2, x.ndim)), keepdims=True) ** (1 / p),)


class Pad(OpRun):
    """Negative pads cut, which onnx.reference refuses."""

    op_domain = ""

    def _run(self, x: Any, pads: Any, value: Any = None, axes: Any = None, mode: str = "constant") -> tuple[Any]:
        first, last = np.zeros((2, x.ndim), np.int64)
        chosen = list(range(x.ndim)) if axes is None else [int(a) for a in axes]
        first[chosen], last[chosen] = np.reshape(pads, (2, -1))
        kept = (slice(max(-f, 0), d - max(-e, 0)) for f, e, d in zip(first, last, x.shape, strict=True))
        fill = {"constant_values": 0 if value is None else np.reshape(value, ())} if mode == "constant" else {}
        widths = np.maximum(np.stack([first, last], axis=1), 0)
        return (np.pad(x[tuple(kept)], widths, mode=mode, **fill),)  # type: ignore[call-overload]


WINDOWS: list[type[OpRun]] = [
    Conv, ConvTranspose, CausalConvWithState, MaxPool, AveragePool, LpPool, GlobalMaxPool, GlobalLpPool, Pad,
]  # fmt: skip
