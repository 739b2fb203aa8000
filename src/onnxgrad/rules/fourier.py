"""Discrete Fourier transforms, of a whole signal or of its frames: the gradient is one in the other direction."""

from typing import Any

import onnx_ir as ir

from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import nondiff, op, vjp
from onnxgrad.rules.shape import size_along

AXIS_IS_INPUT = 20  # from this opset on


def _dft(g: Tensor, n: NodeView) -> Tensor:
    """The conjugate transpose, which is the other direction but for the factor of 1/N that the inverse has."""
    x, dft, axis = n.input, *_transform(n)
    size = op.Gather(op.Shape(x), axis)
    if n.inverse and n.onesided:
        # All frequencies but the first and the middle one stand for two.
        back = dft(g, onesided=1)
        count = op.Gather(op.Shape(g), axis)
        at = op.Range(0, op.Squeeze(op.Gather(op.Shape(back), axis), [0]), 1)
        weight = op.CastLike(op.Where(at.equals(0) | (at * 2).equals(count), 1, 2), g) / op.CastLike(count, g)
        along = op.Where(op.Range(0, x.rank, 1).equals(axis), -1, 1)
        return _resized(back * op.Reshape(weight, along), axis, size)
    length = size if n.dft_length is None else op.Reshape(n.dft_length, [1])
    if n.onesided:  # nothing depends on the other half
        g = _resized(g, axis, length)
    back, scale = dft(g, inverse=1 - n.inverse), op.CastLike(length, g)
    back = back / scale if n.inverse else back * scale
    if x.shape is None or x.shape[-1] != 2:  # of real numbers
        back = op.Slice(back, [0], size_along(x, -1), [-1])
    return back if n.dft_length is None else _resized(back, axis, size)


def _transform(n: NodeView) -> tuple[Any, Tensor]:
    """A transform along the axis of the node's, and the axis, from 0 on, as a vector of one element."""
    if n.builder.opsets[""] >= AXIS_IS_INPUT:
        axis = -2 if n.axis is None else n.axis
        return lambda x, **options: op.DFT(x, None, axis, **options), op.Mod(op.Reshape(axis, [1]), [n.input.rank])
    given = n.node.attributes.get("axis")
    axis = 1 if given is None else given.as_int()
    return lambda x, **options: op.DFT(x, None, axis=axis, **options), op.Mod([axis], [n.input.rank])


def _resized(x: Tensor, axis: Tensor, size: Tensor) -> Tensor:
    """With zeros at the end of an axis, or without what is there."""
    return op.Pad(x, op.Concat([0], size - op.Gather(op.Shape(x), axis), axis=0), None, axis)


vjp("DFT", input=_dft, dft_length=nondiff, axis=nondiff)


def _frames(n: NodeView) -> tuple[Tensor, Tensor]:
    """Where STFT's frames read the signal, [frames, elements], and the number of elements in a vector."""
    if n.window is not None:
        length = op.Shape(n.window)
    elif n.frame_length is not None:
        length = op.Cast(op.Reshape(n.frame_length, [1]), to=ir.DataType.INT64)
    else:
        length = size_along(n.signal, 1)
    count, elements = (op.Range(0, op.Squeeze(size, [0]), 1) for size in (size_along(n.output, 1), length))
    step = op.Cast(op.Reshape(n.frame_step, [1]), to=ir.DataType.INT64)
    return op.Unsqueeze(count * step, [1]) + elements, length


def _of_windowed_frames(g: Tensor, n: NodeView, length: Tensor) -> Tensor:
    """The gradient of what STFT transforms."""
    if n.onesided:  # nothing depends on the other half
        g = _resized(g, n.builder.constant([2], ir.DataType.INT64), length)
    has_axis_input = n.builder.opsets[""] >= AXIS_IS_INPUT
    back = op.DFT(g, None, 2, inverse=1) if has_axis_input else op.DFT(g, None, axis=2, inverse=1)
    back = back * op.CastLike(length, g)
    return back if n.signal.shape[-1] == 2 else op.Slice(back, [0], size_along(n.signal, -1), [-1])


def _stft_signal(g: Tensor, n: NodeView) -> Tensor:
    at, length = _frames(n)
    frames = _of_windowed_frames(g, n, length)
    if n.window is not None:
        frames = frames * op.Unsqueeze(n.window, [1])
    return op.GatherGrad(op.Shape(n.signal), at, frames, axis=1)


def _stft_window(g: Tensor, n: NodeView) -> Tensor:
    at, length = _frames(n)
    return op.ReduceSum(_of_windowed_frames(g, n, length) * op.Gather(n.signal, at, axis=1), [0, 1, 3], keepdims=0)


vjp("STFT", signal=_stft_signal, frame_step=nondiff, window=_stft_window, frame_length=nondiff)
